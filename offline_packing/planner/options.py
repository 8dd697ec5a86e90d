"""Options of a plan: arguments of `plan_packs`, and fields of `pack` in a configuration.

Configurations are checked with it, so it imports nothing that compiles.
"""

from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from offline_packing.planner.context_parallel import ContextParallel
from offline_packing.storage.yaml_file import explain_value_error
from task_encoders.field_types import Count, NonNegative, one_of


def _listed(value: Any) -> Any:
    """One name or a list of names as the tuple that strict checks need."""
    value = [value] if isinstance(value, str) else value
    return tuple(value) if isinstance(value, list | set | frozenset) else value


class PlanOptions(BaseModel):
    """Options of a plan that are the same for every sample."""

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
    #: which sample of a length goes where: shuffle, locality (packs follow the source), balance
    #: (vision patches evened out); one, or a list
    assignment: Annotated[
        tuple[Literal["shuffle", "locality", "balance"], ...], BeforeValidator(_listed)
    ] = ("shuffle",)
    #: packs hold only samples with images or videos, or only samples without
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
        if self.has_locality and self.strategy != "auto":
            raise ValueError(f"assignment locality needs strategy 'auto', not {self.strategy!r}")
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
        return "locality" in self.assignment

    def check_limits(
        self,
        budgets: Collection[str],
        has_order: bool,
        context_parallel: ContextParallel | None,
        mixed: bool,
    ) -> None:
        """Raise ValueError where the options contradict the names of further limits per pack, an
        order of packs for the ranks, slots of them, or packs mixed anew for each epoch."""
        if mixed and (self.strategy != "auto" or self.has_locality):
            given = "assignment locality" if self.has_locality else f"strategy {self.strategy!r}"
            raise ValueError(
                f"several epochs are mixed at random by auto, not by {given}; leave it out, or "
                "plan one epoch"
            )
        if self.has_locality and has_order:
            raise ValueError(
                "order puts packs of similar cost side by side, assignment locality packs of the "
                "same stretch of the source; choose one of them"
            )
        limits = dict.fromkeys([*budgets, *(["samples"] if self.max_samples else [])])
        exchanging = {"locality", "balance"}.intersection(self.assignment)
        if limits and exchanging:
            raise ValueError(
                f"assignment {min(exchanging)} exchanges samples of equal length, which may break "
                "a budget; leave out one of the two"
            )
        if self.strategy != "auto":
            from offline_packing.planner.strategies import check_budgets

            check_budgets(self.strategy, limits)
        if context_parallel is not None:
            context_parallel.check(self.seq_length, self.pad_multiple)
            self._check_slots(limits, has_order, mixed)

    def _check_slots(self, limits: Collection[str], has_order: bool, mixed: bool) -> None:
        """Raise ValueError for what cannot hold while packs go over 1, 2, 4 … ranks, in slots."""
        others = ", ".join(sorted(set(self.assignment) - {"shuffle"}))
        for name, is_given, why in (
            (
                f"strategy {self.strategy!r}",
                self.strategy != "auto",
                "it packs for one size; take auto",
            ),
            (f"assignment {others}", others, "slots are filled by cost; take shuffle"),
            (f"a limit of {', '.join(limits)}", limits, "packs hold as much as their ranks"),
            ("order", has_order, "the ranks of a slot have equal cost already"),
            ("several epochs", mixed, "packs over several ranks are the same for every seed"),
        ):
            if is_given:
                raise ValueError(
                    f"context_parallel cannot keep {name}: {why}; leave out one of them"
                )
