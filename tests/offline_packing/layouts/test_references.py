"""References: packs are those that are copied, and what they refer to must not change."""

import os
import pickle
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from megatron.energon.errors import FatalSampleError

from launch.data.packed_data import check_validation, read_packed_data
from offline_packing.errors import StageError
from offline_packing.measure.measure import measure
from offline_packing.online.ranks.pack_costs import pack_costs
from offline_packing.runs.run import Run
from offline_packing.upkeep.blend import blend
from offline_packing.verify.verify import verify
from task_encoders.loading.packed_folder import PackedFolder, PackedFolderError
from tests.helpers import formats
from tests.helpers.datasets import make_run, pack_all, plan_index, write_planned
from tests.helpers.energon_batches import assert_same, batches_of
from tests.helpers.outputs import files_of
from tests.world import World, task_encoder

SAMPLES = formats.draw_samples(12)
PACK = {"seq_length": 256}


def reference_run(source: Any, folder: Path, **output: Any) -> Run:
    return make_run(source, folder, output={"layout": "references", **output}, pack=PACK)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with two splits over files that a test may change."""
    source = {**formats.pairs(tmp_path / "data", SAMPLES), "task": "bmr"}
    return reference_run(source, tmp_path / "out", split={"train": 0.7, "val": 0.3}, split_seed=2)


def test_packs_by_number_are_those_that_are_copied(world: World) -> None:
    runs = [world.run("bmr", output={"layout": name}) for name in ("energon", "references")]
    folders = [PackedFolder(run.workspace.root, task_encoder(run)) for run in runs]
    folders[1] = pickle.loads(pickle.dumps(folders[1]))
    assert_same(*([folder.batch([i]) for i in range(len(folder))] for folder in folders))
    names = [[sorted(pack.media) for pack in folder] for folder in folders]
    assert names[0] == names[1]
    assert all(map(np.array_equal, *map(pack_costs, folders)))


def fail(*arguments: Any, **options: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "broken", ["layouts.base.atomic_file", "layouts.base.write_atomically", "write.write.write_man"]
)
def test_a_run_that_ends_while_shards_are_joined(
    run: Run, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(f"offline_packing.{broken}".replace("_man", "_manifest"), fail)
        with pytest.raises(KeyboardInterrupt):
            pack_all(run)
    pack_all(run)
    expected = files_of(run.workspace.root)
    run.workspace.manifest.unlink()  # as after a kill when the shards' own files were gone
    write_planned(run)
    assert files_of(run.workspace.root) == expected
    assert sorted(path.name for path in run.workspace.root.glob("*.jsonl*")) == [
        *("train.jsonl", "train.jsonl.idx", "val.jsonl", "val.jsonl.idx")
    ]


def changed_files(run: Run) -> Iterator[Path]:
    """The source's first picture: written to, of another size, gone."""
    path = sorted(Path(run.config.source[0].path).glob("*.jpg"))[0]
    data, time = path.read_bytes(), path.stat().st_mtime_ns
    path.write_bytes(data)
    os.utime(path, ns=(time, time + 1))
    yield path
    path.write_bytes(data + b"x")
    os.utime(path, ns=(time, time))
    yield path
    path.unlink()
    yield path


def test_a_file_that_changed_is_refused_by_name(run: Run) -> None:
    measure(run)
    plan_index(run)
    path = next(changed_files(run))
    with pytest.raises(StageError, match=path.name):
        write_planned(run)
    assert not run.workspace.manifest.exists()
    again = reference_run(run.config.source[0].model_dump(), run.workspace.root.with_name("again"))
    pack_all(again)
    root, encoder = again.workspace.root, task_encoder(again)
    for path in changed_files(again):
        with pytest.raises(FatalSampleError, match=str(path)):
            batches_of(root, encoder)
        with pytest.raises(PackedFolderError, match=r"train\.jsonl, bytes .* (changed|cannot)"):
            list(PackedFolder(root))
        assert any(str(path) in problem for problem in verify(again, deep=True).problems)


def test_media_without_an_address(tmp_path: Path) -> None:
    for name, message in {
        "parquet": "(parquet: parquet_row); copy them: output.layout=energon",
        "webdataset": f"(webdataset: bytes); run energon prepare {tmp_path}/webdataset",
        "webdataset_gz": "(webdataset: stream); copy them",
    }.items():
        source = {**formats.WRITERS[name](tmp_path / name, SAMPLES), "task": "bmr"}
        run = reference_run(source, tmp_path / f"out_{name}")
        with pytest.raises(StageError) as error:
            pack_all(run)
        assert [path.name for path in run.workspace.root.iterdir()] == ["_packing"]
        layout = "output.layout references: Energon has no address for the media of"
        assert str(error.value).startswith(layout)
        assert message in str(error.value)


def test_tars_that_changed_since_they_were_prepared(tmp_path: Path) -> None:
    source = {**formats.webdataset_prepared(tmp_path / "data", SAMPLES), "task": "bmr"}
    with sqlite3.connect(tmp_path / "data/.nv-meta/index.sqlite") as database:
        database.execute("UPDATE sample_parts SET content_byte_offset = content_byte_offset + 512")
    with pytest.raises(StageError, match="the member lies elsewhere"):
        pack_all(reference_run(source, tmp_path / "out"))


def test_object_storage(tmp_path: Path) -> None:
    """By multi-storage-client, whose default profile is the file system here."""
    local = {**formats.pairs(tmp_path / "data", SAMPLES), "task": "bmr"}
    remote = {**local, "path": f"msc://__filesystem__{tmp_path}/data"}
    runs = [reference_run(local, tmp_path / "here"), reference_run(remote, tmp_path / "there")]
    for run in runs:
        pack_all(run)
    assert_same(*(batches_of(run.workspace.root, task_encoder(run)) for run in runs))
    split = yaml.safe_load((tmp_path / "there/metadataset.yaml").read_text())["splits"]["train"]
    assert split["aux"] == {"files0": f"filesystem+msc://__filesystem__{tmp_path}/data"}


def test_blend(world: World, tmp_path: Path) -> None:
    layout = {"layout": "references"}
    runs = [
        world.run("captioning", output={**layout, "key_prefix": name}, pack=PACK) for name in "ab"
    ]
    roots = [run.workspace.root for run in runs]
    (tmp_path / "same.yaml").write_text(text := blend(roots))
    weights = [entry["path"] for entry in yaml.safe_load(text)["splits"]["train"]["blend"]]
    assert weights == [f"{root}/metadataset.yaml" for root in roots]
    text = text.replace("weight:", "repetitions:").replace("blend:", "blend_epochized:")
    (tmp_path / "blend.yaml").write_text(text)
    found = batches_of(tmp_path / "blend.yaml", task_encoder(runs[0]))
    assert {Path(key).name[0] for batch in found for key in batch.__key__} == {"a", "b"}
    counts = [read_packed_data(tmp_path / f"{name}.yaml").num_packs for name in ("same", "blend")]
    assert counts[0] == counts[1] > 2
    with pytest.raises(StageError, match="has no packs in its val split"):
        check_validation(tmp_path / "same.yaml")
