"""pack.mixture: shares of the tokens that change over the plan, in as few packs as without."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.energon import WorkerConfig, get_train_dataset

from offline_packing import plan_packs
from offline_packing.errors import ConfigError
from offline_packing.planner.mixture import Mixture
from offline_packing.planner.pack_plan import PackPlan
from task_encoders.loading.packed_dataset import get_packed_train_dataset
from tests.helpers.datasets import make_run
from tests.scenarios import LINES, two
from tests.world import World, task_encoder

#: Lengths of three sources, which have few in common.
BANDS = ((100, 400), (300, 1500), (900, 4000))
START, END = (0.7, 0.2, 0.1), (0.1, 0.3, 0.6)


def drawn(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths and sources whose tokens have the mean shares of the mixture."""
    rng = np.random.default_rng(0)
    means = np.array([sum(band) / 2 for band in BANDS])
    share = (np.array(START) + END) / 2 / means
    source = rng.choice(3, count, p=share / share.sum())
    low, high = np.array(BANDS).T
    return rng.integers(low[source], high[source]).astype(np.int32), source


def shares_of(plan: PackPlan, lengths: np.ndarray, source: np.ndarray, packs: int) -> np.ndarray:
    """(num_blocks, num_sources) shares of the tokens in blocks of packs."""
    block = np.repeat(np.arange(plan.num_packs), np.diff(plan.pack_offsets)) // packs
    table = np.zeros((block.max() + 1, len(START)))
    np.add.at(table, (block, source[plan.sample_ids]), lengths[plan.sample_ids])
    whole = table[: plan.num_packs // packs]
    return np.asarray(whole / whole.sum(axis=1, keepdims=True))


@pytest.mark.parametrize("copies", [1, 3])
def test_shares_follow_the_lines_in_as_few_packs(copies: int) -> None:
    count, rng = 60_000 // copies, np.random.default_rng(1)
    lengths, source = (np.tile(column, copies) for column in drawn(count))
    samples = np.tile(np.arange(count), copies)
    order = np.repeat(np.arange(copies), count) * count + np.tile(rng.permutation(count), copies)
    copy_of = samples if copies > 1 else None
    mixed = {"mixture": Mixture(START, END), "source": source, "source_order": order}
    plan = plan_packs(lengths, 4096, copy_of=copy_of, **mixed)
    plain = plan_packs(lengths, 4096, copy_of=copy_of)
    assert plan.num_packs <= plain.num_packs + 1
    assert plan.info.lower_bound == plain.info.lower_bound
    assert np.array_equal(np.sort(plan.sample_ids), np.arange(len(lengths)))
    assert np.add.reduceat(lengths[plan.sample_ids], plan.pack_offsets[:-1]).max() <= 4096
    for packs, most in ((100, 0.03), (500, 0.006)):
        found = shares_of(plan, lengths, source, packs)
        middle = (np.arange(len(found))[:, None] + 0.5) * packs / plan.num_packs
        asked = np.array(START) + (np.array(END) - START) * middle
        assert np.abs(found - asked).max() < most
        assert np.abs(shares_of(plain, lengths, source, packs) - asked).max() > 0.2
    assert all(len(np.unique(samples[pack])) == len(pack) for pack in plan)
    if copies > 1:  # a sample comes again after all others of its source
        place = np.empty(len(lengths))
        place[plan.sample_ids] = np.arange(len(lengths)) / len(lengths)
        later = np.diff(place.reshape(copies, -1), axis=0)
        assert (later > 0.1).mean() > 0.98


def test_a_source_can_begin_or_end_without_a_share() -> None:
    lengths = np.random.default_rng(0).integers(100, 2000, 20_000).astype(np.int32)
    order = np.arange(len(lengths))
    mixed = {"mixture": Mixture((1.0, 0.0), (0.0, 1.0)), "source": order % 2, "source_order": order}
    plan = plan_packs(lengths, 4096, **mixed)
    found = shares_of(plan, lengths, order % 2, plan.num_packs // 10)
    assert found[[0, -1], 0] == pytest.approx([0.95, 0.05], abs=0.01)


@pytest.mark.parametrize(
    ("mixture", "change", "named"),
    [
        ({"start": {"first": 0.5}, "end": {"second": 1}}, {}, "sum to 0.5"),
        ({"start": {"first": 1}, "end": {"first": 1}}, {}, "'second' is a source without"),
        ({"start": {"first": 1}, "end": {"more": 1}}, {}, "'(second|more)' is (a|no) sour"),
        (LINES, {"weight": 2}, "remove weight and repeat"),
        (LINES, {"repeat": 2}, "remove weight and repeat"),
    ],
)
def test_what_it_cannot_mean_is_refused(
    world: World, mixture: dict[str, Any], change: dict[str, Any], named: str
) -> None:
    sources = [{**one, **change} for one in world.source(two)]  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=named):
        make_run(sources, Path("out"), pack={"mixture": mixture})


def test_energon_that_shuffles_it_is_warned_of(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    run = world.run(two, pack={"seq_length": 384, "mixture": LINES})
    root, encoder = run.workspace.root, task_encoder(run)
    worker = WorkerConfig(rank=0, world_size=1, num_workers=0)
    warning = "its shards are shuffled, which undoes its mixture"
    get_packed_train_dataset(root, encoder, worker_config=worker)
    assert warning not in caplog.text
    shuffle: dict[str, Any] = {"shuffle_buffer_size": None, "max_samples_per_sequence": None}
    get_train_dataset(root, task_encoder=encoder, batch_size=1, worker_config=worker, **shuffle)
    assert warning in caplog.text
