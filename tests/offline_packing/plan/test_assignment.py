"""Which sample stands where in which pack; the figures of a plan, against numbers worked out by
hand."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from offline_packing.config.sections import ReportConfig
from offline_packing.plan.assignment import write_assignment
from offline_packing.plan.summary import render_summary
from offline_packing.planner.plan_packs import plan_packs
from offline_packing.runs.artifacts import open_index, open_plan
from offline_packing.runs.figures import padded_tokens, plan_figures, sample_figures
from tests.scenarios import repeated
from tests.world import World


def test_an_assignment_has_a_row_for_each_use(world: World, tmp_path: Path) -> None:
    run = world.run(repeated)
    samples, planned = open_index(run), open_plan(run).packs
    columns = samples.table("key", "source_id", "num_tokens")
    write_assignment(columns, planned, tmp_path / "out.parquet")
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    packs: dict[int, list[str]] = {}
    for row in rows:
        assert row["position"] == len(packs.setdefault(row["pack"], []))
        packs[row["pack"]].append(row["key"])
    keys = columns["key"].to_pylist()
    found = [[key.partition("#")[0] for key in pack] for pack in packs.values()]
    assert found == [[keys[i] for i in pack] for pack in planned]
    assert sum(row["key"].endswith("#2") for row in rows) == 8
    assert len({row["key"] for row in rows}) == len(rows) == 30
    assert {row["source_id"] for row in rows} == {0, 1}


def test_padded_tokens_are_the_mean_over_orders() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 400, 1003)
    drawn = []
    for _ in range(300):
        batches = np.split(rng.permutation(lengths), range(8, 1003, 8))
        drawn.append(sum(len(batch) * batch.max() for batch in batches))
    assert padded_tokens(np.bincount(lengths), 8) == pytest.approx(np.mean(drawn), rel=2e-3)


def test_figures() -> None:
    lengths = np.array([60, 40, 70, 30, 100, 50], np.int32)
    packs = plan_packs(lengths, 100)
    assert (packs.num_packs, packs.info.lower_bound, packs.packing_factor) == (4, 4, 1.5)
    compared = ReportConfig(global_batch_size=2, padded_batch_size=6)
    figures = sample_figures(8, {"bad_json": 2}) | plan_figures(compared, lengths, packs)
    found = figures["saving"]
    assert found["padding_before"] == pytest.approx(250 / 600)  # six padded to 100
    assert found["padding_after"] == 0
    assert (found["iterations_before"], found["iterations_after"]) == (3, 2)
    assert found["equal_batch_size"] == 1
    text = render_summary(figures)
    shown = {line[:24].strip(): line[24:] for line in text.splitlines()}
    assert (shown["samples"], shown["fill"]) == ("8", "87.50%")
    bars = text.partition("samples by tokens\n")[2].splitlines()
    assert sum(int(line.split()[-1]) for line in bars) == 6
    assert "41.7% -> 0.0%" in text
    assert "3 -> 2 per epoch at global batch size 2" in text
    assert "bad_json" in text


def test_padding_to_a_multiple_is_counted() -> None:
    lengths = np.array([1, 7], np.int32)
    packs = plan_packs(lengths, 16, pad_multiple=8)
    figures = sample_figures(2, {}) | plan_figures(ReportConfig(), lengths, packs)
    assert figures["saving"]["padding_after"] == pytest.approx(0.5)
    assert "50.00%" in render_summary(figures)
