"""A dataset of packs that are stored as token ids: the same rows as from tars, in any order.

Works with torch's DataLoader and any number of its workers; Energon's loader is not involved.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from task_encoders.energon_samples import PackedBatch, PackedRowSample
from task_encoders.families import model_options
from task_encoders.loading.folder_shards import ShardRange, order_of_steps, read_columns
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.packs.indexed_file import IndexedFile, IndexedPack
from task_encoders.packs.manifest import (
    WRITTEN_AGAIN,
    PackColumns,
    read_manifest,
    written_again,
)
from task_encoders.packs.pack import PackFormatError
from task_encoders.packs.pack_format import PREFIX
from task_encoders.packs.tokenized import fingerprint_digest
from task_encoders.storage.paths import path_of


class IndexedPackDataset(Dataset[PackedBatch]):
    """The packs in `PREFIX.bin` and `PREFIX.idx`, in written order; under
    `pack.order.uniform`, those of each step side by side. See `packs.indexed_file`.

    Args:
        prefix: path of the two files without their endings.
        task_encoder: default: as the manifest beside the files says; the environment says what the
            packs are.

    Raises:
        PackFormatError: there are no such packs, or they are damaged.
        PackingSettingsError: the environment or the task encoder contradicts them.
    """

    def __init__(self, prefix: str | Path, task_encoder: PackedTaskEncoder | None = None) -> None:
        self._file = IndexedFile(prefix)
        self.path = path_of(prefix)
        folder = self.path.parent
        self.task_encoder = task_encoder or _task_encoder_of(folder)
        self.task_encoder.check_manifest(folder)
        _, _, split = self.path.name.partition(f"{PREFIX}_")
        self._shards = [ShardRange(self.path, self.path.parent, {}, 0, len(self._file))]
        written = np.arange(len(self._file))
        #: as those of a `PackedFolder`
        self.order, self.uniform_ranks = order_of_steps(self._shards, written, split or "train")
        if len(self._file):
            self.task_encoder.settings.resolve_task(self._file[0].task)
        self._digest = fingerprint_digest(self.task_encoder.encoder.fingerprint)
        manifest = read_manifest(folder)
        #: of the packs as they were opened; "": nothing beside them says so
        self._generation = manifest.generation if manifest else ""

    def __len__(self) -> int:
        """Packs."""
        return len(self._file)

    def __getitem__(self, number: int) -> PackedBatch:
        """A row of one pack. Raises PackFormatError if the file of an image has another size or
        time, or the image other tokens, than when it was packed, or the packs were written again;
        SampleError if nothing of it can be used."""
        if not 0 <= number < len(self):
            raise IndexError(f"pack {number} of {len(self)}")
        return self.batch([number])

    def batch(self, packs: Iterable[int]) -> PackedBatch:
        """Packs, by their numbers, in one row with merged cu_lengths. Raises as `[i]`."""
        numbers = self.order[list(packs)].tolist()
        return self.task_encoder.batch([self._encode(self._read(number)) for number in numbers])

    def columns(self) -> PackColumns | None:
        """Media and operations of each pack; None where the manifest does not record them."""
        return read_columns(self._shards, self.order)

    def _read(self, number: int) -> IndexedPack:
        """A pack. Raises PackFormatError, also where the files were written again: what is opened
        here keeps its bytes, but not what another process or a request to a storage opens."""
        try:
            pack = self._file[number]
        except (PackFormatError, LookupError, ValueError, TypeError) as error:
            line = written_again(self.path.parent, self._generation)
            if line is None:
                raise
            raise PackFormatError(line) from error
        if self._generation and pack.generation != self._generation:
            found = f"pack {pack.key!r} of {self.path}"
            raise PackFormatError(WRITTEN_AGAIN.format(found, pack.generation, self._generation))
        return pack

    def _encode(self, pack: IndexedPack) -> PackedRowSample:
        if pack.made_with != self._digest:
            raise PackFormatError(
                f"the token ids of pack {pack.key!r} were made with other settings than the task "
                "encoder has (tokenizer, template or limits of images); give it the same"
            )
        encoded = self.task_encoder.encode_pack(pack.pack)
        row = encoded.row
        # Tokens of the sub-samples that are left: one whose image cannot be decoded was dropped.
        is_left = np.isin(pack.sub_sample_keys, encoded.sub_sample_keys)
        is_left = np.repeat(is_left, np.diff(pack.cu_lengths))
        for name in ("tokens", "labels"):
            stored = torch.from_numpy(getattr(pack, name)[is_left].astype("int64"))
            if not torch.equal(getattr(row, name)[~row.attn_mask], stored):
                raise PackFormatError(
                    f"pack {pack.key!r} is not trained as it is stored: its media have changed"
                )
        return encoded


def _task_encoder_of(folder: Path) -> PackedTaskEncoder:
    """The task encoder that packs were measured with."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise PackFormatError(f"{folder} has no manifest.json of packs; give a task_encoder")
    model = model_options(**manifest.config["model"])
    return PackedTaskEncoder(seq_length=manifest.seq_length, model=model)
