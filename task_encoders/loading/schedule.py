"""Which packs each rank trains at each step, and the loader that reads them.

    schedule = InTurn.of(PackedFolder("out/packed", task_encoder), num_ranks=2)

    step 0    rank 0: pack 0    rank 1: pack 1
    step 1    rank 0: pack 2    rank 1: pack 3
    step 2    rank 0: pack 4    rank 1: pack 0 of the next epoch

A schedule is a function of its arguments, so that every process computes the same one, and the
state of a run is an epoch and a step. A run that goes on with another number of ranks trains the
rest of the epoch.
"""

import gc
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from task_encoders.field_types import Count, Integer, NonNegative, checked, first_problem, not_bool

if TYPE_CHECKING:
    from task_encoders.loading.packed_folder import PackedFolder

Numbers = npt.NDArray[np.int64]
Ranks = Annotated[int, BeforeValidator(not_bool), Field(ge=1, le=1 << 20)]


class Stretch(NamedTuple):
    """Steps of an epoch that were trained with some number of ranks."""

    num_ranks: Ranks
    #: 0: rows of this epoch that were trained in the last step of the epoch before
    steps: NonNegative


class LoaderState(BaseModel):
    """State of a `RankSampler`: the same on all ranks at the same step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    epoch: NonNegative
    step: NonNegative
    num_ranks: Ranks
    #: stretches of this epoch before those ranks'
    earlier: tuple[Stretch, ...]
    #: stretches of each epoch before, see `trained_items`
    past: tuple[tuple[Stretch, ...], ...]
    digest: str

    @model_validator(mode="after")
    def _check_past(self) -> Self:
        if len(self.past) != self.epoch:
            raise ValueError(f"epoch is {self.epoch}, and past has {len(self.past)} epochs")
        return self

    @property
    def epochs(self) -> tuple[tuple[Stretch, ...], ...]:
        """Stretches of each epoch, this one among them."""
        return (*self.past, (*self.earlier, Stretch(self.num_ranks, self.step)))

    @property
    def num_rows(self) -> int:
        """Count the rows that all ranks were given."""
        return sum(ranks * steps for stretches in self.epochs for ranks, steps in stretches)

    def at_step(self, step: int) -> Self:
        """Return the state at another step of the epoch."""
        return self.model_copy(update={"step": step})

    def after_epoch(self, begun: tuple[Stretch, ...]) -> Self:
        """Return the state after the epoch, of whose next one `begun` was trained."""
        update = {"epoch": self.epoch + 1, "step": 0, "earlier": begun, "past": self.epochs}
        return self.model_copy(update=update)


@dataclass(frozen=True)
class Epoch:
    """The steps of an epoch, or of what earlier stretches left of it."""

    #: items of all rows, one row after the other; where each row begins in them, and the end
    numbers: Numbers
    starts: Numbers
    #: (num_steps, num_ranks), the row that each rank trains
    table: Numbers
    #: rows of the next epoch that the last step of this one trains
    begun: tuple[Stretch, ...]

    def __len__(self) -> int:
        """Count the steps."""
        return len(self.table)

    def items(self, step: int, rank: int) -> Numbers:
        """Return the items of a rank's row, (n,); none if the rank has no row at this step."""
        start, end = self.starts[self.table[step, rank] :][:2]
        return self.numbers[start:end]

    def trained(self, steps: int) -> Numbers:
        """Return the items of all ranks' rows in the first steps, (n,), also of the next
        epoch's."""
        rows = self.table[:steps].ravel()
        sizes = np.diff(self.starts)[rows]
        firsts = self.starts[rows] - np.cumsum(sizes) + sizes
        return self.numbers[np.repeat(firsts, sizes) + np.arange(sizes.sum())]


class Schedule(Protocol):
    """The steps of all epochs."""

    num_ranks: int

    @property
    def digest(self) -> str:
        """Identifies the scheduled items, with any number of ranks."""

    def epoch(self, number: int, earlier: Sequence[Stretch] = ()) -> Epoch:
        """Return the steps that are left of an epoch after `earlier` stretches of it."""


class InTurn:
    """Packs in their order: at step s, rank r of W trains row s · W + r. Each pack comes once per
    epoch, and no rank is more than one row ahead of another.

    Args:
        num_packs: packs of an epoch.
        packs_per_row: packs that a rank takes at a time; the last row of an epoch may have fewer.
        keeps_steps: rows missing in the last step of an epoch are the last ones of the next, not
            the first: its steps then hold the same packs again, as an order for ranks needs it.
        uniform_ranks: ranks that take packs of one kind in turn; rows of several packs then are of
            one kind as well. 0: none.
        repeat: whether another epoch follows. Otherwise ranks may have no row at the last step.
    """

    def __init__(
        self,
        num_packs: int,
        num_ranks: int = 1,
        packs_per_row: int = 1,
        *,
        keeps_steps: bool = False,
        uniform_ranks: int = 0,
        repeat: bool = True,
    ) -> None:
        self.num_ranks = num_ranks
        self._num_packs = num_packs
        self._size, self._repeat, self._keeps_steps = packs_per_row, repeat, keeps_steps
        self._num_rows = -(-num_packs // packs_per_row)
        self._is_uniform = bool(uniform_ranks) and uniform_ranks % num_ranks == 0
        described = repr(("in turn", [num_packs], packs_per_row, keeps_steps))
        self.digest = hashlib.sha256(described.encode()).hexdigest()[:16]

    @classmethod
    def of(cls, folder: "PackedFolder", *args: Any, **options: Any) -> "InTurn":
        """Schedule the packs of a folder in its order, with any other arguments."""
        steps = {"keeps_steps": folder.step_ranks > 0, "uniform_ranks": folder.uniform_ranks}
        turns = cls(len(folder), *args, **(steps | options))
        if len({shard.root for shard in folder.shards}) > 1:  # in the order of a blend's weights
            parts = repr((turns.digest, [(shard.start, shard.end) for shard in folder.shards]))
            order = folder.order.astype("<i8").tobytes()
            turns.digest = hashlib.sha256(parts.encode() + order).hexdigest()[:16]
        return turns

    def epoch(self, number: int, earlier: Sequence[Stretch] = ()) -> Epoch:
        """See `Schedule`."""
        start, end, num_rows = 0, self._num_packs, self._num_rows
        begun = sum(stretch.num_ranks for stretch in earlier if not stretch.steps)
        trained = sum(stretch.num_ranks * stretch.steps for stretch in earlier)
        if not self._keeps_steps:
            start += begun * self._size
        elif begun:
            end = start + max(0, num_rows - begun) * self._size
        numbers = np.arange(min(start + trained * self._size, end), end)
        if self._is_uniform:
            numbers = numbers[dealt_in_rows(len(numbers), self.num_ranks, self._size)]
        own = np.arange(0, len(numbers), self._size)
        missing = -len(own) % self.num_ranks
        # Rows of the next epoch that are trained before it begins, in all and in this step.
        before = max(0, begun + trained - num_rows)
        ahead = before + missing if self._repeat else 0
        filling = [self._row_of_next(place) for place in range(before, ahead)]
        filling += [numbers[:0]] * (missing - len(filling))
        starts = np.append(own, np.cumsum([len(numbers), *map(len, filling)]))
        table = np.arange(len(starts) - 1).reshape(-1, self.num_ranks)
        after = (Stretch(ahead, 0),) if ahead else ()
        return Epoch(np.concatenate([numbers, *filling]), starts, table, after)

    def _row_of_next(self, place: int) -> Numbers:
        """Return the packs of the row that the next epoch, as it is begun, has at a place."""
        place %= self._num_rows
        first = (self._num_rows - 1 - place if self._keeps_steps else place) * self._size
        return np.arange(first, min(first + self._size, self._num_packs))


def trained_items(
    state: LoaderState, schedule_of_ranks: Callable[[int], Schedule]
) -> Iterator[Numbers]:
    """Yield the items that all ranks trained up to a state of a `RankSampler`, each as often as it
    was trained, some at a time. `schedule_of_ranks` gives the schedule of a number of ranks. Raises
    ValueError if it schedules other items than the state's, or fewer steps, or there are too many
    to go through."""
    ranks = sum(one.num_ranks for stretches in state.epochs for one in stretches)
    if state.epoch > 1 << 17 or ranks > 1 << 22:  # each takes its time
        raise ValueError(f"{state.epoch:,} epochs of {ranks:,} ranks in all are too many to count")
    for number, stretches in enumerate(state.epochs):
        for place, (num_ranks, steps) in enumerate(stretches):
            if steps:
                schedule = schedule_of_ranks(num_ranks)
                if schedule.digest != state.digest:
                    raise ValueError("the packs have been written anew since")
                epoch = schedule.epoch(number, stretches[:place])
                if steps > len(epoch):
                    raise ValueError(f"{steps:,} steps of epoch {number}, which has {len(epoch):,}")
                yield epoch.trained(steps)


def dealt_in_rows(num_packs: int, num_ranks: int, packs_per_row: int) -> Numbers:
    """Order packs so that rows of several, dealt to the ranks in turn, hold packs of the same
    steps: 8 packs, 2 ranks, 2 packs per row: 0 2 | 1 3 | 4 6 | 5 7."""
    numbers = np.arange(num_packs)
    whole = num_packs // (num_ranks * packs_per_row) * num_ranks * packs_per_row
    rows = numbers[:whole].reshape(-1, packs_per_row, num_ranks).transpose(0, 2, 1)
    return np.append(rows.ravel(), numbers[whole:])


class RankSampler:
    """One rank's rows, each a list of items: a `batch_sampler` of torch's DataLoader.

    Iterating yields the rest of the present epoch, and moves on to the next. The state is that of
    the next row to be asked for. Loader processes ask ahead of what they deliver; with them, take
    the state of `ScheduledLoader`.

    Args:
        limit: rows of an epoch at most.
    """

    @checked
    def __init__(self, schedule: Any, rank: Integer, *, limit: Count | None = None) -> None:
        if not 0 <= rank < schedule.num_ranks:
            raise ValueError(f"rank {rank} is not one of {schedule.num_ranks} ranks")
        self.schedule: Schedule = schedule
        self.rank, self.limit = rank, limit
        own = {"num_ranks": schedule.num_ranks, "digest": schedule.digest}
        #: of the next row
        self.state = LoaderState(epoch=0, step=0, earlier=(), past=(), **own)
        self._current: tuple[Any, Epoch] | None = None

    def __len__(self) -> int:
        """Count the rows left in this epoch; the last step may have none for this rank."""
        return self._end() - self.state.step

    def __iter__(self) -> Iterator[list[int]]:
        begun, scheduled, end = self.begun, self._scheduled(), self._end()
        for step in range(self.state.step, end):
            self.state = self.state.at_step(step + 1)
            if len(items := scheduled.items(step, self.rank)):
                yield items.tolist()
        self.state = self.state.at_step(end).after_epoch(begun)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values, the same on all ranks at the same step."""
        return self.state.model_dump(mode="json")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of any rank. With the same number of ranks training goes on exactly there;
        another number trains the rest of the epoch. Raises ValueError if it scheduled other
        items, or is not such a state."""
        try:
            found = LoaderState.model_validate(state)
        except ValidationError as error:
            raise ValueError(f"state of a loader: {first_problem(error)}") from error
        if found.digest != self.schedule.digest:
            raise ValueError(
                "the state belongs to a schedule with other lengths, costs, budget or seed; load "
                "it with the same ones, or start without it"
            )
        if (num_ranks := self.schedule.num_ranks) != found.num_ranks:
            own = (Stretch(found.num_ranks, found.step),) if found.step else ()
            update = {"num_ranks": num_ranks, "earlier": (*found.earlier, *own), "step": 0}
            found = found.model_copy(update=update)
        self.state = found
        if found.step > len(scheduled := self._scheduled()):
            raise ValueError(f"state of a loader: step {found.step} of {len(scheduled)}")

    @property
    def begun(self) -> tuple[Stretch, ...]:
        """Rows of the next epoch that the rest of this epoch trains."""
        scheduled = self._scheduled()
        return scheduled.begun if self._end() == len(scheduled) else ()

    def _end(self) -> int:
        steps = len(self._scheduled())
        return steps if self.limit is None else min(steps, self.limit)

    def _scheduled(self) -> Epoch:
        wanted = self.state.epoch, self.state.earlier
        if self._current is None or self._current[0] != wanted:
            self._current = wanted, self.schedule.epoch(*wanted)
        return self._current[1]


@contextmanager
def starting_workers(num_workers: int) -> Iterator[None]:
    """Start a loader's workers. Garbage collection in a worker writes to, and so copies, every page
    shared with its parent, unless the parent froze them: eight workers then start in a sixth of the
    time."""
    if num_workers:
        gc.collect()
        gc.freeze()
    try:
        yield
    finally:
        if num_workers:
            gc.unfreeze()


class ScheduledLoader(RankSampler):
    """One rank's rows as batches, epoch after epoch: each iteration is the rest of an epoch. The
    state is that of the batches that were delivered; any number of workers goes on from it exactly.

    ::

        folder = PackedFolder("out/packed", task_encoder)
        schedule = InTurn.of(folder, num_ranks=8)
        loader = ScheduledLoader(folder, schedule, rank=3, num_workers=4)
        for batch in loader:  # rows, as from the Energon loader
            ...
            state = loader.state_dict()  # the next batch is the first after a restart

    Args:
        dataset: a map-style dataset of the schedule's items: a `PackedFolder`, or samples.
        collate_fn: list of items -> batch; default: the dataset's own `collate`.
        limit: rows of an epoch at most.
        options: of `torch.utils.data.DataLoader`: num_workers, prefetch_factor, pin_memory, …
    """

    def __init__(
        self,
        dataset: Any,
        schedule: Schedule,
        rank: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        *,
        limit: int | None = None,
        **options: Any,
    ) -> None:
        import torch  # schedules alone do without
        from torch.utils.data import DataLoader

        super().__init__(schedule, rank, limit=limit)
        #: asked by workers for rows ahead of those that were delivered
        self._ahead = RankSampler(schedule, rank, limit=limit)
        has_workers = options.get("num_workers", 0) > 0
        # Torch draws its workers' seeds from a separate generator: dropout, which is drawn from the
        # default one, must not differ after resuming.
        own = {"persistent_workers": has_workers, "generator": torch.Generator()}
        self._loader = DataLoader[Any](
            dataset,
            batch_sampler=self._ahead,
            collate_fn=collate_fn or getattr(dataset, "collate", None),
            **(own | options),
        )

    def __iter__(self) -> Iterator[Any]:
        begun = self.begun
        self._ahead.state, self._ahead._current = self.state, self._current
        with starting_workers(self._loader.num_workers):
            rows = iter(self._loader)
        for batch in rows:
            self.state = self.state.at_step(self.state.step + 1)
            yield batch
        self.state = self.state.after_epoch(begun)

    def close(self) -> None:
        """End the workers; another iteration would start new workers."""
        workers = self._loader._iterator  # torch has no public name for it
        if workers is not None:
            workers._shutdown_workers()  # type: ignore[attr-defined]
            self._loader._iterator = None
