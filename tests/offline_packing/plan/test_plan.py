"""The plan stage passes the configuration on, and ties the plan to it."""

from pathlib import Path
from typing import Any

import pytest

from offline_packing.errors import ConfigError
from offline_packing.measure.measure import measure
from offline_packing.plan.make_plan import make_plan
from offline_packing.runs.artifacts import open_index
from tests.helpers.datasets import captioning_pairs, make_run, plan_index, plan_summary

PHASES: list[dict[str, Any]] = [
    {"kind": "seeds", "seeds": {"rule": "top_n", "n": 3}, "min_fill": 0.9},
    {"kind": "final"},
]


@pytest.fixture(scope="module")
def captions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return captioning_pairs(tmp_path_factory.mktemp("captions"))


def test_phases_of_the_hash_bucket(captions: Path, tmp_path: Path) -> None:
    runs = [
        make_run(
            captions,
            tmp_path / "out",
            pack={"strategy": "hash_bucket", "strategy_options": options, "seq_length": 128},
        )
        for options in ({}, {"phases": PHASES}, {"phases": PHASES[1:]})
    ]
    measure(runs[0])
    packs = [make_plan(run, open_index(run)).packs for run in runs]
    assert len({tuple(p.sample_ids.tolist()) for p in packs}) == 3
    plan_index(runs[1])
    assert "strategy hash_bucket" in plan_summary(runs[2])  # planned anew for other options


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        ("hash_bucket", {"phases": [{"kind": "nowhere"}]}, "strategy_options: .*nowhere"),
        ("hash_bucket", {"stages": []}, "strategy_options: .*'stages'; valid: phases"),
        ("auto", {"phases": []}, "strategy_options: .*'phases'"),
    ],
)
def test_options_that_the_strategy_has_not(
    captions: Path, tmp_path: Path, strategy: str, options: dict[str, Any], message: str
) -> None:
    pack = {"strategy": strategy, "strategy_options": options}
    with pytest.raises(ConfigError, match=message):
        make_run(captions, tmp_path / "out", pack=pack)
