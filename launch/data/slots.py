"""Packs that go over 1, 2, 4 … ranks, in slots: each is read by one of its ranks, in turn, and sent
to the others. So no pack is decoded twice, and all ranks read equally much."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from launch.config import LaunchConfig
from launch.data.broadcast import broadcast_batch, group_of_size
from launch.data.packed_data import PackedData
from offline_packing.errors import StageError
from task_encoders.energon_samples import PackedBatch, empty_batch
from task_encoders.families import FAMILIES
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.loading.slots import SlotRows
from task_encoders.packs.pack_format import cut_multiple
from task_encoders.samples import SampleError


class Share(NamedTuple):
    """One rank's share of a slot."""

    #: ranks that its pack goes over
    num_ranks: int
    #: the one of them that reads it
    reader: int
    #: on that one
    row: PackedBatch | None

    @classmethod
    def read(cls, folder: PackedFolder, rows: SlotRows, numbers: Sequence[int]) -> "Share":
        """The share that has this row; one of padding if its pack has no usable sub-sample."""
        (number,) = numbers
        pack, slot = rows.pack_of(number), number // rows.slots.over.ranks
        num_ranks = int(rows.slots.cp_sizes[pack])
        reader = slot % num_ranks
        if number - rows.slots.begins[pack] != reader:
            return cls(num_ranks, reader, None)
        try:
            return cls(num_ranks, reader, rows[number])
        except SampleError as error:
            padding = padding_row(folder, [folder[pack].key], error, num_ranks)
            return cls(num_ranks, reader, padding)

    def received(self, device: torch.device) -> PackedBatch:
        """The row, on each of its ranks. A collective of all ranks."""
        group = group_of_size(self.num_ranks)
        if group is None:
            assert self.row is not None
            return self.row
        row: Any = broadcast_batch(self.row, device, group, self.reader)
        return row if self.row is not None else replace(row, dropped=[])  # its reader names these


def padding_row(
    folder: PackedFolder, keys: Sequence[str], error: SampleError, num_ranks: int | None = None
) -> PackedBatch:
    """A row in place of packs without a usable sub-sample, so that ranks keep in step; over
    `num_ranks` if packs differ in that."""
    encoder = folder.task_encoder
    assert encoder is not None
    multiple = encoder.pad_multiple
    row = empty_batch(
        FAMILIES[encoder.model.family].build.POSITION_ROWS,
        multiple if num_ranks is None else cut_multiple(num_ranks, multiple),
        keys=keys,
        dropped=[f"{', '.join(keys)}: {error}"],
    )
    return replace(row, local_cp_size=num_ranks)


def check_slots(config: LaunchConfig, data: PackedData) -> None:
    """Check a run's options against packs in slots. Raises StageError if they contradict them."""
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
