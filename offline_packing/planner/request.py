"""Request of a plan: checked, and cut to the samples that can be packed at all."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from offline_packing.planner.context_parallel import ContextParallel
from offline_packing.planner.options import PlanOptions

if TYPE_CHECKING:
    from offline_packing.planner.order import RankLayout

#: (size of each sample, limit per pack): vision patches, images, …
Budgets = Mapping[str, tuple[np.ndarray, int]]

EMPTY = "empty"
OVER_SEQ_LENGTH = "over_seq_length"
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


@dataclass(frozen=True)
class PlanRequest:
    """The arguments of plan_packs that decide how samples are packed. Arrays are per sample."""

    options: PlanOptions
    window_packs: int
    lengths: np.ndarray
    sizes: Budgets = field(default_factory=dict)
    groups: np.ndarray | None = None
    cost: np.ndarray | None = None
    tower_cost: np.ndarray | None = None
    media: np.ndarray | None = None
    features: Sequence[np.ndarray] = ()
    source_order: np.ndarray | None = None
    balance_by: np.ndarray | None = None
    copy_of: np.ndarray | None = None
    order: "RankLayout | None" = None
    context_parallel: ContextParallel | None = None
    picture_ranks: int | None = None
    units: np.ndarray | None = None
    #: the multiple that lengths are padded to
    unit: int = 1
    mixed: bool = False

    def admitted(self, admission: Admission) -> "PlanRequest":
        """The same request for the samples that can be packed, with the lengths that count. Raises
        ValueError if an array lacks one entry per sample."""
        arrays: dict[str, Any] = {name: np.asarray(a) for name, a in self._arrays().items()}
        features = {f"features[{i}]": array for i, array in enumerate(self.features)}
        for name, array in (arrays | features).items():
            if array.shape != (len(self.lengths),):
                raise ValueError(
                    f"{name} has shape {array.shape} for {len(self.lengths)} samples; pass one "
                    "entry per sample"
                )
        for name in {"cost", "tower_cost"} & arrays.keys():
            arrays[name] = checked_costs(arrays[name], name)
        sizes = {name: (np.asarray(array), limit) for name, (array, limit) in self.sizes.items()}
        request = replace(self, sizes=sizes, **arrays)
        if admission.sample_ids is not None:
            request = request.subset(admission.sample_ids)
        return replace(request, lengths=admission.lengths)

    def subset(self, chosen: np.ndarray) -> "PlanRequest":
        """The same request for some of the samples: bool or index array."""
        sizes = {name: (array[chosen], limit) for name, (array, limit) in self.sizes.items()}
        features = [array[chosen] for array in self.features]
        arrays = {name: array[chosen] for name, array in self._arrays().items()}
        return replace(self, sizes=sizes, features=features, **arrays)

    def _arrays(self) -> dict[str, Any]:
        """The arrays with one entry per sample."""
        names = "lengths groups cost tower_cost media units source_order balance_by copy_of".split()
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def check(self) -> None:
        """Raise ValueError for an array that is missing, and options that do not go together."""
        for what, needs, name in (
            ("assignment locality", self.options.has_locality, "source_order"),
            ("assignment balance", "balance" in self.options.assignment, "balance_by"),
            ("homogeneous", self.options.homogeneous, "groups"),
            ("order.uniform", self.order is not None and self.order.uniform, "media"),
            ("picture_ranks", self.picture_ranks is not None, "units"),
            ("picture_ranks", self.picture_ranks is not None, "tower_cost"),
        ):
            if needs and getattr(self, name) is None:
                raise ValueError(f"{what} needs {name}, an array with one entry per sample")
        self.options.check_limits(
            self.sizes,
            has_order=self.order is not None,
            context_parallel=self.context_parallel,
            mixed=self.mixed,
        )


def check_known(what: str, name: str, known: Collection[str]) -> None:
    """Raise ValueError with the valid names for one that is not among them."""
    if name not in known:
        raise ValueError(f"{what} {name!r} is unknown; choose one of {', '.join(known)}")


def admit_samples(
    num_tokens: np.ndarray, seq_length: int, pad_multiple: int = 1, budgets: Budgets | None = None
) -> Admission:
    """Check all inputs; set aside samples without tokens, too long, or over a budget on their own.
    ``num_tokens`` is an integer array (num_samples,). A sample that fails several limits gets the
    first reason of: empty, over_seq_length, over_budget:NAME in the order of ``budgets``. Raises
    ValueError naming the argument, the value and the limit."""
    num_tokens = checked_sizes("num_tokens", num_tokens)
    budgets = budgets or {}
    for name, (_, limit) in budgets.items():
        if limit < 1:
            raise ValueError(
                f"budgets[{name!r}] has limit {limit}; it must be at least 1, or leave it out"
            )
    sizes = {
        name: checked_sizes(f"budgets[{name!r}]", array, len(num_tokens))
        for name, (array, _) in budgets.items()
    }
    names = (EMPTY, OVER_SEQ_LENGTH, *(f"over_budget:{name}" for name in budgets))
    id_type = np.int32 if len(num_tokens) < 2**31 else np.int64
    longest = seq_length // pad_multiple * pad_multiple
    within = all(array.max(initial=0) <= budgets[name][1] for name, array in sizes.items())
    if within and num_tokens.min(initial=1) >= 1 and num_tokens.max(initial=1) <= longest:
        none = np.zeros(0, id_type)
        lengths = _padded(num_tokens, pad_multiple)
        return Admission(None, lengths, none, none.astype(np.uint8), names)
    reasons = np.zeros(len(num_tokens), np.uint8)  # 0: admitted, else 1 + index of the reason
    for number, (name, array) in reversed(list(enumerate(sizes.items()))):
        reasons[array > budgets[name][1]] = number + 3
    reasons[num_tokens > longest] = 2
    reasons[num_tokens == 0] = 1
    ids = np.flatnonzero(reasons == 0).astype(id_type)
    aside = np.flatnonzero(reasons).astype(id_type)
    return Admission(ids, _padded(num_tokens[ids], pad_multiple), aside, reasons[aside] - 1, names)


def _padded(num_tokens: np.ndarray, multiple: int) -> np.ndarray:
    """Lengths rounded up to the multiple: writable contiguous int32, as the kernels expect."""
    if multiple == 1:
        return np.require(num_tokens, np.int32, ["C", "W"])
    padded = np.empty(len(num_tokens), np.int32)
    for start in range(0, len(num_tokens), _CHUNK):
        chunk = num_tokens[start : start + _CHUNK].astype(np.int64)
        padded[start : start + _CHUNK] = -(-chunk // multiple) * multiple
    return padded


def checked_sizes(
    name: str, sizes: np.ndarray | Sequence[int], num_samples: int | None = None
) -> np.ndarray:
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


def checked_costs(cost: np.ndarray | Sequence[float], name: str = "cost") -> np.ndarray:
    """Costs as float64. Raises ValueError for the first that is not a number of at least 0."""
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
