"""Strategies: each sample once, no pack over any limit, and their options."""

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing.cli.commands import cli
from offline_packing.config.packing import parse_config
from offline_packing.errors import ConfigError
from offline_packing.planner.strategies import STRATEGIES, describe_options
from offline_packing.planner.strategies.budgets import pack_budgets, size_lower_bound
from tests.helpers.sizes import limited_sizes
from tools.benchmarks.length_distributions import draw_sft

ABLE = [name for name, strategy in STRATEGIES.items() if not strategy.lengths_only]
GUIDE = Path(__file__).parents[4] / "docs" / "configuration.md"


def test_options_are_in_the_guide_and_in_help() -> None:
    options = list(describe_options())
    assert ("knapsack", "extra_packs", "0") in [option[:3] for option in options]
    guide = GUIDE.read_text()
    shown = CliRunner().invoke(cli, ["plan", "--help"], terminal_width=300).output
    for strategy, name, default, meaning in options:
        assert f"| `{strategy}` | `{name}` | {default} | {meaning.replace('|', '/')} |" in guide
        assert f"{strategy}: {name}" in shown
        assert " ".join(meaning.split()) in " ".join(shown.split())


def test_options_of_a_configuration_are_checked() -> None:
    pack = {"strategy": "knapsack", "strategy_options": {"extra_packs": -1}}
    source = {"format": "pairs", "path": "data", "task": "vqa"}
    with pytest.raises(ConfigError, match="extra_packs: Input should be greater than or equal"):
        parse_config({"source": source, "output": {"path": "out"}, "pack": pack})


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_takes_what_can_be_packed(name) -> None:
    """Nothing at all, and lengths of which two overflow 16 bits."""
    strategy = STRATEGIES[name]
    assert strategy(np.zeros(0, np.int32), 64).num_packs == 0
    lengths = np.array([200_000, 62_144, 70_000])
    packs = strategy(lengths, 262_144)
    assert packs.num_packs == 2
    assert packs.sums(lengths).max() <= 262_144


@pytest.mark.parametrize("name", ABLE)
@given(case=limited_sizes(), seed=st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_every_sample_once_and_no_pack_over_any_limit(name, case, seed):
    sizes, limits = case
    packs = STRATEGIES[name](sizes, limits, seed=seed)
    assert sorted(packs.sample_ids.tolist()) == list(range(len(sizes)))
    assert (np.diff(packs.pack_offsets) > 0).all()
    if len(sizes):
        assert (packs.sums(sizes) <= limits).all()


@pytest.mark.parametrize("name", [name for name in ABLE if name != "auto"])
def test_a_budget_that_never_binds_changes_no_pack(name):
    rng = np.random.default_rng(4)
    lengths, images = rng.integers(1, 900, 3000), rng.integers(0, 4, 3000)
    plain = STRATEGIES[name](lengths, 4096, seed=1)
    sizes = np.stack([lengths, images], axis=1)
    wide = STRATEGIES[name](sizes, np.array([4096, 100_000]), seed=1)
    np.testing.assert_array_equal(plain.sample_ids, wide.sample_ids)
    np.testing.assert_array_equal(plain.pack_offsets, wide.pack_offsets)


def test_tokens_and_patches_near_the_bound() -> None:
    sizes = np.stack(draw_sft(20_000), axis=1).astype(np.int64)
    limits = np.array([8192, 22_000])
    packs = pack_budgets(sizes, limits, seed=1)
    assert sorted(packs.sample_ids.tolist()) == list(range(20_000))
    loads = np.add.reduceat(sizes[packs.sample_ids], packs.pack_offsets[:-1], axis=0)
    assert (loads <= limits).all()
    bound = max(size_lower_bound(sizes[:, i], int(limits[i])) for i in range(2))
    assert packs.num_packs <= 1.003 * bound


@pytest.mark.parametrize("number", [10, 31, 2000])
@pytest.mark.parametrize("most", [2, 3, 4, 8])
def test_packs_are_filled_where_tokens_are_not_scarce(number, most) -> None:
    sizes = np.stack([np.random.default_rng(0).integers(50, 150, number), np.ones(number, int)], 1)
    packs = pack_budgets(sizes, np.array([8192, most]), seed=0)
    assert packs.num_packs == -(-number // most)


@pytest.mark.parametrize(("sizes", "limit", "bound"), [([], 5, 0), ([0, 0], 5, 1), ([3, 3], 5, 2)])
def test_size_lower_bound(sizes, limit, bound) -> None:
    assert size_lower_bound(np.array(sizes, np.int64), limit) == bound
    assert size_lower_bound(np.array([2**25, 2**25]), 2**26) == 1
