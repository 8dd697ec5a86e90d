"""Passes over a draft of a plan: which ones are asked for, in the order in which they run.

compose: by strategy | in windows | by mixture   ->   uniform kinds   ->   equal cost | shuffle   ->
sample order

A pass keeps what earlier ones promise, or is refused beside them, here and nowhere else.
Configurations are checked with it, so it imports nothing that compiles.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
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

    @property
    def has_locality(self) -> bool:
        """Whether packs follow the order of the samples in the source."""
        return self.assignment == "locality"


@dataclass(frozen=True)
class Pass:
    """A step of planning, or a limit that the steps keep."""

    name: str
    #: as messages call it
    title: str = ""
    #: arrays with one entry per sample that it needs
    needs: tuple[str, ...] = ()
    #: earlier passes whose promise it breaks, and why
    breaks: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PlanRequest:
    """All that is asked of a plan besides the samples; see `plan_packs`."""

    options: PlanOptions
    #: names of the further limits of a pack
    limits: Collection[str] = ()
    order: RankLayout | None = None
    window_packs: int = 1000
    has_mixture: bool = False

    def passes(self) -> list[Pass]:
        """The passes in order. Raises ValueError if one breaks the promise of an earlier one."""
        found: list[Pass] = []
        for new in self._asked():
            for earlier in found:
                if earlier.name in new.breaks:
                    raise ValueError(
                        f"{new.title} cannot keep {earlier.title}: {new.breaks[earlier.name]}; "
                        "leave out one of them"
                    )
            found.append(new)
        return found

    def _asked(self) -> Iterator[Pass]:
        options, strategy = self.options, self.options.strategy
        limits = [*self.limits, *(["samples"] if options.max_samples else [])]
        if limits:
            yield Pass("limits", f"a limit of {', '.join(dict.fromkeys(limits))}")
        if options.homogeneous:
            yield Pass("groups", "homogeneous", ("groups",))
        if strategy == "auto":
            yield Pass("compose")
        else:
            from offline_packing.planner.strategies import lacks_limits

            lacks = lacks_limits(strategy)
            breaks = {"limits": lacks} if lacks else {}
            yield Pass("compose", f"strategy {strategy!r}", (), breaks)
        others = {} if strategy == "auto" else {"compose": "it packs by auto"}
        if options.has_locality:
            breaks = {"limits": "its windows know tokens only", **others}
            yield Pass("windows", "assignment locality", ("source_order",), breaks)
        if self.has_mixture:
            breaks = {
                "limits": "its windows know tokens only",
                "groups": "packs of each kind would follow it by themselves",
                "windows": "packs follow the source",
                **others,
            }
            yield Pass("mixture", "mixture", ("source", "source_order"), breaks)
        if self.order is not None:
            if self.order.uniform:
                yield Pass("uniform", "order.uniform", ("media",))
            breaks = {
                "windows": "it puts packs of similar cost side by side",
                "mixture": "it puts packs of similar cost side by side",
            }
            yield Pass("equal_cost", "order", (), breaks)
        elif not (options.has_locality or self.has_mixture):
            yield Pass("shuffle")
        yield Pass("sample_order")
