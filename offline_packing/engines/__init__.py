"""Engines run a stage's tasks. A new one is a file here and a line in ENGINES."""

from offline_packing.engines.local import Engine, LocalEngine
from offline_packing.engines.ray_cluster import RayEngine
from offline_packing.engines.slurm_array import SlurmEngine

ENGINES: dict[str, type[Engine]] = {"local": LocalEngine, "ray": RayEngine, "slurm": SlurmEngine}

__all__ = ["ENGINES", "Engine"]
