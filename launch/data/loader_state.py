"""States of Energon's loader and of the random generators, read without running code: torch builds
instances of the classes named here, and of no other class."""

import copyreg
from pathlib import Path
from typing import IO, Any, Final

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

# A mapping made of a dict: torch fills no mappings of other classes.
copyreg.pickle(FlexState, lambda state: (FlexState, (dict(state),)))

#: Classes of the states; the last ones are of arrays of numbers.
_CLASSES: Final = [
    bytes,
    FlexState,
    SavableDataLoaderState,
    SavableDatasetCheckpoint,
    SavableDatasetState,
    SliceState,
    SystemRngState,
    np.ndarray,
    np.dtype,
    *{type(np.dtype(code)) for code in np.typecodes["AllInteger"] + np.typecodes["Float"]},
    np.empty(0).__reduce__()[0],
]


def load_state(file: Path | IO[bytes]) -> Any:
    """Read a state that torch saved. Raises UnpicklingError for other content."""
    with torch.serialization.safe_globals(_CLASSES):
        return torch.load(file, map_location="cpu", weights_only=True)
