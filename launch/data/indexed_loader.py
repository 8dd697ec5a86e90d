"""A loader of packs by their numbers, with the calls of Energon's: rows, and a state to go on from.

Row n of an endless sequence of epochs goes to rank n modulo the number of ranks, so every epoch
has each row once, ranks are never more than one row apart, and a rank's state is two numbers.
"""

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from task_encoders.energon_samples import PackedBatch
from task_encoders.loading.folder_shards import dealt_in_rows
from task_encoders.loading.indexed_dataset import IndexedPackDataset
from task_encoders.loading.packed_folder import PackedFolder


class FolderRows(Dataset[PackedBatch]):
    """Rows of packs by their numbers, to be dealt to the ranks in turn. Where the packs' steps are
    of one kind, so are those of rows of several packs, but for the last that divide unevenly."""

    def __init__(
        self, packs: PackedFolder | IndexedPackDataset, size: int = 1, num_ranks: int = 1
    ) -> None:
        self._packs, self._size = packs, size
        is_uniform = packs.uniform_ranks and packs.uniform_ranks % num_ranks == 0
        dealt = dealt_in_rows(len(packs), num_ranks, size) if is_uniform else None
        self._numbers = dealt or range(len(packs))

    def __len__(self) -> int:
        return -(-len(self._numbers) // self._size)

    def __getitem__(self, number: int) -> PackedBatch:
        return self._packs.batch(self._numbers[number * self._size : (number + 1) * self._size])


class IndexedLoader:
    """The rows of one rank, in the order of the dataset.

    Args:
        dataset: of rows, with a length.
        num_workers: processes that encode; 0: the calling one does.
        repeat: begin again at the end; otherwise a pass ends there.
        limit: rows of a pass at most.
        timeout: seconds without a row from a worker that are taken for a hang.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
        repeat: bool = False,
        limit: int | None = None,
        timeout: int = 0,
    ) -> None:
        self._dataset: Any = dataset
        self._rank, self._world_size = rank, world_size
        self._num_workers, self._timeout = num_workers, timeout
        self._repeat, self._limit = repeat, limit
        #: rows of this pass that were given out by this rank, since this row
        self._delivered = self._begin = 0
        self._rows: Any = None
        #: what torch draws its workers' seeds from, at each pass: not where dropout is drawn from,
        #: which would differ after resuming
        self._generator = torch.Generator()

    def __iter__(self) -> Iterator[Any]:
        self.close()
        self._rows = iter(
            DataLoader(
                self._dataset,
                batch_size=None,
                sampler=self._numbers(self._delivered),
                num_workers=self._num_workers,
                timeout=self._timeout if self._num_workers else 0,
                worker_init_fn=leave_group,
                generator=self._generator,
            )
        )
        for row in self._rows:
            self._delivered += 1
            yield row
        self._delivered = self._begin = 0

    def _numbers(self, delivered: int) -> Iterator[int]:
        """Row numbers that this rank has yet to yield."""
        begin = self._begin + self._rank
        places = range(begin, len(self._dataset), self._world_size)
        if self._repeat:
            first = begin + delivered * self._world_size
            return (n % len(self._dataset) for n in itertools.count(first, self._world_size))
        return itertools.islice(places, delivered, self._limit)

    def save_state_rank(self) -> Mapping[str, int]:
        """State of this rank."""
        return {"begin": self._begin, "delivered": self._delivered}

    def restore_state_rank(self, state: Mapping[str, int]) -> None:
        """Go on where a state was saved."""
        self._begin, self._delivered = int(state["begin"]), int(state["delivered"])

    def deal_anew(self, states: Sequence[Mapping[str, int]]) -> None:
        """Go on after the rows that ranks of another number gave out."""
        given = sum(state["delivered"] for state in states)
        self._begin, self._delivered = int(states[0]["begin"] + given), 0

    def close(self) -> None:
        """End the workers."""
        if self._num_workers and self._rows is not None:
            self._rows._shutdown_workers()  # torch has no public name for it
        self._rows = None


def leave_group(worker_id: int) -> None:
    """Leave the trainer's process group: torchrun sends SIGTERM to the whole group, and a trainer
    that has to save must not find its loader dead. A worker always ends with its trainer."""
    os.setpgid(0, 0)
