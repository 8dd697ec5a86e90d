"""Offline sample packing: samples of different lengths become packs that fill one sequence."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from offline_packing.planner.pack_plan import PackPlan
    from offline_packing.planner.plan_packs import plan_packs
    from offline_packing.planner.windows import WindowOptions, WindowPlanner

__all__ = ["PackPlan", "WindowOptions", "WindowPlanner", "plan_packs"]

_MODULES: Final = {
    "PackPlan": "pack_plan",
    "WindowOptions": "windows",
    "WindowPlanner": "windows",
    "plan_packs": "plan_packs",
}


def __getattr__(name: str) -> Any:
    """Import on first use (PEP 562): the planner's compiled parts cost half a second."""
    if name not in _MODULES:
        raise AttributeError(f"module 'offline_packing' has no attribute {name!r}")
    return getattr(import_module(f"offline_packing.planner.{_MODULES[name]}"), name)
