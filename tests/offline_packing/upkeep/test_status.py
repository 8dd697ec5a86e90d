"""`status` says how much of how much is done, also of a run that was stopped in the middle; and a
packed dataset in one call from Python."""

from pathlib import Path
from typing import Any

import pytest
import yaml

import offline_packing
from offline_packing.config.packing import parse_config
from offline_packing.errors import ConfigError, StageError
from offline_packing.measure.measure import measure
from offline_packing.runs.artifacts import open_plan
from offline_packing.runs.run import Run
from offline_packing.storage.files import seal, to_json
from offline_packing.upkeep.status import status
from tests.helpers.datasets import captioning_pairs, make_run, pack_all, packed_run


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
    run.workspace.measure_total.write_bytes(to_json(seal({"parts": 3, "records": 40})))
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


def test_a_dict_a_file_and_a_configuration_give_the_same(tmp_path: Path) -> None:
    content = {
        "source": {
            "format": "pairs",
            "path": str(captioning_pairs(tmp_path / "data", 20)),
            "task": "captioning",
        },
        "model": {"max_pixels": 50_176},
        "pack": {"seq_length": 512},
        "output": {"path": str(tmp_path / "from_dict")},
        "engine": {"workers": 0},
    }
    packed = offline_packing.pack(content, deep=True)
    assert packed.path == tmp_path / "from_dict"
    assert packed.manifest.counts.packed == packed.verified.num_samples == 20
    assert packed.report.is_file()
    file = tmp_path / "pack.yaml"
    file.write_text(yaml.safe_dump(content))
    from_file = offline_packing.pack(file, f"output.path={tmp_path / 'from_file'}")
    assert from_file.manifest == packed.manifest
    assert offline_packing.pack(parse_config(content)).manifest == packed.manifest  # as it is


def test_what_goes_wrong_raises(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pack"):
        offline_packing.pack({"pack": {"sequence_length": 1}})
    source = {"format": "pairs", "path": str(tmp_path), "task": "captioning"}
    content = {"source": source, "output": {"path": str(tmp_path.parent / "out")}}
    with pytest.raises(StageError, match=str(tmp_path)):
        offline_packing.pack(content)
    with pytest.raises(TypeError, match="overrides"):
        offline_packing.pack(content, "pack.seed=1")
