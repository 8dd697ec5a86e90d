"""Windows with carry-over: nothing lost, ages and carry limited; packs that follow the source."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing import plan_packs
from offline_packing.planner.strategies.strategy import join_packs
from offline_packing.planner.windows import WindowOptions, WindowPlanner
from tests.helpers.sizes import as_lists, caption_lengths, pack_sums, variation
from tests.helpers.windows import window_options
from tools.benchmarks.length_distributions import draw_lengths


def run(planner: WindowPlanner, lengths: np.ndarray, cuts: list[int]) -> list[list[int]]:
    packs = [planner.push(part) for part in np.split(lengths, cuts)]
    return as_lists(join_packs([*packs, planner.finish()]))


streams = st.lists(st.integers(1, 60), max_size=150)
option_sets = window_options(seed=st.integers(0, 3))


@given(lengths=streams, options=option_sets)
@settings(max_examples=100, deadline=None)
def test_every_sample_once_within_capacity_age_and_carry(lengths, options):
    planner = WindowPlanner(options)
    seen: list[int] = []
    for window, start in enumerate(range(0, len(lengths), options.window)):
        part = np.array(lengths[start : start + options.window], np.int64)
        packs = as_lists(planner.push(part))
        complete = len(part) == options.window
        assert complete or not packs
        for pack in packs:
            assert sum(lengths[sample] for sample in pack) <= options.seq_length
            assert all(window - sample // options.window <= options.max_age for sample in pack)
            seen += pack
        waiting = set(range(start + len(part))) - set(seen)
        assert planner.num_waiting == len(waiting)
        if complete:
            assert len(waiting) <= options.max_carried
            assert all(window - sample // options.window < options.max_age for sample in waiting)
    for pack in as_lists(planner.finish()):
        assert sum(lengths[sample] for sample in pack) <= options.seq_length
        seen += pack
    assert sorted(seen) == list(range(len(lengths)))
    assert planner.num_waiting == 0


@given(lengths=streams, options=option_sets, cuts=st.lists(st.integers(0, 150), max_size=5))
@settings(max_examples=100, deadline=None)
def test_the_packs_do_not_depend_on_how_the_stream_was_cut(lengths, options, cuts):
    stream = np.array(lengths, np.int32)
    whole = run(WindowPlanner(options), stream, [])
    assert run(WindowPlanner(options), stream, sorted(cuts)) == whole


@pytest.mark.parametrize("name", ["captions", "sft", "narrow"])
def test_windows_of_a_thousand_fill_99_95_percent(name):
    lengths = draw_lengths(name, 60_000)
    planner = WindowPlanner(WindowOptions(seq_length=8192))
    parts = []
    for window, start in enumerate(range(0, len(lengths), 1000)):
        parts.append(planner.push(lengths[start : start + 1000]))
        assert (window - parts[-1].sample_ids // 1000).max() <= 16
    packs = join_packs([*parts, planner.finish()])
    assert lengths.sum(dtype=np.int64) / (packs.num_packs * 8192) >= 0.9995
    assert sorted(packs.sample_ids.tolist()) == list(range(len(lengths)))


@pytest.mark.parametrize("strategy", ["knapsack", "first_fit_decreasing", "auto"])
def test_packs_come_out_in_random_order(strategy):
    lengths = draw_lengths("sft", 400)
    planner = WindowPlanner(WindowOptions(seq_length=8192, strategy=strategy))
    longest = [lengths[pack].max() for pack in run(planner, lengths, [])]
    assert len(longest) > 20
    falls = np.mean(np.diff(longest) < 0)
    assert 0.2 < falls < 0.8


def test_bad_input_is_refused_by_name_and_leaves_the_planner_as_it_was():
    planner = WindowPlanner(WindowOptions(seq_length=10, window=5))
    planner.push(np.array([1, 2]))
    with pytest.raises(ValueError, match="sample 3 has 11 tokens"):
        planner.push(np.array([1, 11]))
    with pytest.raises(ValueError, match=r"sample_ids has shape \(1,\)"):
        planner.push(np.array([1, 2]), np.array([5]))
    assert planner.num_waiting == 2


def read_per_written(plan, packs_per_shard: int) -> float:
    """Samples read in blocks of ten by all output shards, per sample written."""
    shard = np.repeat(np.arange(plan.num_packs) // packs_per_shard, np.diff(plan.pack_offsets))
    blocks = np.unique(np.stack([shard, plan.sample_ids // 10]), axis=1)
    return 10 * blocks.shape[1] / len(plan.sample_ids)


def test_locality_reads_few_source_shards_in_order() -> None:
    tokens, _ = caption_lengths(60_000)
    source_shard = np.arange(60_000) // 10_000
    packs_per_shard = 500
    plan = plan_packs(
        tokens,
        8192,
        assignment="locality",
        source_order=np.arange(60_000),
        window_packs=packs_per_shard,
    )
    assert sorted(plan.sample_ids.tolist()) == list(range(60_000))
    assert plan.num_packs <= plan.info.lower_bound + 3
    opened = [
        np.unique(source_shard[plan.sample_ids[plan.pack_offsets[i] : plan.pack_offsets[j]]])
        for i, j in zip(
            range(0, plan.num_packs, packs_per_shard),
            [*range(packs_per_shard, plan.num_packs, packs_per_shard), plan.num_packs],
            strict=True,
        )
    ]
    # A stretch of one output shard spans two source shards at most, what is carried one more.
    assert max(map(len, opened)) <= 3
    assert np.mean([len(shards) for shards in opened]) <= 2.2
    assert all(np.diff(shards).max(initial=0) <= 1 for shards in opened)
    assert read_per_written(plan, packs_per_shard) < 1.1


def test_locality_with_balance_stays_within_windows() -> None:
    tokens, patches = caption_lengths(20_000)
    arguments = {"source_order": np.arange(20_000), "window_packs": 300}
    plain = plan_packs(tokens, 8192, assignment="locality", **arguments)
    even = plan_packs(
        tokens, 8192, assignment=["locality", "balance"], balance_by=patches, **arguments
    )
    assert even.num_packs == plain.num_packs
    assert variation(pack_sums(even, patches)) < 0.9 * variation(pack_sums(plain, patches))
    for start in range(0, plain.num_packs, 300):
        stretch = slice(
            plain.pack_offsets[start], plain.pack_offsets[min(start + 300, plain.num_packs)]
        )
        assert set(plain.sample_ids[stretch]) == set(even.sample_ids[stretch])
