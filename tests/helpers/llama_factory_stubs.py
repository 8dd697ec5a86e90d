"""Lets LLaMA-Factory be imported without torchaudio, of which there is no build for PyTorch's CPU
wheel, and beside newer packages than it checks for. Only audio would need torchaudio."""

import os
import sys
import types
from importlib.machinery import ModuleSpec

os.environ["DISABLE_VERSION_CHECK"] = "1"  # as docs/integrations.md says
_torchaudio = types.ModuleType("torchaudio")
_torchaudio.__spec__ = ModuleSpec("torchaudio", None)  # transformers looks for one
sys.modules["torchaudio"] = _torchaudio
