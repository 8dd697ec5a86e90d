"""Packs that go over 1, 2, 4 … ranks, in slots: each is read by one of its ranks, in turn, and sent
to the others. So no pack is decoded twice, and all ranks read equally much."""

from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from launch.config import LaunchConfig
from launch.data.broadcast import broadcast_batch, group_of_size
from launch.data.packed_data import PackedData
from offline_packing.errors import StageError
from task_encoders.energon_samples import PackedBatch


class Share(NamedTuple):
    """One rank's share of a slot."""

    #: ranks that its pack goes over
    num_ranks: int
    #: the one of them that reads it
    reader: int
    #: on that one
    row: PackedBatch | None

    def received(self, device: torch.device) -> PackedBatch:
        """The row, on each of its ranks. A collective of all ranks."""
        group = group_of_size(self.num_ranks)
        if group is None:
            assert self.row is not None
            return self.row
        row: Any = broadcast_batch(self.row, device, group, self.reader)
        return row if self.row is not None else replace(row, dropped=[])  # its reader names these


def check_slots(config: LaunchConfig, data: PackedData) -> None:
    """Check a run's options against packs in slots. Raises StageError if they contradict them."""
    if data.slots is None:
        return
    needed: dict[str, Any] = {"parallel.context": 1, "data.micro_batch_size": 1}
    needed |= {"data.pad_to_seq_length": False, "data.pad_to_length": False}
    for name, only in {**needed, "data.order": "written"}.items():
        if (value := attrgetter(name)(config)) != only:
            raise StageError(
                f"{name}={value}: packs of {config.data.path} go over 1, 2, 4 … ranks in slots of "
                f"equal cost, a pack to a row; set {only}"
            )
