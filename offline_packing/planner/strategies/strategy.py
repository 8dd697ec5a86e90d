"""A strategy: a function from lengths to packs, and the options that it declares."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict

from offline_packing.planner.strategies.kernels import counting_sort


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
        """The pack that each of ``sample_ids`` is in: int64 (num_samples,)."""
        return np.repeat(np.arange(self.num_packs), np.diff(self.pack_offsets))

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Sum over each pack of ``values``, int64 (num_samples, …) of the samples by their id."""
        return np.add.reduceat(values[self.sample_ids], self.pack_offsets[:-1], dtype=np.int64)

    def of(self, ids: np.ndarray) -> "Packs":
        """The same packs, with ``ids`` in place of the samples' numbers."""
        return Packs(ids[self.sample_ids], self.pack_offsets)


def join_packs(parts: Sequence[Packs]) -> Packs:
    """The packs of all parts, in their order."""
    sizes = np.concatenate([[0], *(np.diff(part.pack_offsets) for part in parts)])
    sample_ids = np.concatenate([np.zeros(0, np.int64), *(part.sample_ids for part in parts)])
    return Packs(sample_ids, np.cumsum(sizes, dtype=np.int64))


class StrategyOptions(BaseModel):
    """Options of a strategy beside sizes, limits and seed: by itself none. Every field has
    a default and a description, which is what help and guide say of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True)
class Strategy:
    """Packs samples of ``num_tokens``, integers (num_samples,) in 1..seq_length: every sample in
    exactly one pack, no pack over ``seq_length`` or a budget."""

    #: f(lengths, seq_length, *, seed), and ``options`` where it declares any; lengths are int32
    function: Callable[..., Packs]
    options: type[StrategyOptions] = StrategyOptions
    #: f(sizes, limits, *, seed), and ``options``: the same under budgets; sizes are int64
    #: (num_samples, num_limits) and limits (num_limits,), tokens first. None: the strategy decides
    #: on the histogram of lengths, and can honour no budget
    under_limits: Callable[..., Packs] | None = None

    def __call__(
        self,
        num_tokens: np.ndarray,
        seq_length: int,
        *,
        seed: int = 0,
        budgets: Mapping[str, tuple[np.ndarray, int]] | None = None,
        **options: Any,
    ) -> Packs:
        """The packs. ``budgets``: name -> (sizes (num_samples,), limit per pack); `check_budgets`
        says whether it honours any. Raises ValueError for samples that no pack can hold, and for
        options that it lacks, or values out of range."""
        parsed = self.options(**options)
        given = {"options": parsed} if self.options.model_fields else {}
        lengths = check_lengths(num_tokens, seq_length)
        if not budgets:
            return self.function(lengths, seq_length, seed=seed, **given)
        assert self.under_limits is not None
        amounts = [check_amounts(name, *budget, len(lengths)) for name, budget in budgets.items()]
        limits = np.array([seq_length, *(limit for _, limit in budgets.values())])
        sizes = np.stack([lengths, *amounts], axis=1).astype(np.int64)
        return self.under_limits(sizes, limits, seed=seed, **given)


def under_limits(
    function: Callable[..., Packs], options: type[StrategyOptions] = StrategyOptions
) -> Strategy:
    """The strategy that runs the same function whether there are budgets or not."""

    def by_length(lengths: np.ndarray, seq_length: int, **given: Any) -> Packs:
        return function(lengths[:, np.newaxis].astype(np.int64), np.array([seq_length]), **given)

    return Strategy(by_length, options, function)


def check_lengths(num_tokens: np.ndarray, seq_length: int, *, first_sample: int = 0) -> np.ndarray:
    """The lengths as contiguous int32 (num_samples,), all in 1..seq_length. Raises ValueError for a
    wrong type or shape, and for the first length that no pack can hold; samples are counted from
    ``first_sample``."""
    lengths = np.asarray(num_tokens)
    if lengths.ndim != 1 or (lengths.size and lengths.dtype.kind not in "iu"):
        raise ValueError(
            f"num_tokens must be integers of shape (num_samples,), got {lengths.dtype} of shape "
            f"{lengths.shape}"
        )
    bad = (lengths < 1) | (lengths > seq_length)
    if bad.any():
        sample = int(bad.argmax())
        raise ValueError(
            f"sample {first_sample + sample} has {lengths[sample]} tokens, not in 1..seq_length "
            f"{seq_length}; set such samples aside before packing"
        )
    return np.ascontiguousarray(lengths, np.int32)


def check_amounts(
    name: str, amounts: np.ndarray, limit: int, num_samples: int, *, first_sample: int = 0
) -> np.ndarray:
    """Sizes of the samples in a budget, as int64 (num_samples,), all in 0..limit. Raises
    ValueError for a wrong shape, and for the first sample that no pack can hold."""
    amounts = np.asarray(amounts)
    if amounts.shape != (num_samples,):
        raise ValueError(f"{name} has shape {amounts.shape}, num_tokens ({num_samples},)")
    if num_samples and amounts.dtype.kind not in "iu":
        raise ValueError(f"{name} has type {amounts.dtype}; pass integers")
    amounts = amounts.astype(np.int64)
    bad = (amounts < 0) | (amounts > limit)
    if bad.any():
        sample = int(bad.argmax())
        raise ValueError(
            f"sample {first_sample + sample} has {amounts[sample]} {name}, not in 0..{limit}, the "
            "budget of a pack; set such samples aside before packing"
        )
    return amounts


def group_into_packs(order: np.ndarray, pack_of: np.ndarray, num_packs: int) -> Packs:
    """Packs from the pack of every placed sample. Sample ``order[i]`` was placed i-th, into pack
    ``pack_of[i]``; every pack in 0..num_packs - 1 has a sample. Within a pack, samples stay in the
    order they were placed in."""
    offsets = np.append(0, np.cumsum(np.bincount(pack_of, minlength=num_packs)))
    places = np.empty(len(pack_of), np.int64)
    counting_sort(pack_of, offsets, places)
    return Packs(order[places], offsets)
