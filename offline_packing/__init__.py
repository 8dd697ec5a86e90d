"""Offline sample packing: samples of different lengths become packs that fill one sequence."""

import os
from typing import TYPE_CHECKING, Final

from task_encoders import import_on_first_use

if TYPE_CHECKING:
    from offline_packing.planner.pack_plan import PackPlan
    from offline_packing.planner.plan_packs import plan_packs
    from offline_packing.planner.windows import WindowOptions
    from offline_packing.upkeep.pack import Packed, pack

# Arrow's own allocator keeps freed memory: for a compressed page of 300 MiB, another 300 MiB. It
# reads this when pyarrow is first imported.
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")

__all__ = ["PackPlan", "Packed", "WindowOptions", "pack", "plan_packs"]

_MODULES: Final = {
    "PackPlan": "planner.pack_plan",
    "Packed": "upkeep.pack",
    "WindowOptions": "planner.windows",
    "pack": "upkeep.pack",
    "plan_packs": "planner.plan_packs",
}
# The planner's compiled parts cost half a second.
__getattr__ = import_on_first_use(__name__, _MODULES)
