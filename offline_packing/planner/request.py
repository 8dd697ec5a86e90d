"""What plan_packs was asked for, checked, and cut to some of the samples."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from offline_packing.planner.admission import Admission
from offline_packing.planner.order import SAMPLE_ORDERS, RankLayout
from offline_packing.planner.rules import check_combination
from offline_packing.planner.strategies import STRATEGIES

ASSIGNMENTS = ("shuffle", "locality", "mix", "balance")


@dataclass(frozen=True)
class PlanRequest:
    """The arguments of plan_packs that decide how samples are packed. Arrays are per sample."""

    seq_length: int
    strategy: str
    seed: int
    assignment: frozenset[str]
    window_packs: int
    homogeneous: bool
    min_fill: float
    min_samples: int
    sample_order: str
    lengths: np.ndarray
    sizes: Mapping[str, tuple[np.ndarray, int]] = field(default_factory=dict)
    groups: np.ndarray | None = None
    weights: Mapping[int, float] | None = None
    cost: np.ndarray | None = None
    source_order: np.ndarray | None = None
    balance_by: np.ndarray | None = None
    copy_of: np.ndarray | None = None
    order: RankLayout | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def admitted(self, admission: Admission) -> "PlanRequest":
        """The same request for the samples that can be packed, with the lengths that count.

        Raises:
            ValueError: an array has not one entry per sample.
        """
        count = len(self.lengths)
        arrays: dict[str, Any] = {name: np.asarray(a) for name, a in self._arrays().items()}
        sizes = {name: (np.asarray(array), limit) for name, (array, limit) in self.sizes.items()}
        named = {f"budgets[{name!r}]": array for name, (array, _) in sizes.items()} | arrays
        for name, array in named.items():
            if array.shape != (count,):
                raise ValueError(
                    f"{name} has shape {array.shape} for {count} samples; pass one entry per sample"
                )
        request = replace(self, sizes=sizes, **arrays)
        if admission.sample_ids is not None:
            request = request.subset(admission.sample_ids)
        return replace(request, lengths=admission.lengths)

    def subset(self, chosen: np.ndarray) -> "PlanRequest":
        """The same request for some of the samples: bool or index array."""
        return replace(
            self,
            sizes={name: (array[chosen], limit) for name, (array, limit) in self.sizes.items()},
            options={
                name: value[chosen] if is_per_sample(value, len(self.lengths)) else value
                for name, value in self.options.items()
            },
            **{name: array[chosen] for name, array in self._arrays().items()},
        )

    def _arrays(self) -> dict[str, Any]:
        """The arrays with one entry per sample."""
        names = ("lengths", "groups", "cost", "source_order", "balance_by", "copy_of")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @property
    def windowed(self) -> bool:
        """Whether packs follow a given order of the samples."""
        return not self.assignment.isdisjoint(("locality", "mix"))


def is_per_sample(value: object, num_samples: int) -> bool:
    """Whether an option of a strategy is an array with one entry per sample."""
    return isinstance(value, np.ndarray) and value.shape == (num_samples,)


def check_request(request: PlanRequest) -> None:
    """Raise ValueError for names that do not exist and arguments that do not go together."""
    check_strategy(request.strategy)
    STRATEGIES[request.strategy].options(**request.options)
    unknown = request.assignment - set(ASSIGNMENTS)
    if unknown:
        raise ValueError(
            f"assignment {min(unknown)!r} is unknown; choose among {', '.join(ASSIGNMENTS)}"
        )
    if request.sample_order not in SAMPLE_ORDERS:
        raise ValueError(
            f"sample_order {request.sample_order!r} is unknown; choose one of "
            f"{', '.join(SAMPLE_ORDERS)}"
        )
    wants = request.assignment
    _check_given("assignment locality", "locality" in wants, source_order=request.source_order)
    _check_given("assignment mix", "mix" in wants, groups=request.groups)
    _check_given("assignment balance", "balance" in wants, balance_by=request.balance_by)
    _check_given("homogeneous", request.homogeneous, groups=request.groups)
    if not 0 <= request.min_fill <= 1:
        raise ValueError(f"min_fill is {request.min_fill}; it is a share of seq_length, 0 to 1")
    check_combination(
        strategy=request.strategy,
        assignment=wants,
        budgets=request.sizes,
        has_order=request.order is not None,
        homogeneous=False,  # what its groups are is the caller's choice
        min_samples=request.min_samples,
        max_samples=request.sizes["samples"][1] if "samples" in request.sizes else None,
    )


def check_strategy(name: str) -> None:
    """Raise ValueError with the valid names if there is no such strategy."""
    if name not in STRATEGIES:
        raise ValueError(f"strategy {name!r} is unknown; choose one of {', '.join(STRATEGIES)}")


def _check_given(what: str, asked: bool, **arrays: np.ndarray | None) -> None:
    for name, array in arrays.items():
        if asked and array is None:
            raise ValueError(f"{what} needs {name}, an array with one entry per sample")
