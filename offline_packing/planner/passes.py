"""Passes over a draft of a plan: the list of those that are asked for is what runs, in its order.

compose   ->   uniform   ->   equal cost | mixture order | shuffle   ->   sample order

A pass keeps what earlier ones promise, or is refused beside them, here and nowhere else.
Configurations are checked with the list, so this imports nothing that compiles; the functions of
the passes are in `composing.PASSES`.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from offline_packing.planner.options import PlanRequest


class Pass(NamedTuple):
    """A step of planning, or what the steps after it keep."""

    name: str
    #: as messages call it
    title: str = ""
    #: columns of `Samples` that it needs
    needs: tuple[str, ...] = ()
    #: earlier passes whose promise it breaks, and why
    breaks: Mapping[str, str] = {}


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
        breaks = {"limits": lacks} if lacks else {}
        yield Pass("strategy", f"strategy {strategy!r}", (), breaks)
    others = {"limits": "its windows know tokens only", "strategy": "it packs by auto"}
    has_locality = options.assignment == "locality"
    if has_locality:
        yield Pass("windows", "assignment locality", ("source_order",), others)
    if request.mixture is not None:
        apart = "packs of each kind would follow it by themselves"
        others = {**others, "groups": apart, "windows": "packs follow the source"}
        yield Pass("mixture", "mixture", ("source", "source_order"), others)
    yield Pass("compose")
    if request.layout is not None:
        if request.layout.uniform:
            yield Pass("uniform", "order.uniform", ("media",))
        breaks = dict.fromkeys(("windows", "mixture"), "it puts packs of similar cost side by side")
        yield Pass("equal_cost", "order", (), breaks)
    elif request.mixture is not None:
        yield Pass("mixture_order")
    elif not has_locality:
        yield Pass("shuffle")
    yield Pass("sample_order")
