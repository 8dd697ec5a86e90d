"""A loader of packs that go over 1, 2, 4 … ranks, in slots: each is read by one of its ranks, in
turn, and sent to the others. So no pack is decoded twice, and all ranks read equally much."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset

from launch.config import LaunchConfig
from launch.data.broadcast import broadcast_batch, group_of_size
from launch.data.indexed_loader import IndexedLoader
from launch.data.packed_data import PackedData
from offline_packing.errors import StageError
from task_encoders.energon_samples import PackedBatch
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.loading.slots import SlotRows


class Share(NamedTuple):
    """One rank's share of a slot."""

    #: ranks that its pack goes over
    cp_size: int
    #: the one of them that reads it
    reader: int
    #: on that one
    row: PackedBatch | None


class _Shares(Dataset[Share]):
    """One rank's share of each slot, by the slot's number."""

    def __init__(self, rows: SlotRows, rank: int) -> None:
        self._rows, self._rank = rows, rank

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, slot: int) -> Share:
        size, first = int(self._rows.cp_sizes[slot]), int(self._rows.first_ranks[slot])
        reader = slot % size
        row = self._rows[slot] if first + reader == self._rank else None
        return Share(size, reader, row)


class SlotLoader(IndexedLoader):
    """The rows of one rank, in the order that slots were written in. All ranks iterate together.

    Args:
        folder: packs in slots.
        slot_ranks: ranks of a slot; several such groups of ranks take turns.
        options: of IndexedLoader.
    """

    def __init__(
        self,
        folder: PackedFolder,
        slot_ranks: int,
        device: torch.device,
        *,
        rank: int,
        world_size: int,
        **options: Any,
    ) -> None:
        place, groups = rank % slot_ranks, world_size // slot_ranks
        shares = _Shares(SlotRows(folder, place, slot_ranks), place)
        super().__init__(shares, rank=rank // slot_ranks, world_size=groups, **options)
        self._slot_ranks, self._device = slot_ranks, device

    def __iter__(self) -> Iterator[PackedBatch]:
        for size, reader, own in super().__iter__():
            group = group_of_size(size)
            row: Any = own if group is None else broadcast_batch(own, self._device, group, reader)
            yield row if own is not None else replace(row, dropped=[])  # its reader names these

    def deal_anew(self, states: Sequence[Mapping[str, int]]) -> None:
        """Go on after the slots that another number of groups gave out."""
        super().deal_anew(states[:: self._slot_ranks])


def check_slots(config: LaunchConfig, data: PackedData) -> None:
    """Check that a run asks nothing of packs in slots that they cannot give. Raises StageError."""
    if data.slots is None:
        return
    for section, name in (
        (config.parallel, "context"),
        (config.data, "micro_batch_size"),
        (config.data, "pad_to_seq_length"),
        (config.data, "pad_to_length"),
    ):
        value, default = getattr(section, name), type(section).model_fields[name].default
        if value != default:
            where = "parallel" if section is config.parallel else "data"
            raise StageError(
                f"{where}.{name}={value}: packs of {config.data.path} go over 1, 2, 4 … ranks in "
                f"slots, a pack to a row; set {default}"
            )
    if config.data.order == "balanced":
        raise StageError(
            f"data.order=balanced: packs of {config.data.path} fill slots of equal cost already; "
            "set written"
        )
