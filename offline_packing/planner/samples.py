"""The table that is planned: sizes and limits, and named columns for what needs them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np

#: (size of each sample, limit per pack): vision patches, images, …
Budgets = Mapping[str, tuple[np.ndarray, int]]

EMPTY = "empty"
OVER_SEQ_LENGTH = "over_seq_length"
_CHUNK = 1 << 20  # samples handled at a time: temporaries stay in cache and far below the input


class Column(NamedTuple):
    """A quantity of each sample, and what a tree has of it: one sample, or several of a prefix."""

    #: (num_samples,)
    values: np.ndarray
    #: the sum over all samples, of a further one less `of_prefix`; the first sample's; or one
    #: number for all trees that samples of equal values join, directly or by others
    of_tree: Literal["sum", "first", "joined"] | None = None
    #: (num_samples,): of the sample's prefix alone
    of_prefix: np.ndarray | None = None


@dataclass(frozen=True)
class Table:
    """What is known of samples before they are planned."""

    num_tokens: Column
    #: further limits per pack, by name
    budgets: Mapping[str, tuple[Column, int]]
    #: by their names as arguments of `plan_packs`
    columns: Mapping[str, Column]

    def sized(self) -> list[Column]:
        """Return the columns that a pack is limited in, tokens first."""
        return [self.num_tokens, *(column for column, _ in self.budgets.values())]


@dataclass(frozen=True)
class Samples:
    """Samples that can be packed, each within every limit."""

    #: int32 (num_samples,) in 1..seq_length: tokens, padded to the multiple
    lengths: np.ndarray
    seq_length: int
    #: further limits per pack
    budgets: Budgets
    #: (num_samples,) each, by their names as arguments of `plan_packs`
    columns: Mapping[str, np.ndarray]

    def subset(self, chosen: np.ndarray) -> "Samples":
        """Return some of the samples, by a bool or index array."""
        return Samples(
            self.lengths[chosen],
            self.seq_length,
            {name: (array[chosen], limit) for name, (array, limit) in self.budgets.items()},
            {name: array[chosen] for name, array in self.columns.items()},
        )

    def limited(self) -> tuple[np.ndarray, np.ndarray]:
        """Return sizes int64 (num_samples, num_limits), tokens first, and the limits of a pack."""
        arrays = [self.lengths, *(array for array, _ in self.budgets.values())]
        limits = [self.seq_length, *(limit for _, limit in self.budgets.values())]
        return np.stack(arrays, axis=1).astype(np.int64), np.array(limits)


class Admission(NamedTuple):
    """Samples to pack and samples set aside."""

    samples: Samples
    #: int (num_admitted,) their numbers in the input, or None if every sample is admitted
    sample_ids: np.ndarray | None
    #: int (num_set_aside,) ascending
    set_aside_ids: np.ndarray
    #: uint8 (num_set_aside,): index into reason_names
    set_aside_reasons: np.ndarray
    reason_names: tuple[str, ...]


def admit_samples(
    num_tokens: np.ndarray,
    seq_length: int,
    multiple: int = 1,
    budgets: Budgets = MappingProxyType({}),
    columns: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> Admission:
    """Check all inputs; set aside samples without tokens, too long, or over a budget on their own.
    ``num_tokens`` is an integer array (num_samples,). A sample that fails several limits gets the
    first reason of: empty, over_seq_length, over_budget:NAME in the order of ``budgets``. Raises
    ValueError naming the argument, the value and the limit."""
    num_tokens = checked_sizes("num_tokens", num_tokens)
    budgets = {
        name: (checked_sizes(f"budgets[{name!r}]", array, len(num_tokens)), limit)
        for name, (array, limit) in budgets.items()
    }
    for name, (_, limit) in budgets.items():
        if limit < 1:
            raise ValueError(
                f"budgets[{name!r}] has limit {limit}; it must be at least 1, or leave it out"
            )
    given = {name: np.asarray(array) for name, array in columns.items()}
    for name, array in given.items():
        if array.shape != num_tokens.shape:
            raise ValueError(
                f"{name} has shape {array.shape} for {len(num_tokens)} samples; pass one entry per "
                "sample"
            )
    for name in {"cost", "tower_cost"} & given.keys():
        given[name] = checked_costs(given[name], name)
    names = (EMPTY, OVER_SEQ_LENGTH, *(f"over_budget:{name}" for name in budgets))
    id_type = np.int32 if len(num_tokens) < 2**31 else np.int64
    longest = seq_length // multiple * multiple
    within = all(array.max(initial=0) <= limit for array, limit in budgets.values())
    if within and num_tokens.min(initial=1) >= 1 and num_tokens.max(initial=1) <= longest:
        none = np.zeros(0, id_type)
        samples = Samples(_padded(num_tokens, multiple), seq_length, budgets, given)
        return Admission(samples, None, none, none.astype(np.uint8), names)
    reasons = np.zeros(len(num_tokens), np.uint8)  # 0: admitted, else 1 + index of the reason
    for number, (array, limit) in reversed(list(enumerate(budgets.values()))):
        reasons[array > limit] = number + 3
    reasons[num_tokens > longest] = 2
    reasons[num_tokens == 0] = 1
    ids = np.flatnonzero(reasons == 0).astype(id_type)
    aside = np.flatnonzero(reasons).astype(id_type)
    samples = Samples(num_tokens, seq_length, budgets, given).subset(ids)
    samples = replace(samples, lengths=_padded(samples.lengths, multiple))
    return Admission(samples, ids, aside, reasons[aside] - 1, names)


def _padded(num_tokens: np.ndarray, multiple: int) -> np.ndarray:
    """Round lengths up to the multiple; return writable contiguous int32, as the kernels expect."""
    if multiple == 1:
        return np.require(num_tokens, np.int32, ["C", "W"])
    padded = np.empty(len(num_tokens), np.int32)
    for start in range(0, len(num_tokens), _CHUNK):
        chunk = num_tokens[start : start + _CHUNK].astype(np.int64)
        padded[start : start + _CHUNK] = -(-chunk // multiple) * multiple
    return padded


def check_known(what: str, name: str, known: Collection[str]) -> None:
    """Raise ValueError with the valid names for one that is not among them."""
    if name not in known:
        raise ValueError(f"{what} {name!r} is unknown; choose one of {', '.join(known)}")


def checked_sizes(
    name: str, sizes: np.ndarray | Sequence[int], num_samples: int | None = None
) -> np.ndarray:
    """Return ``sizes`` as a plain array. Raises ValueError unless it is one-dimensional, of
    integers of at least 0, and has ``num_samples`` entries."""
    array = np.asarray(sizes)
    if array.size == 0 and array.ndim == 1:
        array = array.astype(np.int32)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"{name} has shape {array.shape} and type {array.dtype}; "
            "pass a one-dimensional integer array"
        )
    if num_samples is not None and len(array) != num_samples:
        raise ValueError(
            f"{name} has {len(array)} entries for {num_samples} samples; pass one per sample"
        )
    if array.min(initial=0) < 0:
        first = int(np.argmax(array < 0))
        raise ValueError(
            f"{name}[{first}] is {int(array[first])} < 0; sizes are counts: check for an "
            "overflowed integer type in the index"
        )
    return array


def checked_costs(cost: np.ndarray | Sequence[float], name: str = "cost") -> np.ndarray:
    """Return costs as float64. Raises ValueError for the first that is not a finite number of at
    least 0."""
    array = np.asarray(cost)
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{name} has type {array.dtype}; pass an array of numbers")
    bad = ~((array >= 0) & np.isfinite(array)).ravel()
    if bad.any():
        first = int(bad.argmax())
        raise ValueError(
            f"{name}[{first}] is {array.ravel()[first]}; it must be finite and at least 0"
        )
    return array.astype(np.float64, copy=False)
