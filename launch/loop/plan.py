"""Steps of a run, their batches and learning rates, from the configuration and the manifest."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from launch.config import LaunchConfig, ScheduleConfig
from launch.data.packed_data import PackedData
from offline_packing.runs.training_run import TrainedStage

logger = logging.getLogger(__name__)


#: Share of the way from the minimum to the maximum that is left at `progress` in 0..1, by name.
DECAYS: Final[dict[str, Callable[[float], float]]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The steps of a stage."""

    #: packs to train, each as often as it is; the last step may take more
    packs: int
    #: packs over all ranks
    packs_per_step: int
    #: micro batches per rank and step
    accumulation: int

    def steps(self, trained: int = 0) -> int:
        """Count the steps that are left when some packs were trained."""
        return max(0, -(-(self.packs - trained) // self.packs_per_step))


class Progress(NamedTuple):
    """How far a run has come."""

    #: steps done
    iteration: int = 0
    #: steps done at the beginning of each stage of data.path that has begun
    begins: Sequence[int] = (0,)
    #: every stage begun so far, over changes of data.path (where a run resumes, without the present
    #: stage); empty if packed while training
    trained: Sequence[TrainedStage] = ()


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """The shape of a run: its stages, one after another."""

    stages: tuple[StagePlan, ...]
    #: steps done at the beginning of each stage, and at the end of the last, (num_stages + 1,)
    bounds: tuple[int, ...]

    @classmethod
    def of(
        cls, stages: Sequence[StagePlan], total: int | None, done: Progress, trained: int = 0
    ) -> "TrainPlan":
        """Plan a run that has come so far. `total`: its steps, if they are asked for. `trained`:
        packs of the present stage. Raises ValueError if the steps were done before its packs
        began."""
        bounds = list(done.begins)
        if total and total <= bounds[0]:
            raise ValueError(
                f"train.iterations={total} counts all steps, and {bounds[0]} are done; raise it to "
                "train other packs"
            )
        present, *later = stages[len(bounds) - 1 :]
        bounds.append(max(total or done.iteration + present.steps(trained), done.iteration))
        for stage in later:
            bounds.append(bounds[-1] + stage.steps())
        return cls(tuple(stages), tuple(bounds))

    @property
    def iterations(self) -> int:
        """Steps of the run."""
        return self.bounds[-1]

    def learning_rate(self, iteration: int, schedule: ScheduleConfig) -> float:
        """Return the learning rate of a step, counted from 0.

        The rate rises linearly over the warm-up, then falls towards the minimum, which it would
        reach one step after the last: with a minimum of 0, no step is wasted.
        """
        warmup = round(schedule.warmup * self.iterations)
        if iteration < warmup:
            return schedule.learning_rate * (iteration + 1) / warmup
        steps = max(1, self.iterations - warmup)
        progress = min(1.0, (iteration - warmup) / steps)
        least = schedule.min_learning_rate
        return least + (schedule.learning_rate - least) * DECAYS[schedule.decay](progress)


def plan_training(
    config: LaunchConfig, data: Sequence[PackedData], data_parallel: int
) -> TrainPlan:
    """Plan the steps of a run on the packs of each of its stages, and warn of a decay that undoes
    the weights. Raises ValueError as `plan_stage`."""
    stages = [plan_stage(*pair, data_parallel) for pair in zip(config.stages, data, strict=True)]
    plan = TrainPlan.of(stages, config.train.iterations, Progress())
    # A step takes rate × decay of the weights.
    schedule, decay = config.schedule, config.optimizer.weight_decay
    mean = schedule.learning_rate
    if schedule.decay != "constant":
        mean = (mean + schedule.min_learning_rate) / 2
    kept = math.exp(-mean * decay * plan.iterations)
    if kept < 0.5:
        logger.warning(
            "optimizer.weight_decay %g alone leaves %.3g%% of the matrices' weights after %d steps "
            "at these learning rates; lower it",
            decay,
            100 * kept,
            plan.iterations,
        )
    return plan


def plan_stage(config: LaunchConfig, data: PackedData, data_parallel: int) -> StagePlan:
    """Plan the steps and the batch of a stage. Raises ValueError if nothing would be trained.

    A batch size in samples becomes packs: divided by the samples in a pack, and rounded to what
    divides evenly among the ranks. A batch size in packs must already be such a multiple.
    """
    if "language" in config.model.freeze and not data.has_media:
        raise ValueError(
            f"model.freeze={sorted(config.model.freeze)}: no pack of {config.data.path} has images "
            "or videos, so that nothing would be trained; train the language model"
        )
    size, packs = config.data.micro_batch_size, config.batch.global_batch_packs
    multiple = data_parallel * size
    if packs is not None and packs % multiple:
        raise ValueError(
            f"batch.global_batch_packs {packs} is not a multiple of {multiple} = {data_parallel} "
            f"data parallel ranks × micro_batch_size {size}; set "
            f"{-(-packs // multiple) * multiple}"
        )
    wanted = packs or (config.batch.global_batch_size or 1) / data.samples_per_pack
    accumulation = max(1, round(wanted / multiple))
    packs = accumulation * multiple
    rows = max(1, round(config.train.epochs * -(-data.num_packs // size)))
    asked = config.train.iterations
    plan = StagePlan(asked * packs if asked else rows * size, packs, accumulation)
    iterations = plan.steps()
    logger.info(
        "%d packs of %.2f samples each; a step takes %d packs, about %.0f samples; %d steps, %.2f "
        "times all packs",
        data.num_packs,
        data.samples_per_pack,
        packs,
        packs * data.samples_per_pack,
        iterations,
        iterations * packs / data.num_packs,
    )
    for folder, own, share in data.blended:
        drawn = share * iterations * packs
        logger.info(
            "%.2f%% of them from %s: %.2f times its %d packs", 100 * share, folder, drawn / own, own
        )
    for remark in _remarks(config, data, plan, data_parallel):
        logger.warning(remark)
    return plan


def _remarks(
    config: LaunchConfig, data: PackedData, plan: StagePlan, data_parallel: int
) -> Iterator[str]:
    """Say where a stage differs from the recipe, if there are too few packs or ranks, and if packs
    are ordered for another number of ranks."""
    packs, iterations = plan.packs_per_step, plan.steps()
    asked, given = config.batch.global_batch_size, packs * data.samples_per_pack
    if asked is not None and not 0.75 <= given / asked <= 1.25:
        yield (
            f"batch.global_batch_size {asked} becomes about {given:.0f} samples, as a step takes "
            "whole packs on every rank; set it to that, or lower micro_batch_size or the number of "
            "ranks"
        )
    if not config.data.repeat and iterations * packs > data.num_packs + packs:
        yield (
            f"data.repeat=false ends the run after {-(-data.num_packs // packs)} of {iterations} "
            "steps, before the learning rate has decayed; set data.repeat=true, or train.epochs=1"
        )
    if packs > data.num_packs:
        yield (
            f"a step takes {packs} packs, but there are only {data.num_packs}, so that each step "
            "passes over all data; lower batch.global_batch_" + ("size" if asked else "packs")
        )
    if data.has_mixture and config.data.order == "balanced":
        yield (
            f"the packs of {config.data.path} follow a mixture in their written order "
            "(pack.mixture), which data.order=balanced changes; set data.order=written"
        )
    if data_parallel == 1 and getattr(config.model, "fsdp", False):
        yield "model.fsdp=true shards nothing on one rank; start more, or leave it out"
    order = data.ordered_for or data_parallel
    # A divisor of these ranks reads whole steps, if every step has a pack for every rank.
    is_served = order == data_parallel or order % data_parallel + data.num_packs % order == 0
    if not is_served and data_parallel > 1 and config.data.order != "balanced":
        yield (
            f"the packs are ordered for {order} data parallel ranks (pack.order), but "
            f"{data_parallel} are running and will wait for each other; set data.order=balanced"
        )
