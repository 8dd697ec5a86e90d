"""References: nothing is copied, and every batch is that of the copied packs."""

import dataclasses
import os
import pickle
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from megatron.energon.errors import FatalSampleError

from launch.data.packed_data import check_validation, read_packed_data
from offline_packing.errors import StageError
from offline_packing.measure.measure import measure
from offline_packing.online.ranks.pack_costs import pack_costs
from offline_packing.runs.run import Run
from offline_packing.upkeep.blend import blend
from offline_packing.verify.verify import verify
from task_encoders.energon_samples import BATCH_TENSORS, PackedBatch
from task_encoders.loading.packed_folder import PackedFolder, PackedFolderError
from tests.helpers import formats
from tests.helpers.datasets import (
    captioning_pairs,
    image_bytes,
    make_run,
    pack_all,
    packed_run,
    plan_index,
    write_json,
    write_planned,
)
from tests.helpers.energon_batches import batches_of, encoder_of
from tests.helpers.outputs import files_of

SAMPLES = formats.draw_samples(24)
VIDEOS = formats.draw_video_samples(6, single=False)
MIXED = [*((f"v{key}", *rest) for key, *rest in VIDEOS), *SAMPLES[:12]]
PACK = {"seq_length": 400}
#: Format, and its samples.
SOURCES: dict[str, Any] = {
    "pairs": (formats.pairs, SAMPLES),
    "jsonl": (formats.jsonl, MIXED),
    "json_array": (formats.json_array, SAMPLES),
    "webdataset": (formats.webdataset_prepared, MIXED),
}


def reference_run(source: dict[str, Any], folder: Path, **output: Any) -> Run:
    return make_run(source, folder, output={"layout": "references", **output}, pack=PACK)


def batches(path: Path, run: Run, workers: int = 0, **options: Any) -> list[PackedBatch]:
    """All batches of an epoch, through Energon's loader."""
    return batches_of(path, encoder_of(run), workers, **options)


def assert_same(found: list[PackedBatch], expected: list[PackedBatch]) -> None:
    assert len(found) == len(expected) > 2
    for one, other in zip(found, expected, strict=True):
        for name in BATCH_TENSORS:
            assert torch.equal(getattr(one, name), getattr(other, name)), name
        rest = {field.name for field in dataclasses.fields(one)}
        rest -= {*BATCH_TENSORS, "__sources__", "__restore_key__"}
        assert {name: getattr(one, name) for name in rest} == {
            name: getattr(other, name) for name in rest
        }


@pytest.fixture(scope="module", params=SOURCES)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """One source, copied and referenced."""
    folder = tmp_path_factory.mktemp(request.param)
    write_source, samples = SOURCES[request.param]
    source = {**write_source(folder / "data", samples), "task": "bmr"}
    runs = [make_run(source, folder / "copied", pack=PACK), reference_run(source, folder / "refs")]
    for run in runs:
        pack_all(run)
    return runs


def test_batches_are_those_of_the_copied_packs(both: list[Run]) -> None:
    workers = 2 if both[0].config.source[0].format == "webdataset" else 0
    expected, found = (batches(run.workspace.root, run, workers) for run in both)
    assert_same(found, expected)


def test_packs_by_number_are_those_of_the_loader(both: list[Run]) -> None:
    copied, run = both
    folder = pickle.loads(pickle.dumps(PackedFolder(run.workspace.root, encoder_of(run))))
    assert_same([folder.batch([i]) for i in range(len(folder))], batches(folder.path, run))
    names = [sorted(pack.media) for pack in PackedFolder(copied.workspace.root)]
    assert [sorted(pack.media) for pack in folder] == names
    assert all(map(np.array_equal, *map(pack_costs, (folder, PackedFolder(copied.workspace.root)))))


def test_a_medium_that_changed_is_named_by_number(run: Run) -> None:
    pack_all(run)
    for path in (run.workspace.root.parent / "data").rglob("*.jpg"):
        path.write_bytes(path.read_bytes() + b"x")
    folder = PackedFolder(run.workspace.root, split="val")
    with pytest.raises(
        PackedFolderError, match=r"val\.jsonl, bytes .* changed since it was packed"
    ):
        list(folder)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    source = {**formats.pairs(tmp_path / "data", SAMPLES), "task": "bmr"}
    split = {"train": 0.7, "val": 0.3}
    return reference_run(source, tmp_path / "out", split=split, split_seed=2)


def test_bytes(tmp_path: Path) -> None:
    """Photographs of some 30 kB each."""
    noise = os.urandom(30_000)  # after a JPEG's end marker
    for i in range(20):
        write_json(tmp_path / f"data/{i}.json", {"caption": f"Picture {i} of a street. " * 4})
        (tmp_path / f"data/{i}.jpg").write_bytes(image_bytes(84, 84) + noise)
    sizes = []
    for layout in ("energon", "references"):
        run = packed_run(tmp_path / "data", tmp_path / layout, output={"layout": layout})
        names = (path for path in run.workspace.root.iterdir() if path.is_file())
        sizes.append(sum(path.stat().st_size for path in names if path.name != "manifest.json"))
    assert sizes[1] <= 0.02 * sizes[0]


def fail(*arguments: Any, **options: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "broken",
    [
        "layouts.base.atomic_file",
        "layouts.base.write_atomically",
        "write.write.write_manifest",
    ],
)
def test_a_run_that_ends_while_shards_are_joined(
    run: Run, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(f"offline_packing.{broken}", fail)
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
    pack_all(run)
    for path in changed_files(run):
        with pytest.raises(FatalSampleError, match=str(path)):
            [*batches(run.workspace.root, run), *batches(run.workspace.root, run, split_part="val")]
        assert any(str(path) in problem for problem in verify(run, deep=True).problems)


def test_a_file_that_changed_is_not_written(run: Run) -> None:
    measure(run)
    plan_index(run)
    for path in changed_files(run):
        with pytest.raises(StageError, match=path.name):
            write_planned(run)
        assert not run.workspace.manifest.exists()


def refused(run: Run) -> str:
    with pytest.raises(StageError) as error:
        pack_all(run)
    assert [path.name for path in run.workspace.root.iterdir()] == ["_packing"]
    return str(error.value)


def test_media_without_an_address(tmp_path: Path) -> None:
    for name, message in {
        "parquet": "(parquet: parquet_row); copy them: output.layout=energon",
        "webdataset": f"(webdataset: bytes); run energon prepare {tmp_path}/webdataset",
        "webdataset_gz": "(webdataset: stream); copy them",
    }.items():
        source = {**formats.WRITERS[name](tmp_path / name, SAMPLES), "task": "bmr"}
        found = refused(reference_run(source, tmp_path / f"out_{name}"))
        assert found.startswith("output.layout references: Energon has no address for the media of")
        assert message in found


def test_tars_that_changed_since_they_were_prepared(tmp_path: Path) -> None:
    source = {**formats.webdataset_prepared(tmp_path / "data", SAMPLES), "task": "bmr"}
    with sqlite3.connect(tmp_path / "data/.nv-meta/index.sqlite") as database:
        database.execute("UPDATE sample_parts SET content_byte_offset = content_byte_offset + 512")
    run = reference_run(source, tmp_path / "out")
    measure(run)
    plan_index(run)
    with pytest.raises(StageError, match="the member lies elsewhere"):
        write_planned(run)


def test_object_storage(tmp_path: Path) -> None:
    """By multi-storage-client, whose default profile is the file system here."""
    local = {**formats.pairs(tmp_path / "data", SAMPLES), "task": "bmr"}
    runs = [
        reference_run(local, tmp_path / "here"),
        reference_run(
            {**local, "path": f"msc://__filesystem__{tmp_path}/data"}, tmp_path / "there"
        ),
    ]
    for run in runs:
        pack_all(run)
    assert_same(*(batches(run.workspace.root, run) for run in runs))
    split = yaml.safe_load((tmp_path / "there/metadataset.yaml").read_text())["splits"]["train"]
    assert split["aux"] == {"files0": f"filesystem+msc://__filesystem__{tmp_path}/data"}


def test_blend(tmp_path: Path) -> None:
    roots = []
    for name in "ab":
        data = captioning_pairs(tmp_path / f"data_{name}", 12)
        source = {"format": "pairs", "path": str(data), "task": "captioning"}
        run = reference_run(source, tmp_path / name, key_prefix=name)
        pack_all(run)
        roots.append(run.workspace.root)
    (tmp_path / "blend.yaml").write_text(
        blend(roots).replace("weight:", "repetitions:").replace("blend:", "blend_epochized:")
    )
    weights = [entry["path"] for entry in yaml.safe_load(blend(roots))["splits"]["train"]["blend"]]
    assert weights == [f"{root}/metadataset.yaml" for root in roots]
    (tmp_path / "same.yaml").write_text(blend(roots))
    found = batches(tmp_path / "blend.yaml", run)
    assert {Path(key).name[0] for batch in found for key in batch.__key__} == {"a", "b"}
    counts = [read_packed_data(tmp_path / f"{name}.yaml").num_packs for name in ("same", "blend")]
    assert counts[0] == counts[1] > 2
    with pytest.raises(StageError, match="has no packs in its val split"):
        check_validation(tmp_path / "same.yaml")
