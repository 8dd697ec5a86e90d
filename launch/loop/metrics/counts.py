"""Sums over the micro batches of a step, on one rank and on all."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import distributed

from launch.loop.progress import Stopwatch, row_flops, tower_shares
from task_encoders.energon_samples import PackedBatch
from task_encoders.families.base.cost import ModelCost
from task_encoders.packs.tokenized import IGNORE_INDEX


class StepCounts:
    """Sums of one rank over the micro batches of a step.

    Losses stay on the device until `reduce`, so that no micro batch waits for the previous one.

    Args:
        context_parallel: ranks that share a row, at most.
        micro_batches: of a step, on each rank, at most; of validation it does not matter.
    """

    def __init__(
        self, device: torch.device, context_parallel: int = 1, micro_batches: int = 0
    ) -> None:
        #: loss, denominator, labelled tokens, and `row_flops`
        self._losses = torch.zeros(6, dtype=torch.float64, device=device)
        self._tokens = self._samples = self._packs = self._parts = 0
        #: operations of the tower on each context parallel rank, and those if each had as many
        #: as the busiest one that shares its row
        self._tower = np.zeros(context_parallel + 1)
        #: tower, language model and sum of this rank in each micro batch
        self._flops = torch.zeros(micro_batches, 3, dtype=torch.float64, device=device)
        self._rows = 0
        self._watch = Stopwatch(device)
        self._data_seconds = 0.0

    def add(
        self,
        row: PackedBatch,
        *,
        loss: torch.Tensor,
        denominator: torch.Tensor,
        cost: ModelCost,
        group: distributed.ProcessGroup | None,
    ) -> None:
        """Count one micro batch.

        Args:
            loss: the sum of its losses, or of this rank's part of it.
            denominator: of the whole row.
            cost: of the model.
            group: the ranks that share the row; all but the losses is counted by the first.
        """
        self._losses[0] += loss.detach().double()
        number = self._rows
        self._rows += 1
        if group is not None and distributed.get_rank(group):
            return
        loss_tokens = (row.labels != IGNORE_INDEX).sum()
        counted = torch.stack([denominator, loss_tokens]).double()
        flops = row_flops(cost, row)
        self._losses[1:] += torch.cat([counted, flops])
        share = flops[[0, 2]] / (1 if group is None else group.size())
        self._flops[number : number + 1] = torch.cat([share, share.sum()[None]])
        self._tokens += row.num_tokens
        self._samples += len(row.sub_sample_keys)
        self._packs += len(row.__key__)
        self._parts += len(row.__key__) * (row.local_cp_size or 1)
        if group is not None and row.local_cp_size is None:
            tower = tower_shares(cost, row, group.size())
            self._tower[: len(tower)] += tower
            self._tower[-1] += len(tower) * tower.max()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Time a forward and a backward."""
        with self._watch:
            yield

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time the wait for the loader."""
        started = time.perf_counter()
        yield
        self._data_seconds += time.perf_counter() - started

    def reduce(self, *, counts: bool, stop: int) -> "StepTotals":
        """Add up over all ranks. A collective.

        Args:
            counts: whether what this rank added counts (one rank's per tensor parallel group).
            stop: the signal that asked this rank to stop, or 0; one is enough for all.
        """
        compute = self._watch.seconds()
        own = [1, self._tokens, self._samples, self._packs, self._parts, *self._tower]
        sums = torch.cat([self._losses, self._losses.new_tensor(own)]) * counts
        sums = torch.cat([sums, sums.new_tensor([compute])])
        worst = sums.new_tensor([compute, self._data_seconds, float(stop)])
        worst = torch.cat([worst, self._flops.flatten()])
        distributed.all_reduce(sums)
        distributed.all_reduce(worst, op=distributed.ReduceOp.MAX)
        loss, denominator, loss_tokens, *flops = sums[:6].tolist()
        *rest, total_compute = sums[6:].tolist()
        ranks, tokens, samples, packs, parts = map(round, rest[:5])
        slowest, data_seconds, stopped = worst[:3].tolist()
        # Where nothing is labelled at all, the gradient should be zero, not NaN.
        denominator = denominator or 1.0
        return StepTotals(
            loss=loss / denominator,
            denominator=denominator,
            loss_tokens=round(loss_tokens),
            tokens=tokens,
            samples=samples,
            packs=packs,
            tower_flops=flops[0],
            language_flops=flops[1],
            planned_language_flops=flops[2],
            parts=parts,
            tower_shares=tuple(rest[5:-1]),
            tower_rounds=rest[-1],
            ranks=ranks,
            slowest_flops=worst[3:].view(-1, 3).sum(dim=0).tolist(),
            imbalance=distributed.get_world_size() * slowest / total_compute if slowest else 1.0,
            data_seconds=data_seconds,
            stop=round(stopped),
        )


@dataclass(frozen=True, slots=True)
class StepTotals:
    """A step over all ranks."""

    loss: float
    denominator: float
    loss_tokens: int
    tokens: int
    samples: int
    packs: int
    #: ranks that these go over, if they differ in that; else packs
    parts: int
    #: operations of the forward pass
    tower_flops: float
    language_flops: float
    #: with the logits of all tokens, as plans count it
    planned_language_flops: float
    #: the tower's on each context parallel rank; and as if all had as many as the one with most in
    #: its row
    tower_shares: tuple[float, ...]
    tower_rounds: float
    #: data parallel ranks, times those that share rows
    ranks: int
    #: tower, language model and sum: of the rank with most in each micro batch, added up
    slowest_flops: Sequence[float]
    #: compute seconds of the slowest rank over the mean
    imbalance: float
    #: the longest that any rank waited for its loader
    data_seconds: float
    #: the signal that asked any rank to stop, or 0
    stop: int

    def metrics(self, seconds: float, tokens_per_rank: int) -> dict[str, float]:
        """The step's line. `fill`: real tokens as a share of the room in the packs. Under context
        parallelism `tower_0`, …: each rank's share of the vision tower's operations, and
        `tower_idle`: the share of its time in which ranks wait for the one with most in its row."""
        tower = {}
        if len(self.tower_shares) > 1:
            total = sum(self.tower_shares) or 1.0  # there may be no media
            tower = {f"tower_{rank}": work / total for rank, work in enumerate(self.tower_shares)}
            tower["tower_idle"] = max(0.0, 1 - total / (self.tower_rounds or 1.0))
        return (
            tower
            | self._idle_shares()
            | {
                "loss": self.loss,
                "tokens_per_second": self.tokens / seconds,
                "samples_per_second": self.samples / seconds,
                "fill": self.tokens / (self.parts * tokens_per_rank),
                "packs": self.packs,
                "sub_samples": self.samples,
                "tokens": self.tokens,
                "loss_tokens": self.loss_tokens,
                "step_seconds": seconds,
                "data_wait": self.data_seconds / seconds,
                "rank_imbalance": self.imbalance,
            }
        )

    def _idle_shares(self) -> dict[str, float]:
        """Shares of the operations' time that ranks wait for the one with most in each micro batch,
        as a plan and `RankSchedule` have them; none for one rank. `idle_share`: of tower and
        language model together; `two_phase_idle_share`: after the tower, too; and of each alone."""
        if self.ranks < 2:
            return {}
        tower, language = self.tower_flops, self.planned_language_flops
        slowest_tower, slowest_language, slowest_sum = self.slowest_flops
        pairs = {
            "idle_share": (tower + language, slowest_sum),
            "two_phase_idle_share": (tower + language, slowest_tower + slowest_language),
            "tower_idle_share": (tower, slowest_tower),
            "language_idle_share": (language, slowest_language),
        }
        return {
            name: max(0.0, 1 - work / (self.ranks * slowest)) if slowest else 0.0
            for name, (work, slowest) in pairs.items()
        }
