"""Offline sample packing: samples of different lengths become packs that fill one sequence."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offline_packing.planner.pack_plan import PackPlan
    from offline_packing.planner.plan_packs import plan_packs

__all__ = ["PackPlan", "plan_packs"]

#: `python -m offline_packing` finds cli/__main__.py.
__path__ = [*__path__, f"{__path__[0]}/cli"]


def __getattr__(name: str) -> Any:
    """Import on first use (PEP 562): the planner's compiled parts cost half a second."""
    if name == "PackPlan":
        from offline_packing.planner.pack_plan import PackPlan

        return PackPlan
    if name == "plan_packs":
        from offline_packing.planner.plan_packs import plan_packs

        return plan_packs
    raise AttributeError(f"module 'offline_packing' has no attribute {name!r}")
