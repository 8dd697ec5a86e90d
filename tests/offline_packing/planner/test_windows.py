"""Windows with carry-over: nothing lost, ages and carry limited; packs that follow the source; in
a stream no more packs than ms-swift makes."""

import itertools
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing import plan_packs
from offline_packing.online.pools import MatchedWindows, PackingPool
from offline_packing.planner.strategies import kernels
from offline_packing.planner.strategies.subset_fill import subset_fill
from offline_packing.planner.windows import WindowOptions
from tests.helpers.sizes import as_lists, window_options
from tools.benchmarks.length_distributions import DISTRIBUTIONS, draw_lengths


def run(options: Any, lengths: np.ndarray, cuts: Collection[int] = ()) -> list[list[int]]:
    """Pack a stream, by another pool from each cut on."""
    pool, packs = PackingPool[int](options), list[list[int]]()
    for number, length in enumerate(lengths.tolist()):
        if number in cuts:
            state, waiting = pool.state(), pool.waiting
            pool = PackingPool(options)
            pool.restore(state, waiting)
        packs += pool.add(number, length)
    return packs + pool.finish()


#: Lists of any length; those of `lists` with a `max_size` alone hold five numbers on average.
streams = st.integers(0, 150).flatmap(
    lambda count: st.lists(st.integers(1, 60), min_size=count, max_size=count)
)
option_sets = window_options(seed=st.integers(0, 3))


@given(lengths=streams, options=option_sets)
@settings(max_examples=300, deadline=None)
def test_no_sample_waits_longer_than_asked_nor_more_of_them(lengths, options):
    pool = PackingPool[int](options)
    for window, start in enumerate(range(0, len(lengths), options.window)):
        part = lengths[start : start + options.window]
        packs = [pack for i, own in enumerate(part, start) for pack in pool.add(i, own)]
        if len(part) < options.window:
            assert not packs
            continue
        in_one_pack = sum(lengths[sample] for sample in pool.waiting) <= options.seq_length
        assert len(pool.waiting) <= options.max_carried or in_one_pack
        oldest = min(pool.waiting, default=start) // options.window
        packs_worth = min(1.0, sum(part) / options.seq_length)
        assert not pool.waiting or (window - oldest) * packs_worth < options.max_age
        # Packs that are neither full nor due go because one more of them would be too many.
        packs.sort(key=len)  # of packs that are equally full, the one of most samples
        loads = {sum(lengths[sample] for sample in pack): len(pack) for pack in packs}
        given = min(itertools.chain(*packs), default=start) // options.window
        is_due = (window - given) * packs_worth >= options.max_age
        if packs and not is_due and min(loads) < options.full_at * options.seq_length:
            assert len(pool.waiting) + loads[min(loads)] > options.max_carried


@given(lengths=streams, options=option_sets, cuts=st.lists(st.integers(0, 150), max_size=5))
@settings(max_examples=100, deadline=None)
def test_the_packs_do_not_depend_on_where_the_stream_was_saved(lengths, options, cuts):
    stream = np.array(lengths, np.int32)
    assert run(options, stream, cuts) == run(options, stream)


def num_packs(lengths: np.ndarray, seq_length: int, window: int) -> int:
    return len(run(WindowOptions(seq_length, window=window), lengths))


def num_packs_of_ms_swift(lengths: np.ndarray, seq_length: int, window: int) -> int:
    """As `make peers-online` compares them with ms-swift's own."""
    rule = MatchedWindows(seq_length, "to_constant_volume", window, seed=0, holds_last=True)
    return len(run(rule, lengths))


def test_windows_that_hold_less_than_a_pack_wait_for_a_full_one():
    """1,000 samples were all that might wait, and 16 windows: 30 packs."""
    lengths = np.random.default_rng(0).integers(1, 16, 60_000)
    assert num_packs(lengths, 131_072, 1000) == 4
    assert num_packs(lengths[:5000], 1_000_000, 20) == 1
    assert num_packs(np.append(np.ones(4000, np.int64), [8192] * 50), 8192, 20) == 51


EXHAUSTIVE = pytest.mark.exhaustive
#: Distributions, and how many of similar lengths fill a pack.
MORE_BUFFERS = [
    *itertools.product(DISTRIBUTIONS, (50, 128, 200, 500, 1000)),
    *itertools.product((2.5, 2.9, 3.5, 4.5, 6.3, 12.5), (20, 128, 1000)),
]


@pytest.mark.parametrize(
    ("drawn", "window"),
    [
        *itertools.product(DISTRIBUTIONS, [20]),
        *(pytest.param(*case, marks=EXHAUSTIVE) for case in MORE_BUFFERS),
    ],
)
def test_no_buffer_makes_more_packs_than_ms_swift(drawn: str | float, window: int) -> None:
    if isinstance(drawn, str):
        count = max(3000, 10 * window)
        cases = [(8192, draw_lengths(drawn, count, seed)) for seed in range(3)]
    else:
        near = np.random.default_rng(window).normal(1, 0.1, max(4000, 10 * window)) / drawn
        cases = [(n, (near * n).astype(np.int64).clip(1, n)) for n in (2048, 8192, 131_072)]
    for seq_length, lengths in cases:
        ours = num_packs(lengths, seq_length, window)
        theirs = num_packs_of_ms_swift(lengths, seq_length, window)
        assert ours <= theirs
        if drawn == "narrow":  # which plans of windows of 20 filled to 97.9%, ms-swift to 96.3%
            assert lengths.sum() / (8192 * ours) > 0.995 > lengths.sum() / (8192 * theirs)


@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=120),
    seq_length=st.integers(100, 300),
    num_due=st.integers(0, 8),
    num_new=st.sampled_from([0, 20, 10_000]),
)
@settings(max_examples=100, deadline=None)
def test_a_subset_fill_has_every_sample_once_and_those_that_are_due_together(
    lengths, seq_length, num_due, num_new
):
    sizes, num_due = np.array(lengths), min(num_due, len(lengths))
    packs = as_lists(subset_fill(sizes, num_due, seq_length, num_new))
    assert sorted(sample for pack in packs for sample in pack) == list(range(len(lengths)))
    assert all(sizes[pack].sum() <= seq_length for pack in packs)
    if sizes[:num_due].sum() <= seq_length:
        assert any(set(range(num_due)) <= set(pack) for pack in packs)


def test_the_oldest_pack_is_the_fullest_that_some_subset_makes():
    """Against all subsets of twelve samples."""
    rng = np.random.default_rng(0)
    exact = 0
    for _ in range(200):
        lengths, seq_length = rng.integers(8, 60, 12), int(rng.integers(180, 260))
        first = next(
            pack for pack in as_lists(subset_fill(lengths, 0, seq_length, 12)) if 0 in pack
        )
        chosen = np.arange(1, 2**12, 2)[:, np.newaxis] >> np.arange(12) & 1  # the first in each
        sums = chosen @ lengths
        assert lengths[first].sum() == sums[sums <= seq_length].max()
        exact += lengths[first].sum() == seq_length
    assert 50 < exact < 200


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.filterwarnings("error")
def test_the_same_packs_of_a_stream_in_python(name, monkeypatch):
    lengths = draw_lengths(name, 400)
    options = WindowOptions(8192, window=30, max_carried=50)
    compiled = run(options, lengths)
    monkeypatch.setattr(kernels, "_planned", 0)
    with kernels.kernels_for(0, 8192):
        interpreted = run(options, lengths)
    assert interpreted == compiled


@pytest.mark.parametrize("name", ["captions", "sft", "narrow"])
def test_windows_of_a_thousand_fill_99_95_percent(name):
    lengths = draw_lengths(name, 60_000)
    pool, packs = PackingPool[int](WindowOptions(seq_length=8192)), list[list[int]]()
    for number, length in enumerate(lengths.tolist()):
        ready = pool.add(number, length)
        assert all(number // 1000 - min(pack) // 1000 <= 16 for pack in ready)
        packs += ready
    packs += pool.finish()
    assert lengths.sum(dtype=np.int64) / (len(packs) * 8192) >= 0.9995
    assert sorted(itertools.chain(*packs)) == list(range(len(lengths)))


@pytest.mark.parametrize("strategy", ["knapsack", "first_fit_decreasing", "auto"])
def test_packs_come_out_in_random_order(strategy):
    lengths = draw_lengths("sft", 400)
    options = WindowOptions(seq_length=8192, strategy=strategy)
    longest = [lengths[pack].max() for pack in run(options, lengths)]
    assert len(longest) > 20
    falls = np.mean(np.diff(longest) < 0)
    assert 0.2 < falls < 0.8


def test_locality_reads_few_source_shards_in_order() -> None:
    tokens = draw_lengths("captions", 60_000)
    order = {"assignment": "locality", "source_order": np.arange(60_000)}
    plan = plan_packs(tokens, 8192, window_packs=500, **order)
    assert sorted(plan.sample_ids.tolist()) == list(range(60_000))
    assert plan.num_packs <= plan.info.lower_bound + 3
    shards = np.split(plan.sample_ids, plan.pack_offsets[500:-1:500])
    opened = [np.unique(samples // 10_000) for samples in shards]
    # A stretch of one output shard spans two source shards at most, what is carried one more.
    assert max(map(len, opened)) <= 3
    assert np.mean([len(own) for own in opened]) <= 2.2
    assert all(np.diff(own).max(initial=0) <= 1 for own in opened)
    # In blocks of ten, hardly more is read than written.
    assert 10 * sum(len(np.unique(samples // 10)) for samples in shards) < 1.1 * 60_000
