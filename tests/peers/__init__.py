"""Tests in the environments of other trainers; some of these have torchvision."""

import sys
from pathlib import Path

import tests.helpers.torchvision_stub

if Path(sys.prefix).name == "megatron_bridge":
    import tests.helpers.megatron_bridge_stubs
if Path(sys.prefix).name == "llama_factory":
    import tests.helpers.llama_factory_stubs  # noqa: F401
if Path(sys.prefix).name in ("automodel", "llama_factory", "ms_swift", "veomni"):
    from tests.helpers import stand_in_fla

    stand_in_fla.install()
