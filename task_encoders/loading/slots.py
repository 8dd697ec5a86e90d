"""Packs that go over 1, 2, 4 … ranks: a row for each rank, slot after slot (`packs.slots`).

    rows = SlotRows(PackedFolder("out/packed", task_encoder))
    for row in ScheduledLoader(rows, rows.in_turn(num_ranks=32), rank):
        ...  # the row of a whole pack

Each of the `row.local_cp_size` ranks that share a pack gets the same row.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from task_encoders.field_types import Count, checked
from task_encoders.loading.folder_shards import PackedFolderError
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.loading.schedule import InTurn
from task_encoders.packs.manifest import read_manifest
from task_encoders.storage.paths import REMEDY, path_of

if TYPE_CHECKING:
    from task_encoders.energon_samples import PackedBatch


def slot_ranks_of(path: str | Path) -> int:
    """Ranks that a slot of packs takes; 1: each pack is trained on one. Raises ManifestError."""
    manifest = read_manifest(path_of(path))
    slots = manifest.context_parallel if manifest else None
    return slots.ranks if slots else 1


class SlotRows:
    """Rows of slots in written order, which is random: row s · R + r is that of rank r in slot s of
    R ranks. Ranks that share a pack have the same rows. A map-style dataset of torch.

    Args:
        folder: one folder of packs, with a task encoder; not a blend.

    Raises:
        PackedFolderError: the packs were not planned for slots.
    """

    def __init__(self, folder: PackedFolder) -> None:
        roots = {shard.root for shard in folder.shards}
        manifest = read_manifest(next(iter(roots))) if len(roots) == 1 else None
        slots = manifest.slots(folder.split) if manifest is not None else None
        if slots is None:
            what = "a blend" if len(roots) > 1 else "packed without pack.context_parallel.ranks"
            raise PackedFolderError(
                f"{folder.path} is {what}: its packs fill no slots; pack all sources in one "
                "output, with pack.context_parallel={ranks: …, tokens_per_rank: …}"
            )
        self._folder, self.slots = folder, slots
        if len(slots.cp_sizes) != len(folder) or len(self) % slots.over.ranks:
            raise PackedFolderError(
                f"{folder.path}: manifest.json has the ranks of {len(slots.cp_sizes)} packs, which "
                f"fill no slots of {slots.over.ranks} ranks, for {len(folder)} packs; {REMEDY}"
            )

    def __len__(self) -> int:
        """Rows of all ranks in all slots."""
        return int(self.slots.cp_sizes.sum())

    def __getitem__(self, number: int) -> "PackedBatch":
        """A rank's row of a slot. Raises SampleError if its pack has no usable sub-sample."""
        row, encoder = self._folder.row(self.pack_of(number)), self._folder.task_encoder
        assert encoder is not None  # row raises without
        return encoder.batch([row])

    def pack_of(self, number: int) -> int:
        """The pack of a row."""
        return int(np.searchsorted(self.slots.begins, number, "right")) - 1

    @staticmethod
    def collate(rows: Sequence["PackedBatch"]) -> "PackedBatch":
        """A rank trains a row at a time."""
        (row,) = rows
        return row

    @checked
    def in_turn(self, num_ranks: Count, *, repeat: bool = True) -> InTurn:
        """The schedule of a slot per step; if there are a multiple of its ranks, of several. Raises
        PackedFolderError for other numbers."""
        ranks = self.slots.over.ranks
        if num_ranks % ranks:
            raise PackedFolderError(
                f"{self._folder.path}: slots are for {ranks} ranks, and there are {num_ranks}; "
                f"train on a multiple, or pack again with pack.context_parallel.ranks={num_ranks}"
            )
        return InTurn([len(self)], num_ranks, repeat=repeat)
