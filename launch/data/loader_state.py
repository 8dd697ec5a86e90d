"""State of Energon's loader and of the random generators as plain tensors, numbers and mappings.

Energon's own states are instances of its classes, which only a pickle could hold. Checkpoints hold
none: reading one must not be able to run code.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from megatron.energon.flavors.webdataset.sample_loader import SliceState
from megatron.energon.rng import SystemRngState
from megatron.energon.savable_loader import (
    SavableDataLoaderState,
    SavableDatasetCheckpoint,
    SavableDatasetState,
)
from megatron.energon.state import FlexState

#: Names the class of a mapping that was an object. Energon uses "__class__" itself.
_CLASS: Final = "class of"
_DATACLASSES: Final = {
    cls.__name__: cls
    for cls in (
        SavableDataLoaderState,
        SavableDatasetCheckpoint,
        SavableDatasetState,
        SliceState,
        SystemRngState,
    )
}


def to_plain(state: Any) -> Any:
    """A state without instances of classes.

    Raises:
        TypeError: it holds an object of a class that is not known here.
    """
    if state is None or isinstance(state, bool | int | float | str | bytes | torch.Tensor):
        return state
    if isinstance(state, np.ndarray):
        return {_CLASS: "ndarray", "values": torch.from_numpy(state.copy())}
    if isinstance(state, list | tuple):
        return type(state)(map(to_plain, state))
    name = type(state).__name__
    if isinstance(state, dict):
        tag = {_CLASS: name} if isinstance(state, FlexState) else {}
        return tag | {key: to_plain(value) for key, value in state.items()}
    if name not in _DATACLASSES:
        raise TypeError(f"a {name} in the loader's state; add it to launch/data/loader_state.py")
    names = [field.name for field in dataclasses.fields(state)]
    return {_CLASS: name} | {field: to_plain(getattr(state, field)) for field in names}


def from_plain(plain: Any) -> Any:
    """The state that `to_plain` was given."""
    if isinstance(plain, list | tuple):
        return type(plain)(map(from_plain, plain))
    if not isinstance(plain, Mapping):
        return plain
    name = plain.get(_CLASS)
    content = {key: from_plain(value) for key, value in plain.items() if key != _CLASS}
    if name == "ndarray":
        return content["values"].numpy()
    if name == "FlexState":
        return FlexState(content)
    return content if name is None else _DATACLASSES[name](**content)
