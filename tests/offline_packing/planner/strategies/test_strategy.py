"""Declarations of strategies: shown in help and guide; a new one is a file and a line."""

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from pydantic import Field

from offline_packing import plan_packs
from offline_packing.cli.commands import cli
from offline_packing.config.packing import parse_config
from offline_packing.errors import ConfigError
from offline_packing.planner.strategies import STRATEGIES, describe_options
from offline_packing.planner.strategies.strategy import Packs, Strategy, StrategyOptions

GUIDE = Path(__file__).parents[4] / "docs" / "configuration.md"


class PairsOptions(StrategyOptions):
    """Options of the strategy below."""

    per_pack: int = Field(2, ge=1, description="neighbours that share a pack")


def _pairs(sizes: np.ndarray, limits: np.ndarray, *, options: PairsOptions, seed: int) -> Packs:
    """Neighbours share a pack, whatever their lengths."""
    ends = np.arange(0, len(sizes), options.per_pack)
    return Packs(np.arange(len(sizes)), np.append(ends, len(sizes)))


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one line that a new strategy takes."""
    monkeypatch.setitem(STRATEGIES, "pairs", Strategy(_pairs, PairsOptions))


def test_options_are_in_the_guide_and_in_help() -> None:
    options = list(describe_options())
    assert ("knapsack", "extra_packs", "0") in [option[:3] for option in options]
    guide = GUIDE.read_text()
    shown = CliRunner().invoke(cli, ["plan", "--help"], terminal_width=300).output
    for strategy, name, default, meaning in options:
        assert f"| `{strategy}` | `{name}` | {default} | {meaning.replace('|', '/')} |" in guide
        assert f"{strategy}: {name}" in shown
        assert " ".join(meaning.split()) in " ".join(shown.split())


@pytest.mark.usefixtures("pairs")
def test_a_new_strategy_is_one_file_and_one_line() -> None:
    plan = plan_packs(
        np.full(7, 10), 100, strategy="pairs", strategy_options={"per_pack": 3}, assignment=()
    )
    assert [sorted(pack.tolist()) for pack in plan] == [[0, 1, 2], [3, 4, 5], [6]]
    assert "pairs: per_pack" in CliRunner().invoke(cli, ["plan", "--help"]).output
    config = {
        "source": {"format": "pairs", "path": "data", "task": "vqa"},
        "output": {"path": "out"},
        "pack": {"strategy": "pairs", "strategy_options": {"per_pack": 4}},
    }
    assert parse_config(config).pack.strategy == "pairs"
    config["pack"] = {"strategy": "pairs", "strategy_options": {"per_pack": 0}}
    with pytest.raises(ConfigError, match="per_pack: Input should be greater than or equal to 1"):
        parse_config(config)
