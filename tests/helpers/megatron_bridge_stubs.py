"""Lets Megatron-Bridge be imported without TransformerEngine, which needs a GPU, and before Python
3.12. Nothing of TransformerEngine works: it is named where classes are defined, not called."""

import sys
import types
import typing
from importlib.machinery import ModuleSpec
from typing import Any

import torch
import typing_extensions

vars(typing)["override"] = typing_extensions.override

# First of all, as megatron-core looks for TransformerEngine too, and is to find none.
import megatron.core.models.gpt.gpt_layer_specs  # noqa: E402, F401


class _Stub(types.ModuleType):
    """A module with any module or class in it."""

    __version__ = "2.10.0"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None)  # peft looks for one

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Stub(name) if name.islower() else type(name, (torch.nn.Module,), {})


for _name in ("transformer_engine", "transformer_engine.pytorch"):
    sys.modules[_name] = _Stub(_name)
