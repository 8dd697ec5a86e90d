"""Passes over a draft of a plan: the list of those that are asked for is what runs, in its order.

compose: by strategy | in windows | by mixture   ->   uniform kinds   ->   equal cost | shuffle   ->
sample order

A pass keeps what earlier ones promise, or is refused beside them, here and nowhere else.
Configurations are checked with the list, so what compiles is imported where a pass runs.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from offline_packing.planner.options import PlanRequest
from offline_packing.planner.samples import Samples

if TYPE_CHECKING:
    from offline_packing.planner.strategies.strategy import Packs

_SAMPLE_ORDER_STREAM = 1  # random numbers of their own: other choices stay as they are


class Draft(NamedTuple):
    """A plan so far."""

    packs: "Packs"
    #: no plan for these samples has fewer packs (of the same groups and budgets)
    bound: int
    #: what passes say of their work, for `PlanInfo.settings`
    notes: Mapping[str, Any] = {}

    def of(self, order: np.ndarray) -> "Draft":
        """Return the draft with its packs in this order."""
        from offline_packing.planner.strategies.strategy import reorder_packs

        return self._replace(packs=reorder_packs(self.packs, order))


def _compose(samples: Samples, request: PlanRequest, _: Draft | None) -> Draft:
    """Compose packs by the strategy."""
    from offline_packing.planner.composing import by_strategy, compose

    return Draft(*compose(samples, request, by_strategy))


def _in_windows(samples: Samples, request: PlanRequest, _: Draft | None) -> Draft:
    """Compose packs in the order of the source."""
    from offline_packing.planner.composing import compose, in_windows

    return Draft(*compose(samples, request, in_windows))


def _mix(samples: Samples, request: PlanRequest, _: Draft | None) -> Draft:
    """Compose packs along the mixture, and order them by it."""
    from offline_packing.planner.composing import along_mixture, compose

    draft = Draft(*compose(samples, request, along_mixture))
    source = samples.columns["source"]
    return draft.of(request.mixture.order_packs(draft.packs, source, samples.lengths))


def _make_uniform(samples: Samples, request: PlanRequest, draft: Draft) -> Draft:
    """Make the number of packs of each kind divide among the ranks."""
    from offline_packing.planner.ranks.uniform import make_uniform

    if request.layout is None or not draft.packs.num_packs:
        return draft
    media = samples.columns["media"]
    packs, halved, repeated = make_uniform(draft.packs, media, samples.lengths, request.layout)
    notes = {**draft.notes, "uniform": {"halved": halved, "repeated": repeated}}
    return draft._replace(packs=packs, notes=notes)


def _order_by_cost(samples: Samples, request: PlanRequest, draft: Draft) -> Draft:
    """Order packs so that the ranks get similar cost at each step."""
    from offline_packing.planner.ranks.deal import PackCosts, cost_grouped_order
    from offline_packing.planner.ranks.uniform import kinds_of

    packs, columns = draft.packs, samples.columns
    assert request.layout is not None

    def sums(values: np.ndarray) -> np.ndarray:
        of_uses = values[packs.sample_ids]
        return np.bincount(packs.pack_of_slot(), of_uses, minlength=packs.num_packs)

    features = [array for name, array in columns.items() if name.startswith("features[")]
    costs = PackCosts.of(
        sums(columns["cost"] if "cost" in columns else samples.lengths.astype(np.float64) ** 2),
        sums(columns["tower_cost"]) if "tower_cost" in columns else None,
        kinds_of(columns["media"], packs) if "uniform" in draft.notes else None,
        np.stack([sums(some) for some in (samples.lengths, *features)], axis=1),
    )
    return draft.of(cost_grouped_order(costs, request.layout, request.options.seed))


def _shuffle(samples: Samples, request: PlanRequest, draft: Draft) -> Draft:
    """Put the packs into random order."""
    return draft.of(np.random.default_rng(request.options.seed).permutation(draft.packs.num_packs))


def _order_samples(samples: Samples, request: PlanRequest, draft: Draft) -> Draft:
    """Put the samples of each pack into random order, unless the strategy is another packer's."""
    from offline_packing.planner.strategies import COMPOSERS
    from offline_packing.planner.strategies.kernels import random_state, shuffle_between

    if request.options.strategy not in COMPOSERS:
        return draft
    packs = draft.packs._replace(sample_ids=draft.packs.sample_ids.copy())
    shuffle_between(*packs, random_state([request.options.seed, _SAMPLE_ORDER_STREAM]))
    return draft._replace(packs=packs)


@dataclass(frozen=True)
class Pass:
    """A step of planning, or a limit that the steps keep."""

    name: str
    #: as messages call it
    title: str = ""
    #: columns of `Samples` that it needs
    needs: tuple[str, ...] = ()
    #: earlier passes whose promise it breaks, and why
    breaks: Mapping[str, str] = field(default_factory=dict)
    run: Callable[[Samples, PlanRequest, Any], Draft] | None = None


def asked_passes(request: PlanRequest) -> list[Pass]:
    """Return the passes in order. Raises ValueError if one breaks the promise of an earlier one."""
    found: list[Pass] = []
    for new in _asked(request):
        for earlier in found:
            if earlier.name in new.breaks:
                raise ValueError(
                    f"{new.title} cannot keep {earlier.title}: {new.breaks[earlier.name]}; leave "
                    "out one of them"
                )
        found.append(new)
    return found


def _asked(request: PlanRequest) -> Iterator[Pass]:
    options, strategy = request.options, request.options.strategy
    limits = [*request.limits, *(["samples"] if options.max_samples else [])]
    if limits:
        yield Pass("limits", f"a limit of {', '.join(dict.fromkeys(limits))}")
    if options.homogeneous:
        yield Pass("groups", "homogeneous", ("groups",))
    has_locality = options.assignment == "locality"
    in_order = has_locality or request.mixture is not None
    run = None if in_order else _compose
    if strategy == "auto":
        yield Pass("compose", run=run)
    else:
        from offline_packing.planner.strategies import lacks_limits

        lacks = lacks_limits(strategy)
        breaks = {"limits": lacks} if lacks else {}
        yield Pass("compose", f"strategy {strategy!r}", (), breaks, run)
    others = {"limits": "its windows know tokens only"}
    others |= {} if strategy == "auto" else {"compose": "it packs by auto"}
    if has_locality:
        yield Pass("windows", "assignment locality", ("source_order",), others, _in_windows)
    if request.mixture is not None:
        others |= {"groups": "packs of each kind would follow it by themselves"}
        others |= {"windows": "packs follow the source"}
        yield Pass("mixture", "mixture", ("source", "source_order"), others, _mix)
    if request.layout is not None:
        if request.layout.uniform:
            yield Pass("uniform", "order.uniform", ("media",), run=_make_uniform)
        breaks = dict.fromkeys(("windows", "mixture"), "it puts packs of similar cost side by side")
        yield Pass("equal_cost", "order", (), breaks, _order_by_cost)
    elif not in_order:
        yield Pass("shuffle", run=_shuffle)
    yield Pass("sample_order", run=_order_samples)
