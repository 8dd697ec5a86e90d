"""`status` says how much of how much is done, also of a run that was stopped in the middle."""

from pathlib import Path

import pytest

from offline_packing.measure.measure import measure
from offline_packing.upkeep.status import status
from tests.helpers.datasets import captioning_pairs, make_run, pack_all


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
    (packs,) = manifest["counts"]["packs"].values()
    shards = len(manifest["shards"])
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
