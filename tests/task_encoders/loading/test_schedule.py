"""Packs in turn: each once per epoch, in the same steps, however often a run goes on with other
ranks."""

import collections
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchdata.stateful_dataloader import StatefulDataLoader

from offline_packing.online.ranks.rank_schedule import RankSchedule
from task_encoders.loading.schedule import InTurn, RankSampler, Schedule, ScheduledLoader, Stretch
from tests.helpers.faults import kill_worker


class Numbers:
    """A dataset of numbers, each row of which is a list."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __getitem__(self, number: int) -> int:
        assert 0 <= number < self.count
        return number

    collate = staticmethod(list)


def read(schedule: InTurn, steps: int, state: Any = None) -> tuple[list[list[list[int]]], Any]:
    """Rows of each step, over the ends of epochs, and a state after them."""
    rows, states = [], []
    for rank in range(schedule.num_ranks):
        sampler, own = RankSampler(schedule, rank), list[list[int]]()
        if state is not None:
            sampler.load_state_dict(state)
        while len(own) < steps:
            epoch = sampler.state.epoch
            for row in sampler:
                own.append(row)
                if len(own) == steps:
                    break
            assert len(own) == steps or sampler.state.epoch > epoch
        rows.append(own)
        states.append(sampler.state_dict())
    assert all(own == states[0] for own in states)
    return [list(step) for step in zip(*rows, strict=True)], states[0]


@settings(deadline=None)
@given(
    keeps_steps=st.booleans(),
    count=st.integers(1, 60),
    legs=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=5),
    size=st.integers(1, 3),
)
def test_each_pack_comes_once_per_epoch(
    keeps_steps: bool, count: int, legs: list[tuple[int, int]], size: int
) -> None:
    """Legs of steps with other numbers of ranks: at no time has a pack come twice more often than
    another, and all are equal when the last leg ends an epoch."""
    state: Any = None
    seen: collections.Counter[int] = collections.Counter()
    for ranks, steps in legs:
        schedule = InTurn(count, ranks, size, keeps_steps=keeps_steps)
        rows, state = read(schedule, steps, state)
        seen.update(number for step in rows for row in step for number in row)
    last = RankSampler(InTurn(count, 1, size, keeps_steps=keeps_steps), 0)
    last.load_state_dict(state)
    for _ in range(2):  # to the ends of the epochs that were begun
        times = [seen[number] for number in range(count)]
        assert max(times) - min(times) <= 1
        seen.update(number for row in last for number in row)
        if not last.state.earlier:
            assert len({seen[number] for number in range(count)}) == 1


def test_order_over_epochs() -> None:
    """7 packs and 2 ranks: the last step takes the next pack, or, where steps are kept, the last
    one. Any number of ranks trains the same packs in steps of six."""
    first = [[[0], [1]], [[2], [3]], [[4], [5]]]
    then = [[[6], [0]], [[1], [2]], [[3], [4]], [[5], [6]]]
    assert read(InTurn(7, 2), 7)[0] == first + then
    assert read(InTurn(7, 2, keeps_steps=True), 7)[0] == [*first, [[6], [6]], *first]
    for ranks in (1, 2, 3, 6):
        rows, _ = read(InTurn(7, ranks), 42 // ranks)
        assert [n for step in rows for row in step for n in row] == [*range(7)] * 6


def test_rows_of_several_packs_keep_steps_of_one_kind() -> None:
    """Steps of 2 ranks, packs with images first; also after the ranks have changed."""
    four, two = InTurn(16, 4, 2, uniform_ranks=4), InTurn(16, 2, 2, uniform_ranks=4)
    rows, state = read(four, 1)
    assert rows == [[[0, 4], [1, 5], [2, 6], [3, 7]]]
    assert read(two, 2, state)[0] == [[[8, 10], [9, 11]], [[12, 14], [13, 15]]]


SCHEDULES: dict[str, Schedule] = {
    "in turn": InTurn(7, 3),
    "once": InTurn(7, 3, repeat=False),
    "balanced": RankSchedule(np.arange(1, 8), None, 3, seed=1),
    "within a budget": RankSchedule(np.arange(1, 60), None, 3, budget=200),
}


@pytest.mark.parametrize(
    ("name", "workers"), [*((name, 0) for name in SCHEDULES), ("once", 2), ("balanced", 2)]
)
def test_a_loader_goes_on_after_any_row(name: str, workers: int) -> None:
    """Over two epochs; of the last step of one that is not repeated some ranks have no row. What
    workers have read ahead is not lost, and any number of them goes on. The length may be asked,
    and an iteration be left, at any time."""

    def make(workers: int) -> ScheduledLoader:
        return ScheduledLoader(Numbers(60), SCHEDULES[name], 1, num_workers=workers)

    loader = make(workers)
    states, rows = [loader.state_dict()], list[list[int]]()
    for _ in range(2):
        left = len(loader)
        for row in loader:
            rows.append(row)
            states.append(loader.state_dict())
            left -= 1
            assert len(loader) == left
        assert left == (name == "once")
    loader.close()
    assert len(rows) >= 4
    for step in range(0, len(rows), 2 if workers else 1):
        restored = make(workers and step % 3)
        restored.load_state_dict(states[step])
        rest = list(itertools.islice(restored, 1))
        further = itertools.chain.from_iterable(itertools.repeat(restored))
        rest += itertools.islice(further, len(rows) - step - len(rest))
        assert rest == rows[step:], step
        restored.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_saves_its_sampler(workers: int) -> None:
    """torchdata's: it rewinds the sampler to what its workers delivered."""

    def make() -> StatefulDataLoader[Any]:
        sampler = RankSampler(SCHEDULES["within a budget"], 1)
        return StatefulDataLoader(
            Numbers(60),  # type: ignore[arg-type]
            batch_sampler=sampler,
            collate_fn=list,
            num_workers=workers,
        )

    loader = make()
    states, rows = [loader.state_dict()], []
    for row in loader:
        rows.append(row)
        states.append(loader.state_dict())
    assert len(rows) > 2
    for step in range(0, len(rows), 1 + workers):
        restored = make()
        restored.load_state_dict(states[step])
        assert list(restored) == rows[step:], step


def test_a_worker_that_dies_is_an_error() -> None:
    loader = ScheduledLoader(Numbers(7), SCHEDULES["balanced"], 0, num_workers=1)
    rows = iter(loader)
    next(rows)
    with pytest.raises(RuntimeError, match="killed by signal"):
        kill_worker(loader._loader, rows)


def test_a_limit_ends_a_pass_and_the_next_begins_anew() -> None:
    loader = ScheduledLoader(Numbers(9), InTurn(9, 2, repeat=False), 0, limit=2)
    assert [list(loader) for _ in range(2)] == [[[0], [2]]] * 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"step": -5}, "step: Input should be greater than or equal to 0"),
        ({"step": 2**62}, "step 4611686018427387904 of 3"),
        ({"epoch": -1}, "epoch: "),
        ({"epoch": 1}, "epoch is 1, and past has 0 epochs"),
        ({"num_ranks": 2**62}, "num_ranks: "),
        ({"earlier": [[0, 1]]}, "earlier.0.0: "),
        ({"other": 1}, "other: Extra inputs"),
        ({"digest": InTurn(8).digest}, "schedule with other lengths"),
        ({"digest": InTurn(7, 1, 2).digest}, "schedule with other lengths"),
    ],
)
def test_hostile_states_are_refused(change: Any, named: str) -> None:
    sampler = RankSampler(InTurn(7, 3), 0)
    said = f"state (of a loader:|belongs to a) {named}"
    with pytest.raises(ValueError, match=said) as refused:
        sampler.load_state_dict({**sampler.state_dict(), **change})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", [*SCHEDULES, "kept steps", "uniform"])
def test_trained_items_are_those_of_all_rows(name: str) -> None:
    """Rows of the next epoch that fill the last step among them; also of the rest of an epoch that
    other ranks began."""
    own = {
        "kept steps": InTurn(16, 3, 2, keeps_steps=True),
        "uniform": InTurn(16, 2, 2, uniform_ranks=4),
    }
    schedule = (SCHEDULES | own)[name]
    for number, earlier in ((0, ()), (1, (Stretch(2, 1),)), (1, (Stretch(2, 0),))):
        epoch = schedule.epoch(number, earlier)
        for steps in range(len(epoch) + 1):
            rows = [epoch.items(s, r) for s in range(steps) for r in range(schedule.num_ranks)]
            found = [int(n) for row in rows for n in row]
            assert sorted(epoch.trained(steps).tolist()) == sorted(found)
        assert len(epoch.trained(len(epoch)))


def test_ranks_by_far_more_than_packs_train_each_as_often() -> None:
    for keeps_steps in (True, False):
        epoch = InTurn(3, 3 * 40_000, keeps_steps=keeps_steps).epoch(0)
        assert np.bincount(epoch.trained(1)).tolist() == [40_000] * 3
