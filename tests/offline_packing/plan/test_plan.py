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


@pytest.mark.parametrize(("num_workers", "warned"), [(3, True), (1, False)])
def test_packs_that_do_not_divide_evenly_are_warned_of(
    captions: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, num_workers: int, warned: bool
) -> None:
    order = {"num_ranks": 1, "num_workers": num_workers}
    run = make_run(captions, tmp_path / "out", pack={"seq_length": 512, "order": order})
    measure(run)
    packs = plan_index(run).packs
    assert packs.num_packs % 3 != 0  # or the test says nothing
    text = f"{packs.num_packs} packs of split train do not divide evenly among 1 ranks x 3 workers"
    assert (text in caplog.text) is warned
