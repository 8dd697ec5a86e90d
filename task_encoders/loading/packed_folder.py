"""A packed folder as a map-style dataset: any pack by its number, for trainers that want `len` and
`[i]` instead of a loader.

    folder = PackedFolder("out/packed", task_encoder)
    folder[7]               a pack's bytes, as written
    folder.row(7)           encoded, as Energon's loader encodes it
    folder.batch([7, 9])    both in one row

    DataLoader(folder, batch_sampler=…, collate_fn=folder.collate)      encodes in its workers

Opening reads only the `.idx` of each shard: where each pack begins, and the end. No file stays
open, so that a folder can be pickled and forked.
"""

import io
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, SupportsIndex

import numpy as np

from task_encoders.loading.folder_shards import (
    PackedFolderError,
    ShardRange,
    find_shards,
    order_of_steps,
    read_index,
)
from task_encoders.packs.manifest import PackColumns, ShardLine, read_manifest, written_again
from task_encoders.packs.pack import Pack, PackFormatError
from task_encoders.packs.pack_format import JSON_PART
from task_encoders.packs.stored_media import pack_of
from task_encoders.samples import SampleError
from task_encoders.storage.paths import REMEDY, path_of, read_range
from task_encoders.threads import in_threads

if TYPE_CHECKING:
    from task_encoders.energon_samples import PackedBatch, PackedRowSample
    from task_encoders.packed_task_encoder import PackedTaskEncoder

#: Key and part of a member, as Energon parts them; and members that Energon takes for notes.
_MEMBER: Final = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")
_NOTE: Final = re.compile(r"__[^/]*__($|/)")


class RawPack(NamedTuple):
    """One pack as it is stored."""

    key: str
    #: its JSON, parsed
    record: Any
    #: content by name: 'img000.jpg'
    media: Mapping[str, bytes]
    #: its number in the folder
    number: int
    #: settings of its dataset
    subflavors: Mapping[str, Any]


class PackedFolder:
    """The packs of one split, in written order, under `pack.order` step by step. Implements torch's
    protocol of map-style datasets.

    A blend is one epoch over which the datasets' packs are spread evenly. A pack comes as often as
    `blend_epochized` repeats its dataset, or by the weights of a `blend`, at least once; a warning
    names datasets whose packs come more often. Outside the train split, datasets follow each other.

    Args:
        path: a folder or a metadataset YAML, here or s3://bucket/packs, gs://, msc://PROFILE/packs.
            Metadatasets need Energon.
        task_encoder: for rows and batches; its settings are compared with the folder's.
        split: train, val or test.

    Raises:
        PackedFolderError: there is no such split, or an index is missing or damaged.
        PackingSettingsError: the environment or the task encoder contradicts the data.
    """

    def __init__(
        self,
        path: str | Path,
        task_encoder: "PackedTaskEncoder | None" = None,
        *,
        split: str = "train",
    ) -> None:
        self.path = path_of(path)
        self.task_encoder = task_encoder
        self.split = split
        #: the place of each pack among all that the shards hold, (len,)
        self.shards, order = find_shards(path, split)
        #: ranks that take the packs of each step in turn (`pack.order`); 0: packs have no steps
        self.order, self.step_ranks, is_uniform = order_of_steps(self.shards, order, split)
        self.uniform_ranks = self.step_ranks if is_uniform else 0
        indices = list(in_threads(read_index, self.shards, 16))  # remote ones take their time
        #: place of the first pack of each shard, and the number of all
        self._firsts = np.cumsum([0, *(len(index) - 1 for index in indices)])
        #: one more per shard than it has packs
        self._offsets = np.concatenate([np.empty(0, np.int64), *indices])
        if task_encoder is not None:  # as it checks the datasets that Energon gives it
            flavors_of = {shard.root: shard.subflavors for shard in self.shards}
            task_encoder.is_blend |= len(flavors_of) > 1
            for folder, flavors in flavors_of.items():
                own = flavors.get("offline_packing")
                task_encoder.settings.resolve_task(None, own, blend=task_encoder.is_blend)
                task_encoder.check_manifest(folder)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, number: SupportsIndex) -> RawPack:
        """Read a pack. Raises IndexError, and PackedFolderError if a shard is damaged or written
        again."""
        wanted = index(number)
        if not -len(self) <= wanted < len(self):
            raise IndexError(f"{self.path} has {len(self)} packs, no number {wanted}")
        wanted %= len(self)
        place = int(self.order[wanted])
        shard_number = int(np.searchsorted(self._firsts, place, "right")) - 1
        start, end = self._offsets[place + shard_number :][:2].tolist()
        shard = self.shards[shard_number]
        try:
            return RawPack(*_read_pack(shard, start, end), wanted, shard.subflavors)
        except PackedFolderError as error:
            if line := written_again(shard.root, _generation(shard)):
                raise PackedFolderError(line) from error
            raise

    def __getitems__(self, numbers: Sequence[int]) -> list[RawPack]:
        """Read packs for torch's DataLoader, and have it refuse its default collation."""
        from torch.utils.data._utils.collate import default_collate_fn_map

        default_collate_fn_map[RawPack] = _refuse_collation  # torch's documented extension
        return [self[number] for number in numbers]

    def __reduce__(self) -> tuple[Any, ...]:
        """Open the folder again where it is unpickled."""
        opened = {shard.root: _generation(shard) for shard in self.shards}
        return _open_again, (type(self), opened, str(self.path), self.task_encoder, self.split)

    def __iter__(self) -> Iterator[RawPack]:
        return map(self.__getitem__, range(len(self)))

    def columns(self) -> PackColumns | None:
        """Return media and operations of each pack; None if a manifest is missing. Raises
        ManifestError."""
        lines: dict[Path, ShardLine] = {}
        for root in {shard.root for shard in self.shards}:
            manifest = read_manifest(root)
            if manifest is None:
                return None
            lines |= {root / line.name: line for line in manifest.shards}
        own = [(lines[one.path], slice(one.start, one.end)) for one in self.shards]
        media = np.concatenate([line.media_of_packs()[packs] for line, packs in own])[self.order]
        flops = np.concatenate([line.flops_of_packs()[packs] for line, packs in own])[self.order]
        return PackColumns(media, *flops.T)

    def row(self, number: int) -> "PackedRowSample":
        """Encode a pack; `split_row(row.row)` gives back its sub-samples, whose keys are
        `row.sub_sample_keys`. Raises SampleError if no sub-sample can be used, and FatalSampleError
        if the pack was written after the folder was opened."""
        return self._encode(self[number])

    def batch(self, numbers: Sequence[int]) -> "PackedBatch":
        """Encode packs to one row with merged cu_lengths, as the Energon loader's micro batch."""
        return self.collate([self[number] for number in numbers])

    def collate(self, packs: Sequence[RawPack]) -> "PackedBatch":
        """Encode packs that were read to one row: a DataLoader's `collate_fn`. `dropped` names
        packs without a usable sub-sample.

        Raises:
            SampleError: no pack has a usable sub-sample.
        """
        rows, dropped = [], []
        for number, pack in enumerate(packs, 1):
            try:
                rows.append(self._encode(pack))
            except SampleError as error:
                if number == len(packs) and not rows:
                    raise
                dropped.append(f"{pack.key}: {error}")
        batch = self._task_encoder.batch(rows)
        batch.dropped[:0] = dropped
        return batch

    @property
    def _task_encoder(self) -> "PackedTaskEncoder":
        if self.task_encoder is None:
            raise PackedFolderError(f"{self.path}: rows need a task_encoder; give one")
        return self.task_encoder

    def _encode(self, pack: RawPack) -> "PackedRowSample":
        notes = {
            "__restore_key__": ("PackedFolder", pack.number),
            "__subflavors__": dict(pack.subflavors),
        }
        try:
            return self._task_encoder.encode_pack(Pack(*pack[:3]), **notes)
        except PackFormatError as error:
            raise SampleError("bad_record", str(error)) from error  # as Energon's loader goes on


def _refuse_collation(packs: Sequence[RawPack], **_: object) -> None:
    raise PackedFolderError(
        f"pack {packs[0].key!r}: torch's default collation cannot join packs; give the DataLoader "
        "collate_fn=folder.collate, with a PackedFolder that has a task_encoder"
    )


def _generation(shard: ShardRange) -> str:
    """Return the generation of a shard's packs when its folder was opened; "" if unknown."""
    return str(shard.subflavors.get("generation", ""))


def _open_again(
    cls: type[PackedFolder], opened: Mapping[Path, str], path: str, task_encoder: Any, split: str
) -> PackedFolder:
    """Open the same folder in another process. Raises PackedFolderError if it was written again
    since it was first opened: its packs have other numbers."""
    for root, generation in opened.items():
        if line := written_again(root, generation):
            raise PackedFolderError(line)
    return cls(path, task_encoder, split=split)


def _read_pack(shard: ShardRange, start: int, end: int) -> Pack:
    """Read the pack in these bytes of a shard. Raises PackedFolderError if it is cut or damaged."""
    where = f"{shard.path}, bytes {start} to {end}"
    found: dict[str, dict[str, bytes]] = {}
    try:
        data = read_range(shard.path, start, end)
        if len(data) < end - start:
            raise PackedFolderError(
                f"{where}: the file ends {end - start - len(data)} bytes early; {REMEDY}"
            )
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            for member in tar:
                match = _MEMBER.fullmatch(member.name)
                content = tar.extractfile(member)
                if match is not None and content is not None and not _NOTE.match(member.name):
                    found.setdefault(match[1], {})[match[2]] = content.read()
        key, members = next(iter(found.items()), ("", {}))
        if len(found) != 1 or JSON_PART not in members:
            raise PackedFolderError(
                f"{where}: {len(found)} packs instead of one with its JSON; verify the folder"
            )
        pack = pack_of(key, members, shard.root)
        return pack._replace(media=dict(pack.media))
    except OSError as error:
        raise PackedFolderError(f"{where}: {error.strerror or error}; {REMEDY}") from error
    except tarfile.TarError as error:
        raise PackedFolderError(f"{where}: damaged ({error}); {REMEDY}") from error
    except PackFormatError as error:
        raise PackedFolderError(f"{where}: {error}") from error
