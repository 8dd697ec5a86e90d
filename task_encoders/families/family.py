"""What stands in FAMILIES: a family's name, its options, and what makes its encoder."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from task_encoders.families.options import ModelOptions
from task_encoders.sample_encoder import SampleEncoder


@dataclass(frozen=True, slots=True)
class Family:
    """A model family, as its own module declares it."""

    name: str
    #: the options of `ModelOptions` that it has, each with its default
    defaults: Mapping[str, Any]
    #: makes its encoder. Raises ValueError where the options or the checkpoint do not fit
    build: Callable[[ModelOptions], SampleEncoder]
