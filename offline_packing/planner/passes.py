"""The list of passes that a request asks for: what runs, in its order (`composing.RUNS`).

compose: by strategy | in windows | by mixture   ->   uniform kinds   ->   equal cost | shuffle   ->
sample order

A pass keeps what earlier ones promise, or is refused beside them, here and nowhere else.
Configurations are checked with the list, so this imports nothing that compiles.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from offline_packing.planner.options import PlanRequest


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
    if strategy != "auto":
        from offline_packing.planner.strategies import lacks_limits

        lacks = lacks_limits(strategy)
        yield Pass("strategy", f"strategy {strategy!r}", (), {"limits": lacks} if lacks else {})
    has_locality = options.assignment == "locality"
    in_order = has_locality or request.mixture is not None
    if not in_order:
        yield Pass("compose")
    others = {"limits": "its windows know tokens only", "strategy": "it packs by auto"}
    if has_locality:
        yield Pass("windows", "assignment locality", ("source_order",), others)
    if request.mixture is not None:
        others |= {"groups": "packs of each kind would follow it by themselves"}
        others |= {"windows": "packs follow the source"}
        yield Pass("mixture", "mixture", ("source", "source_order"), others)
    if request.layout is not None:
        if request.layout.uniform:
            yield Pass("uniform", "order.uniform", ("media",))
        breaks = dict.fromkeys(("windows", "mixture"), "it puts packs of similar cost side by side")
        yield Pass("equal_cost", "order", (), breaks)
    elif not in_order:
        yield Pass("shuffle")
    yield Pass("sample_order")
