"""What a strategy is: a function from lengths to packs, and the options that it declares."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict

from offline_packing.planner.strategies.packs import Packs


class StrategyOptions(BaseModel):
    """What a strategy understands beside lengths, seq_length and seed: by itself nothing.

    Every field has a default and a description, which is what help and guide say of it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    #: fields that are arrays with one entry per sample: for callers of plan_packs only
    PER_SAMPLE: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def names(cls) -> list[str]:
        """Options that a configuration may set."""
        return [name for name in cls.model_fields if name not in cls.PER_SAMPLE]


@dataclass(frozen=True)
class Strategy:
    """Packs samples of ``num_tokens``, integers (num_samples,) in 1..seq_length: every sample in
    exactly one pack, no pack over ``seq_length``."""

    #: f(num_tokens, seq_length, *, seed), and ``options`` where it declares any
    function: Callable[..., Packs]
    options: type[StrategyOptions] = StrategyOptions

    def __call__(
        self, num_tokens: np.ndarray, seq_length: int, *, seed: int = 0, **options: Any
    ) -> Packs:
        """The packs. Raises ValueError for options that it has not, or values out of range."""
        parsed = self.options(**options)
        if not self.options.model_fields:
            return self.function(num_tokens, seq_length, seed=seed)
        return self.function(num_tokens, seq_length, seed=seed, options=parsed)

    def describe(self) -> Iterator[tuple[str, str, str]]:
        """(name, default, meaning) of each option that a configuration may set."""
        for name in self.options.names():
            field = self.options.model_fields[name]
            default = "" if field.default is None else str(field.default)
            if not isinstance(field.default, int | float | str | None):
                default = "built in"
            yield name, default, field.description or ""
