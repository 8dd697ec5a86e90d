"""The training loop: packs in, steps, checkpoints and metrics out.

A step is `accumulation` micro batches on every rank. All ranks leave a step together, even if one
has no pack left, was asked to stop, or met a gradient that is not finite.
"""

import logging
import math
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from tqdm import tqdm

from launch.config import LaunchConfig
from launch.data.micro_batches import MicroBatches
from launch.loop.checkpoint import CheckpointFolder
from launch.loop.loss import row_loss, shift_labels
from launch.loop.metrics import (
    Eta,
    MetricsLog,
    StepCounts,
    StepTotals,
    format_line,
    memory_gib,
    peak_flops,
)
from launch.loop.optimizer import ShardedAdamW
from launch.loop.parallel import context_group, on_all_ranks
from launch.loop.plan import Progress, TrainPlan
from launch.model.prefix_trees import segment_params
from offline_packing.runs.training_run import TrainedStage
from task_encoders.energon_samples import PackedBatch, empty_batch
from task_encoders.families import FAMILIES
from task_encoders.families.base.cost import TRAINING

logger = logging.getLogger(__name__)


class StepError(RuntimeError):
    """Failure of a step. The text names the packs of the step."""


@contextmanager
def record_signals() -> Iterator[list[int]]:
    """Yield a list that receives SIGTERM and Ctrl-C, each of which stops a run after its step."""
    received: list[int] = []
    previous: dict[int, Any] = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        previous[number] = signal.signal(number, lambda number, _: received.append(number))
    try:
        yield received
    finally:
        for one, handler in previous.items():
            signal.signal(one, handler)


@dataclass(frozen=True, slots=True)
class Stage:
    """Packs that a run trains until the steps of its stage are done."""

    #: an entry of a checkpoint's `trained`, without the state of the loader; None: packed while
    #: training
    packs: Mapping[str, Any] | None
    #: this rank's micro batches
    train: MicroBatches
    #: this rank's micro batches of the val split
    validation: MicroBatches | None
    #: room for a pack in tokens
    seq_length: int

    def close(self) -> None:
        """Stop reading."""
        self.train.close()
        if self.validation is not None:
            self.validation.close()


@dataclass
class Trainer:
    """One rank's part of a training run."""

    config: LaunchConfig
    #: the run's steps, from the first
    plan: TrainPlan
    #: a `PackedModel`, whose weights belong to the optimizer
    model: Any
    optimizer: ShardedAdamW
    #: the packs of each stage of the plan
    stages: Sequence[Stage]
    #: the folder to save in
    checkpoints: CheckpointFolder
    device: torch.device

    def __post_init__(self) -> None:
        #: number of the present stage
        self._stage = 0
        #: the packs of earlier stages, see `Progress`
        self._trained: Sequence[TrainedStage] = []
        build, context = FAMILIES[self.config.model.family].build, self.config.parallel.context
        #: for steps in which this rank has no pack; ranks of a row cut it into two chunks each
        self._blank = empty_batch(build.POSITION_ROWS, 2 * context).to(self.device)
        self._is_main = distributed.get_rank() == 0
        self._log: MetricsLog | None = None
        self._peak_flops = peak_flops(self.device)
        #: the last step's line, until it is logged
        self._line = ""
        #: the last step after which there was a validation
        self._validated = 0
        #: steps done
        self.iteration = 0
        #: the signal that ended the run early; 0: none
        self.stopped_by = 0

    def resume(self) -> None:
        """Continue from the newest checkpoint, if there is one. A collective."""
        path = self.checkpoints.newest()
        if path is None:
            return
        done, packs = self.checkpoints.load(path, self.optimizer, [s.train for s in self.stages])
        self.plan = TrainPlan.of(self.plan.stages, self.config.train.iterations, done, packs)
        self.iteration, begins, self._trained = done
        self._stage = len(begins) - 1
        logger.info("resumed from %s", path)

    def run(self) -> bool:
        """Train to the last step, the end of the data, SIGTERM or Ctrl-C, and save. Call it once.
        Returns False if a signal stopped the run before its end. Raises StepError if a step
        failed."""
        if self._is_main:
            output, metrics = self.config.output.path, self.config.metrics
            self._log = MetricsLog(output, metrics, iteration=self.iteration)
        bar = tqdm(
            total=self.plan.iterations,
            initial=self.iteration,
            unit="step",
            disable=None if self._is_main else True,  # None: only on a terminal
        )
        self.model.train()
        try:
            with record_signals() as stop, bar:
                return self._run_steps(stop, bar)
        finally:
            if self._log is not None:
                self._log.close()
            for stage in self.stages:
                stage.close()

    def _run_steps(self, stop: list[int], bar: Any) -> bool:
        first = saved = self.iteration
        stopped = 0
        self._eta = Eta()
        while self.iteration < self.plan.iterations and not stopped:
            if self.iteration == self.plan.bounds[self._stage + 1]:
                self._trained = self._progress().trained
                self.stages[self._stage].close()
                self._stage += 1
            start, end = self.plan.bounds[self._stage :][:2]
            if self.iteration in (first, start) and (start or len(self.stages) > 1):
                path, number = self.config.data.paths[self._stage], self._stage + 1
                logger.info("stage %d, steps %d to %d: %s", number, start + 1, end, path)
            totals = self._step(stop, bar)
            if totals is None:
                logger.info("end of the data after %d steps", self.iteration)
                if self._stage + 1 == len(self.stages):
                    break
                begins = [*self.plan.bounds[: self._stage + 1], self.iteration]
                self.plan = TrainPlan.of(self.plan.stages, None, Progress(self.iteration, begins))
                continue
            stopped = totals.stop
            if _is_due(self.iteration, self.config.validation.every):
                self._validate()
            if _is_due(self.iteration, self.config.checkpoint.every):
                saved = self._save()
        self._log_line()
        if saved < self.iteration:
            self._save()
        finished = not stopped or self.iteration == self.plan.iterations
        is_new = first < self.iteration != self._validated
        if finished and is_new and self.config.validation.every:
            self._validate()
        if not finished:
            self.stopped_by = stopped
            name = signal.Signals(stopped).name
            logger.info("stopped by %s after %d steps; run again to continue", name, self.iteration)
        return finished

    def _step(self, stop: list[int], bar: Any) -> StepTotals | None:
        """Train one step and report it. Returns None if no rank has a pack left."""
        started = time.perf_counter()
        stage, accumulation = self.stages[self._stage], self.plan.stages[self._stage].accumulation
        counts = StepCounts(self.device)
        pack_keys: list[str] = []
        for _ in range(accumulation):
            waits = time.perf_counter()
            row = stage.train.next()
            counts.data_seconds += time.perf_counter() - waits
            if row is None and distributed.get_world_size() > 1:
                row = self._blank  # the others wait for this rank's gradients
            if row is None:
                continue
            pack_keys += row.__key__
            try:
                self._count_loss(row, counts).backward()
            except Exception as error:
                raise StepError(
                    f"step {self.iteration + 1}: packs {', '.join(row.__key__)} of "
                    f"{row.tokens.shape[1]} tokens, {len(row.image_grid_thw)} images and "
                    f"{len(row.video_grid_thw)} videos, samples "
                    f"{', '.join(row.sub_sample_keys)}: {error}"
                ) from error
        totals = counts.reduce(stop=stop[-1] if stop else 0)
        if not totals.packs:
            return None
        rate = self.plan.learning_rate(self.iteration, self.config.schedule)
        norm = self.optimizer.step(
            learning_rate=rate,
            denominator=totals.denominator,
            max_norm=self.config.optimizer.max_grad_norm,
        )
        if not math.isfinite(norm):
            keys = sorted({key for of_rank in on_all_ranks(pack_keys) for key in of_rank})
            raise StepError(
                f"step {self.iteration + 1}: the gradient's norm is {norm} and the loss "
                f"{totals.loss}; look at its packs with offline-packing preview, or lower "
                f"schedule.learning_rate; packs: {', '.join(keys)}"
            )
        self.iteration += 1
        seconds = time.perf_counter() - started
        metrics = {
            "loss": totals.loss,
            "learning_rate": rate,
            "grad_norm": norm,
            "tokens": totals.tokens,
            "sub_samples": totals.samples,
            "packs": totals.packs,
            # real tokens as a share of the room in the packs
            "fill": totals.tokens / (totals.packs * stage.seq_length),
            "step_seconds": seconds,
            "data_wait": totals.data_seconds / seconds,
            "memory_gib": memory_gib(self.device),
        }
        if self._peak_flops is not None:
            available = seconds * self._peak_flops * distributed.get_world_size()
            metrics["mfu"] = TRAINING * totals.flops / available
        self._report(metrics, bar)
        return totals

    def _count_loss(self, row: PackedBatch, counts: StepCounts) -> torch.Tensor:
        """Compute the sum of one row's weighted losses, or of this rank's part of the row, and
        count it."""
        group = context_group()
        losses = self.model(row, segment_params(row, group), shift_labels(row.labels))
        normalization = self.config.train.normalization
        loss, denominator = row_loss(losses, row.loss_mask, row.cu_lengths, normalization)
        cost = self.model.cost
        counts.add(row, loss=loss, denominator=denominator, cost=cost, group=group)
        return loss

    @torch.no_grad()
    def _validate(self) -> None:
        """Log the loss over the val split of the present stage, on all ranks."""
        batches = self.stages[self._stage].validation
        if batches is None:
            return
        self._validated = self.iteration
        self.model.eval()
        counts = StepCounts(self.device)
        while (row := batches.next()) is not None:
            self._count_loss(row, counts)
        batches.restart()
        self.model.train()
        totals = counts.reduce()
        logger.info("step %d: validation loss %.4f", self.iteration, totals.loss)
        if self._log is not None:
            self._log.write(
                self.iteration, {"validation_loss": totals.loss, "validation_packs": totals.packs}
            )

    def _report(self, metrics: Mapping[str, float], bar: Any) -> None:
        if self._log is None:
            return
        self._log.write(self.iteration, metrics)
        bar.set_postfix(loss=f"{metrics['loss']:.4f}", refresh=False)
        bar.update()
        eta = self._eta.seconds(self.iteration, self.plan.iterations)
        if bar.disable:
            self._line = format_line(self.iteration, self.plan.iterations, metrics, eta)
        if self.iteration == 1 or _is_due(self.iteration, self.config.metrics.log_every):
            self._log_line()

    def _log_line(self) -> None:
        """Log the last step, once."""
        if self._line:
            logger.info(self._line)
        self._line = ""

    def _progress(self) -> Progress:
        stage, trained = self.stages[self._stage], [*self._trained]
        state = stage.train.state() if self._is_main else None
        if stage.packs is not None and state is not None:
            trained.append(TrainedStage(**stage.packs, loader=state["loader"]))
        return Progress(self.iteration, self.plan.bounds[: self._stage + 1], trained)

    def _save(self) -> int:
        data = self.stages[self._stage].train
        path = self.checkpoints.save(self._progress(), self.optimizer, data)
        logger.info("saved %s", path)
        return self.iteration


def _is_due(iteration: int, every: int) -> bool:
    return every > 0 and iteration % every == 0
