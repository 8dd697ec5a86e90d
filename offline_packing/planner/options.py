"""Options of a plan. Configurations hold them, so this imports nothing that compiles."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from offline_packing.planner.ranks.layout import RankLayout
from offline_packing.storage.yaml_file import explain_value_error
from task_encoders.field_types import Count, NonNegative, one_of


class PlanOptions(BaseModel):
    """Options of a plan that are the same for every sample: arguments of `plan_packs`, and fields
    of `pack` in a configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    #: tokens of a pack
    seq_length: Annotated[Count, Field(le=2**31 - 1)] = 8192
    #: how samples are combined: a name in STRATEGIES
    strategy: str = "auto"
    #: of every random choice
    seed: NonNegative = 0
    #: each sample counts as its length rounded up to this multiple
    pad_multiple: Count = 1
    #: the strategy's options besides seq_length and seed, such as hash_bucket's phases
    strategy_options: dict[str, Any] = {}
    #: which sample of a length goes where: shuffle, or locality (packs follow the source)
    assignment: Literal["shuffle", "locality"] = "shuffle"
    #: packs hold only samples with videos, with images alone, or without either
    homogeneous: bool = False
    #: samples that a pack may hold
    max_samples: Count | None = None

    @field_validator("strategy")
    @classmethod
    def _check_strategy(cls, strategy: str) -> str:
        if strategy != "auto":  # the planner's compiled parts take half a second to import
            from offline_packing.planner.strategies import STRATEGIES

            one_of(STRATEGIES).func(strategy)  # type: ignore[call-arg]
        return strategy

    @model_validator(mode="after")
    def _check_together(self) -> "PlanOptions":
        if self.pad_multiple > self.seq_length:
            raise ValueError(
                f"pad_multiple {self.pad_multiple} > seq_length {self.seq_length}; no sample would "
                "fit a pack"
            )
        if self.strategy_options:
            from offline_packing.planner.strategies import check_options

            try:
                check_options(self.strategy, self.strategy_options)
            except ValueError as error:
                raise ValueError(f"strategy_options: {explain_value_error(error)}") from error
        return self


@dataclass(frozen=True)
class PlanRequest:
    """All that is asked of a plan besides the samples."""

    options: PlanOptions
    #: names of the further limits of a pack
    limits: Collection[str] = ()
    #: `order` of a configuration, and of `plan_packs`
    layout: RankLayout | None = None
    window_packs: int = 1000
    #: a `Mixture`; for the refusals it only matters whether there is one
    mixture: Any = None
