"""`status` says how much of how much is done, also of a run that was stopped in the middle."""

from pathlib import Path
from typing import Any

import pytest

from offline_packing.errors import StageError
from offline_packing.measure.measure import measure
from offline_packing.runs.artifacts import open_plan
from offline_packing.runs.run import Run
from offline_packing.upkeep.status import status
from tests.helpers.datasets import captioning_pairs, make_run, pack_all, packed_run


@pytest.fixture(scope="module")
def captions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return captioning_pairs(tmp_path_factory.mktemp("captions"))


def test_totals(captions: Path, tmp_path: Path) -> None:
    run = make_run(captions, tmp_path / "out")
    assert status(run) == "measure   not begun\nplan      not done\n"
    info = measure(run).info
    tokens = f"{info.num_tokens:,}"
    assert f"measure   done: 40 samples, {tokens} tokens; set aside: none" in status(run)
    manifest = pack_all(run)
    (packs,) = manifest.counts.packs.values()
    shards = len(manifest.shards)
    assert f"{packs} of {packs} (100%) packs, {tokens} tokens in {shards} shards" in status(run)


def test_stopped_in_the_middle(captions: Path, tmp_path: Path) -> None:
    run = make_run(captions, tmp_path / "out")
    measure(run)
    run.workspace.index_info.unlink()
    (run.workspace.index / "part-00002.parquet").unlink()
    (run.workspace.index / "part-00001.parquet").unlink()
    run.workspace.measure_total.write_text('{"parts": 3, "records": 40}')
    assert "measure   16 of 40 (40%) records, 1 of 3 (33%) parts" in status(run)
    pack_all(run)
    assert not run.workspace.measure_total.exists()
    run.workspace.manifest.unlink()
    first, *others = sorted(run.workspace.write.glob("*-??????.json"))
    for path in others:
        path.unlink()
    assert " of " in status(run)
    assert "tokens in 1 shards, 0 shards failed" in status(run)
    assert first.exists()


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("status")
    return packed_run(captioning_pairs(root / "data", 20), root / "out")


def changed(packed: Run, **sections: dict[str, Any]) -> Run:
    return make_run(Path(packed.config.source[0].path), packed.workspace.root, **sections)


def test_complete(packed: Run) -> None:
    text = status(packed)
    assert "complete: 20 samples in" in text
    assert "not what" not in text
    assert text == status(changed(packed, pack={"max_set_aside": 1}))


def test_remedy_of_another_plan_does_not_lead_in_a_circle(packed: Run) -> None:
    """Planning again would refuse to replace the shards."""
    with pytest.raises(StageError, match=r"pack\.seed was 0, is 1; .* run with output\.overwrite"):
        open_plan(changed(packed, pack={"seed": 1}))
