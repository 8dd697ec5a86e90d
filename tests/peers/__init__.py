"""Tests in the environments of other trainers; some of these have torchvision."""

import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import tests.helpers.torchvision_stub

#: The fixture `say`.
Say = Callable[[str], None]

if Path(sys.prefix).name == "megatron_bridge":
    import tests.helpers.megatron_bridge_stubs  # noqa: F401
if Path(sys.prefix).name == "llama_factory":
    # There is no build of torchaudio for PyTorch's CPU wheel; only audio would need it.
    sys.modules["torchaudio"] = ModuleType("torchaudio")
    sys.modules["torchaudio"].__spec__ = ModuleSpec("torchaudio", None)  # for transformers
    os.environ["DISABLE_VERSION_CHECK"] = "1"  # as docs/integrations.md says
if Path(sys.prefix).name in ("automodel", "llama_factory", "ms_swift", "veomni"):
    from tests.helpers import stand_in_fla

    stand_in_fla.install()
