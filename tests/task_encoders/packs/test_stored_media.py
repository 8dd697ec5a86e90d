"""What packs refer to: packs are those that are copied, media must not change, and may move by one
command and without new packs."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from megatron.energon.errors import FatalSampleError

from offline_packing.errors import ConfigError, StageError
from offline_packing.measure.measure import measure
from offline_packing.runs.run import Run
from offline_packing.verify.verify import render_verdict, verify
from task_encoders.energon_samples import PackedBatch
from task_encoders.loading.packed_folder import PackedFolder, PackedFolderError
from tests.helpers import formats
from tests.helpers.command import invoke
from tests.helpers.datasets import config_file, make_run, pack_all, packed_run
from tests.helpers.energon_batches import assert_same, batches_of
from tests.helpers.object_store import ObjectStore
from tests.world import task_encoder

SAMPLES = formats.draw_samples(12)
REFER = {"media": "refer"}
FORMATS = {"pairs": formats.pairs, "webdataset": formats.WRITERS["webdataset"]}


@pytest.fixture(params=FORMATS)
def movable(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    source = FORMATS[request.param](tmp_path / "data", SAMPLES)
    return packed_run({**source, "task": "bmr"}, tmp_path / "out", output=REFER)


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


@pytest.mark.parametrize("movable", ["pairs"], indirect=True)
def test_a_file_that_changed_is_refused_by_name(movable: Run) -> None:
    run = movable
    root, encoder = run.workspace.root, task_encoder(run)
    for path in changed_files(run):
        with pytest.raises(FatalSampleError, match=str(path)):
            batches_of(root, encoder)
        with pytest.raises(
            PackedFolderError, match=r"train-00000\d\.tar, bytes .* (changed|cannot)"
        ):
            list(PackedFolder(root))
        assert any(str(path) in problem for problem in verify(run, deep=True).problems)


def test_media_without_a_place(tmp_path: Path) -> None:
    for name, kind in {"parquet": "parquet_row", "webdataset_gz": "stream"}.items():
        source = {**formats.WRITERS[name](tmp_path / name, SAMPLES), "task": "bmr"}
        run = make_run(source, tmp_path / f"out_{name}", output=REFER)
        with pytest.raises(StageError, match=rf"media=refer: packs cannot refer .*{kind}\), which"):
            pack_all(run)
        assert [path.name for path in run.workspace.root.iterdir()] == ["_packing"]
    with pytest.raises(ConfigError, match="layout llava_onevision stores media in"):
        make_run(source, tmp_path / "out", output={**REFER, "layout": "llava_onevision"})


@pytest.mark.parametrize("movable", ["pairs"], indirect=True)
def test_they_are_no_source(movable: Run, tmp_path: Path) -> None:
    source = {"format": "packs", "path": movable.config.output.path, "task": "bmr"}
    with pytest.raises(StageError, match=r"refer to their media .* or export them"):
        measure(make_run(source, tmp_path / "again"))


def test_object_storage(tmp_path: Path, object_store: ObjectStore, bucket: str) -> None:
    """Read ranges of tars."""
    local = {**FORMATS["webdataset"](tmp_path / "data", SAMPLES), "task": "bmr"}
    url = f"{bucket}/data"
    object_store.put_folder(tmp_path / "data", url)
    given = {"here": local, "there": {**local, "path": url}}
    runs = [packed_run(own, tmp_path / name, output=REFER) for name, own in given.items()]
    assert_same(*map(batches, runs))
    assert verify(runs[1], deep=True).ok
    assert url in json.loads((tmp_path / "there/media_roots.json").read_text()).values()


def batches(run: Run) -> list[PackedBatch]:
    packs = PackedFolder(run.workspace.root, task_encoder(run))
    return [packs.batch([number]) for number in range(len(packs))]


def files(run: Run) -> dict[str, bytes]:
    root = run.workspace.root
    return {path.name: path.read_bytes() for path in root.iterdir() if path.is_file()}


def test_moved_data_are_found_after_one_command(movable: Run, tmp_path: Path) -> None:
    run = movable
    expected, before, content = batches(run), files(run), run.workspace.manifest.read_text()
    config = config_file(tmp_path / "pack.yaml", run.config)
    shutil.move(tmp_path / "data", tmp_path / "elsewhere")
    result = invoke("run", config, f"source.path={tmp_path}/elsewhere", "output.overwrite=true")
    assert "problems        0\n" in result.stdout
    after = files(run)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"media_roots.json", "manifest.json"}
    assert_same(batches(run), expected)
    shutil.move(tmp_path / "elsewhere", tmp_path / "data")
    invoke("write", config)
    assert files(run) == before
    assert run.workspace.manifest.read_text() == content


def test_verify_opens_what_packs_refer_to(movable: Run, tmp_path: Path) -> None:
    run = movable
    assert verify(run).ok
    name = "*.tar" if run.config.source[0].format == "webdataset" else "*.jpg"
    path = min((tmp_path / "data").rglob(name))
    path.write_bytes(path.read_bytes() + b"x")
    (changed, *_) = verify(run).problems
    assert f"{path} changed since it was packed" in changed
    assert "or pack again with another output.path" in changed
    shutil.rmtree(tmp_path / "data")
    result = verify(run)
    assert result.num_problems == result.num_samples > 4
    assert f"{tmp_path}/data/" in result.problems[0]
    assert "offline-packing write CONFIG source.path=NEW" in result.problems[0]
    assert "if a problem names no remedy" in render_verdict(result)
