"""Packs that go over 1, 2, 4 … ranks: a slot of them (`packs.slots`) is a step of a schedule.

folder = PackedFolder("out/packed", task_encoder)
slots = SlotsInTurn(folder, num_ranks=32)
for row in ScheduledLoader(folder, slots, rank, slots.collate):
    ...  # the whole row, the same on each of the row.local_cp_size ranks that share it
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from task_encoders.field_types import Count, checked
from task_encoders.loading.folder_shards import PackedFolderError
from task_encoders.loading.packed_folder import PackedFolder, RawPack
from task_encoders.loading.schedule import Epoch, InTurn, Numbers, Stretch
from task_encoders.packs.manifest import read_manifest
from task_encoders.packs.slots import Slots
from task_encoders.storage.paths import REMEDY

if TYPE_CHECKING:
    from task_encoders.energon_samples import PackedBatch


@dataclass(frozen=True)
class _Epoch:
    """An epoch of slots: turns of groups of ranks, and where the packs begin."""

    turns: Epoch
    ranks: int
    begins: Numbers

    @property
    def begun(self) -> tuple[Stretch, ...]:
        return tuple(Stretch(one.num_ranks * self.ranks, one.steps) for one in self.turns.begun)

    def __len__(self) -> int:
        return len(self.turns)

    def items(self, step: int, rank: int) -> Numbers:
        group, place = divmod(rank, self.ranks)
        wanted = self.turns.items(step, group) * self.ranks + place
        return np.searchsorted(self.begins, wanted, "right") - 1


class SlotsInTurn:
    """Slots in written order, which is random: groups of ranks take them in turn, as `InTurn` deals
    packs to ranks. Each rank trains the pack that goes over it.

    Args:
        folder: one folder of packs, with a task encoder; not a blend.
        num_ranks: a multiple of the ranks that the packs were planned for.
        repeat: whether another epoch follows.

    Raises:
        PackedFolderError: the packs were not planned for slots, or for other numbers of ranks.
    """

    @checked
    def __init__(self, folder: PackedFolder, num_ranks: Count, *, repeat: bool = True) -> None:
        self.slots, self.num_ranks, self._folder = _slots_of(folder), num_ranks, folder
        ranks = self.slots.over.ranks
        if num_ranks % ranks:
            raise PackedFolderError(
                f"{folder.path}: slots are for {ranks} ranks, and there are {num_ranks}; train on "
                f"a multiple, or pack again with pack.context_parallel.ranks={num_ranks}"
            )
        self._turns = InTurn([len(self.slots)], num_ranks // ranks, repeat=repeat)
        described = repr(("slots", ranks)).encode() + self.slots.cp_sizes.tobytes()
        self.digest = hashlib.sha256(described).hexdigest()[:16]

    def epoch(self, number: int, earlier: Sequence[Stretch] = ()) -> _Epoch:
        """See `Schedule`."""
        ranks = self.slots.over.ranks
        of_groups = [Stretch(one.num_ranks // ranks, one.steps) for one in earlier]
        return _Epoch(self._turns.epoch(number, of_groups), ranks, self.slots.begins)

    def collate(self, packs: Sequence[RawPack]) -> "PackedBatch":
        """A pack's row. Raises SampleError if it has no usable sub-sample."""
        return self._folder.collate(packs, in_slots=True)


def _slots_of(folder: PackedFolder) -> Slots:
    """The slots that the packs of a folder fill."""
    roots = {shard.root for shard in folder.shards}
    manifest = read_manifest(next(iter(roots))) if len(roots) == 1 else None
    slots = manifest.slots(folder.split) if manifest is not None else None
    if slots is None:
        what = "a blend" if len(roots) > 1 else "packed without pack.context_parallel.ranks"
        raise PackedFolderError(
            f"{folder.path} is {what}: its packs fill no slots; pack all sources in one output, "
            "with pack.context_parallel={ranks: …, tokens_per_rank: …}"
        )
    if len(slots.cp_sizes) != len(folder) or slots.cp_sizes.sum() % slots.over.ranks:
        raise PackedFolderError(
            f"{folder.path}: manifest.json has the ranks of {len(slots.cp_sizes)} packs, which "
            f"fill no slots of {slots.over.ranks} ranks, for {len(folder)} packs; {REMEDY}"
        )
    return slots
