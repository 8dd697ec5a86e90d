"""States of Energon's loader and of the random generators, read without running code: torch builds
instances of the classes named here, and of no others."""

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

_NUMBERS: Final = np.empty(0, np.uint32)
#: The last ones are of NumPy's own generator, an array of uint32.
_CLASSES: Final = [
    FlexState,
    SavableDataLoaderState,
    SavableDatasetCheckpoint,
    SavableDatasetState,
    SliceState,
    SystemRngState,
    np.ndarray,
    np.dtype,
    type(_NUMBERS.dtype),
    _NUMBERS.__reduce__()[0],
]


def load_state(file: Path | IO[bytes]) -> Any:
    """Read what torch saved of a state. Raises UnpicklingError for other content."""
    with torch.serialization.safe_globals(_CLASSES):
        return torch.load(file, map_location="cpu", weights_only=True)
