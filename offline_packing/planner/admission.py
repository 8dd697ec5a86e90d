"""Which samples can be packed at all, and the lengths that the planner counts for them."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

#: (size of each sample, limit per pack): vision patches, images, …
Budgets = Mapping[str, tuple[np.ndarray, int]]

EMPTY = "empty"
OVER_SEQ_LENGTH = "over_seq_length"
MAX_SEQ_LENGTH = 2**31 - 1
_CHUNK = 1 << 20  # samples handled at a time: temporaries stay in cache and far below the input


class Admission(NamedTuple):
    """Samples to pack and samples set aside."""

    #: int (num_admitted,) sample indices, or None if every sample is admitted
    sample_ids: np.ndarray | None
    #: int32 (num_admitted,): lengths in 1..seq_length, padded to the multiple
    lengths: np.ndarray
    #: int (num_set_aside,) ascending
    set_aside_ids: np.ndarray
    #: uint8 (num_set_aside,): index into reason_names
    set_aside_reasons: np.ndarray
    reason_names: tuple[str, ...]


def admit_samples(
    num_tokens: np.ndarray,
    seq_length: int,
    *,
    pad_multiple: int = 1,
    budgets: Budgets | None = None,
) -> Admission:
    """Check all inputs; set aside samples without tokens, too long, or over a budget on their own.

    ``num_tokens`` is an integer array (num_samples,). A sample that fails several limits gets the
    first reason of: empty, over_seq_length, over_budget:NAME in the order of ``budgets``.
    Raises ValueError naming the argument, the value and the limit.
    """
    num_tokens = _checked_sizes("num_tokens", num_tokens)
    budgets = budgets or {}
    _check_limits(seq_length, pad_multiple, budgets)
    sizes = {
        name: _checked_sizes(f"budgets[{name!r}]", array, len(num_tokens))
        for name, (array, _) in budgets.items()
    }
    names = (EMPTY, OVER_SEQ_LENGTH, *(f"over_budget:{name}" for name in budgets))
    longest = seq_length // pad_multiple * pad_multiple
    within = all(array.max(initial=0) <= budgets[name][1] for name, array in sizes.items())
    if within and num_tokens.min(initial=1) >= 1 and num_tokens.max(initial=1) <= longest:
        none = np.zeros(0, _id_type(len(num_tokens)))
        lengths = _padded(num_tokens, pad_multiple)
        return Admission(None, lengths, none, none.astype(np.uint8), names)
    reasons = np.zeros(len(num_tokens), np.uint8)  # 0: admitted, else 1 + index of the reason
    for number, (name, array) in reversed(list(enumerate(sizes.items()))):
        reasons[array > budgets[name][1]] = number + 3
    reasons[num_tokens > longest] = 2
    reasons[num_tokens == 0] = 1
    ids = np.flatnonzero(reasons == 0).astype(_id_type(len(num_tokens)))
    aside = np.flatnonzero(reasons).astype(ids.dtype)
    return Admission(ids, _padded(num_tokens[ids], pad_multiple), aside, reasons[aside] - 1, names)


def _id_type(num_samples: int) -> type[np.signedinteger]:
    return np.int32 if num_samples < 2**31 else np.int64


def _padded(num_tokens: np.ndarray, multiple: int) -> np.ndarray:
    """Lengths rounded up to the multiple: writable contiguous int32, as the kernels expect."""
    if multiple == 1:
        return np.require(num_tokens, np.int32, ["C", "W"])
    padded = np.empty(len(num_tokens), np.int32)
    for start in range(0, len(num_tokens), _CHUNK):
        chunk = num_tokens[start : start + _CHUNK].astype(np.int64)
        padded[start : start + _CHUNK] = -(-chunk // multiple) * multiple
    return padded


def _checked_sizes(name: str, sizes: np.ndarray, num_samples: int | None = None) -> np.ndarray:
    """``sizes`` as a plain array, if it is one-dimensional, integer, aligned and not negative."""
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


def _check_limits(seq_length: int, pad_multiple: int, budgets: Budgets) -> None:
    if not 1 <= seq_length <= MAX_SEQ_LENGTH:
        raise ValueError(f"seq_length is {seq_length}; it must be 1 to {MAX_SEQ_LENGTH}")
    if not 1 <= pad_multiple <= seq_length:
        raise ValueError(
            f"pad_multiple is {pad_multiple}; it must be 1 to seq_length {seq_length}, "
            "or no sample fits a pack"
        )
    for name, (_, limit) in budgets.items():
        if limit < 1:
            raise ValueError(
                f"budgets[{name!r}] has limit {limit}; it must be at least 1, or leave it out"
            )
