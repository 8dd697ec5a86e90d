"""Packs that go over 1, 2, 4 … ranks: the rows of one rank, slot after slot.

    slot 0   pack 0 over ranks 0 to 3, pack 1 over 4 and 5, packs 2 and 3 over 6 and 7
    slot 1   pack 4 over all

A pack over n ranks begins at a rank that is a multiple of n, so that n ranks from there, a group
that is made once, share it.
"""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from task_encoders.field_types import Count, Integer, checked
from task_encoders.loading.folder_shards import PackedFolderError
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.packs.manifest import Manifest, read_manifest
from task_encoders.storage.paths import REMEDY

if TYPE_CHECKING:
    from task_encoders.energon_samples import PackedBatch


class SlotRows(Dataset["PackedBatch"]):
    """One rank's row of each slot, by the slot's number, in written order, which is random. The
    ranks of a pack get the same whole row; `local_cp_size` says how many share it, and
    `first_ranks` who they are. A map-style dataset for `DataLoader(rows, batch_size=None)`.

    Args:
        folder: one folder of packs, with a task encoder; not a blend.
        rank: this rank's number.
        num_ranks: the number that the packs were planned for.

    Raises:
        PackedFolderError: the packs were not planned for slots, or for another number of ranks.
    """

    @checked
    def __init__(self, folder: PackedFolder, rank: Integer, num_ranks: Count) -> None:
        manifest = _manifest_of(folder)
        assert manifest.context_parallel is not None
        if num_ranks != manifest.context_parallel.ranks or not 0 <= rank < num_ranks:
            raise PackedFolderError(
                f"{folder.path}: slots are for {manifest.context_parallel.ranks} ranks, and this "
                f"is rank {rank} of {num_ranks}; train on as many, or pack again with "
                f"pack.context_parallel.ranks={num_ranks}"
            )
        lines = [line for line in manifest.shards if line.split == folder.split]
        cp_sizes = np.array([size for line in lines for size in line.cp_sizes], np.int64)
        if len(cp_sizes) != len(folder) or cp_sizes.sum() % num_ranks:
            raise PackedFolderError(
                f"{folder.path}: manifest.json has the ranks of {len(cp_sizes)} packs, which fill "
                f"no slots of {num_ranks} ranks, for {len(folder)} packs; {REMEDY}"
            )
        self._folder = folder
        begins = np.cumsum(cp_sizes) - cp_sizes
        #: int64 (num_slots,): this rank's pack in each slot
        self.packs: npt.NDArray[np.int64] = (
            np.searchsorted(begins, np.arange(rank, cp_sizes.sum(), num_ranks), "right") - 1
        )
        #: int64 (num_slots,): the ranks that its pack goes over, and the first of them
        self.cp_sizes, self.first_ranks = cp_sizes[self.packs], begins[self.packs] % num_ranks

    def __len__(self) -> int:
        """Slots."""
        return len(self.packs)

    def __getitem__(self, slot: int) -> "PackedBatch":
        """This rank's row of a slot. Raises SampleError if its pack has no usable sub-sample."""
        row, encoder = self._folder.row(int(self.packs[slot])), self._folder.task_encoder
        assert encoder is not None  # row raises without
        return encoder.batch([row])


def _manifest_of(folder: PackedFolder) -> Manifest:
    """The manifest of a folder whose packs fill slots."""
    roots = {shard.root for shard in folder.shards}
    manifest = read_manifest(next(iter(roots))) if len(roots) == 1 else None
    if manifest is None or manifest.context_parallel is None:
        what = "a blend" if len(roots) > 1 else "packed without pack.context_parallel.ranks"
        raise PackedFolderError(
            f"{folder.path} is {what}: its packs fill no slots; pack all sources in one output, "
            "with pack.context_parallel={ranks: …, tokens_per_rank: …}"
        )
    return manifest
