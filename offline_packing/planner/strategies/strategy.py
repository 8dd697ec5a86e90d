"""A strategy: a function from lengths to packs, and the options that it declares."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict

from offline_packing.planner.strategies.kernels import Kernel, counting_sort


class Packs(NamedTuple):
    """Pack i holds the samples ``sample_ids[pack_offsets[i]:pack_offsets[i + 1]]``.

    Three packs of five samples: ``sample_ids [4, 0, 2, 1, 3]``, ``pack_offsets [0, 2, 3, 5]``.
    """

    #: int32 or int64 (num_samples,): indices into the ``num_tokens`` that was packed
    sample_ids: np.ndarray
    #: int64 (num_packs + 1,): starts at 0, ends at num_samples, no pack is empty
    pack_offsets: np.ndarray

    @property
    def num_packs(self) -> int:
        """Number of packs."""
        return len(self.pack_offsets) - 1

    def pack_of_slot(self) -> np.ndarray:
        """Return the pack that each of ``sample_ids`` is in: int64 (num_samples,)."""
        return np.repeat(np.arange(self.num_packs), np.diff(self.pack_offsets))

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Sum over each pack of ``values``, int64 (num_samples, …) of the samples by their id."""
        return np.add.reduceat(values[self.sample_ids], self.pack_offsets[:-1], dtype=np.int64)

    def of(self, ids: np.ndarray) -> "Packs":
        """Return the same packs with ``ids`` in place of the samples' numbers."""
        return Packs(ids[self.sample_ids], self.pack_offsets)


def join_packs(parts: Sequence[Packs]) -> Packs:
    """Join the packs of all parts, in their order."""
    sizes = np.concatenate([[0], *(np.diff(part.pack_offsets) for part in parts)])
    sample_ids = np.concatenate([np.zeros(0, np.int64), *(part.sample_ids for part in parts)])
    return Packs(sample_ids, np.cumsum(sizes, dtype=np.int64))


@Kernel
def _gather_packs(packs: Packs, order: np.ndarray, out: Packs) -> None:
    end = 0
    for place in range(order.shape[0]):
        pack = order[place]
        for source in range(packs.pack_offsets[pack], packs.pack_offsets[pack + 1]):
            out.sample_ids[end] = packs.sample_ids[source]
            end += 1
        out.pack_offsets[place + 1] = end


def reorder_packs(packs: Packs, order: np.ndarray) -> Packs:
    """Put the chosen packs into the given order: place i gets pack ``order[i]``."""
    size = int((packs.pack_offsets[order + 1] - packs.pack_offsets[order]).sum())
    offsets = np.zeros(len(order) + 1, np.int64)
    reordered = Packs(np.empty(size, packs.sample_ids.dtype), offsets)
    _gather_packs(packs, order, reordered)
    return reordered


class StrategyOptions(BaseModel):
    """Options of a strategy beside sizes, limits and seed: by itself none. Every field has a
    default, and a description for help and guide."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True)
class Strategy:
    """Packs samples: every sample in exactly one pack, no pack over a limit."""

    #: f(sizes, limits, *, seed), and ``options`` where it declares any; ``sizes`` int64
    #: (num_samples, num_limits), tokens first and at least 1, are within ``limits`` (num_limits,)
    function: Callable[..., Packs]
    options: type[StrategyOptions] = StrategyOptions
    #: whether it decides on the histogram of lengths, and can honour no limit but tokens
    lengths_only: bool = False

    def __call__(
        self, sizes: np.ndarray, limits: np.ndarray | int, *, seed: int = 0, **options: Any
    ) -> Packs:
        """Pack the samples; ``sizes`` may be the tokens alone, (num_samples,). Raises ValueError
        for options that the strategy lacks, or values out of range."""
        given = {"options": self.options(**options)} if self.options.model_fields else {}
        sizes = np.asarray(sizes, np.int64)
        sizes = sizes[:, np.newaxis] if sizes.ndim == 1 else sizes
        return self.function(sizes, np.atleast_1d(limits), seed=seed, **given)


def group_into_packs(order: np.ndarray, pack_of: np.ndarray) -> Packs:
    """Group samples by pack. Sample ``order[i]`` was placed i-th, into pack ``pack_of[i]``. Within
    a pack, samples stay in the order they were placed in."""
    offsets = np.append(0, np.cumsum(np.bincount(pack_of)))
    places = np.empty(len(pack_of), np.int64)
    counting_sort(pack_of, offsets, places)
    return Packs(order[places], offsets)
