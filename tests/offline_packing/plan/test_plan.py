"""Which sample is where in which pack, padding for the ranks of a pack, and the figures of a plan,
against numbers worked out by hand."""

import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from offline_packing.config.sections import PackConfig, ReportConfig
from offline_packing.plan.plan import write_assignment
from offline_packing.planner.plan_packs import plan_packs
from offline_packing.runs.artifacts import open_index, open_plan
from offline_packing.runs.figures import (
    as_text,
    as_values,
    log_histogram,
    padded_tokens,
    plan_figures,
)
from offline_packing.runs.manifest import require_manifest
from task_encoders import required_pad_multiple
from task_encoders.loading.packed_folder import PackedFolder
from tests.scenarios import repeated
from tests.world import World, task_encoder


def test_an_assignment_has_a_row_for_each_use(world: World, tmp_path: Path) -> None:
    run = world.run(repeated)
    samples, planned = open_index(run), open_plan(run).packs
    columns = samples.table("key", "source_id", "num_tokens")
    write_assignment(columns, planned, tmp_path / "out.parquet")
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    packs: dict[int, list[str]] = {}
    for row in rows:
        if row["pack"] is None:
            assert row["source_id"] == 0  # half of whose samples are drawn
            continue
        assert row["position"] == len(packs.setdefault(row["pack"], []))
        packs[row["pack"]].append(row["key"])
    num_aside = sum(row["pack"] is None for row in rows)
    assert num_aside == len(samples.table("key")) - len(np.unique(planned.sample_ids)) > 0
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
    figures = [*plan_figures(compared, lengths, packs)]
    found = as_values(figures)["saving"]
    batches, _, packed = found["rows"]
    assert batches["empty"] == pytest.approx(250 / 600)  # six padded to 100
    assert (batches["cost"], packed["empty"], packed["cost"]) == (600 / 350, 0.125, 1)
    assert found["iterations"] == [3, 2]
    text = as_text(figures)
    shown = {line[:24].strip(): line[24:] for line in text.splitlines()}
    assert (shown["packed samples"], shown["fill"]) == ("6", "87.50%")
    assert "3 -> 2 per epoch at global batch size 2 (global batch size 1 keeps" in text
    assert re.search(r"\n  batches of 6 padded to their longest +600 +41\.67% +1\.71\n", text)
    lengths = np.array([1, 7], np.int32)
    padded = [*plan_figures(ReportConfig(), lengths, plan_packs(lengths, 16, pad_multiple=8))]
    assert as_values(padded)["saving"]["rows"][-1]["tokens"] == 16
    assert "50.00%" in as_text(padded)


def test_a_histogram_of_lengths_is_shown() -> None:
    bars = log_histogram("by tokens", np.array([1, 5, 6, 6, 90, 130]), 100)
    assert bars.edges == [0, 1, 2, 3, 4, 6, 8, 12, 16, 23, 32, 46, 64, 91, 100, 128, 182]
    assert bars.counts == [1, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1]
    lines = as_text([bars]).splitlines()
    assert lines[0] == "by tokens"
    assert lines[1].split() == ["1", "█" * 14, "1"]
    assert lines[5].split() == ["5", "–", "6", "█" * 40, "3"]


def test_samples_of_rows_divide_among_the_ranks(world: World) -> None:
    run = world.run("bmr", pack={"seq_length": 400, "context_parallel": 2})
    manifest, plan = require_manifest(run.workspace.root), open_plan(run).packs
    assert (manifest.pad_multiple, plan.info.pad_multiple) == (4, 4)
    summary = (run.workspace.plan / "summary.txt").read_text()
    assert "ranks of a pack       2, samples padded to multiples of 4" in summary
    packs = PackedFolder(run.workspace.root, task_encoder(run, pad_multiple=4))
    for number in range(len(packs)):
        row = packs.batch([number])
        assert row.tokens.shape[1] <= 400
        assert (row.cu_lengths.diff() % 4 == 0).all()


@pytest.mark.parametrize(
    ("size", "multiple", "padding"), [(1, 1, 1), (2, 1, 4), (4, 2, 8), (4, 4, 16), (2, 16, 32)]
)
def test_padding_is_what_ranks_cut(size: int, multiple: int, padding: int) -> None:
    """`pad_multiple` holds for each rank's share: tensor ranks under sequence parallelism, FP8."""
    assert PackConfig(context_parallel=size, pad_multiple=multiple).padding == padding
    if multiple <= 4:
        options = {"context_parallel": size, "tensor_parallel": multiple}
        assert padding == required_pad_multiple(**options, sequence_parallel=multiple > 1)
