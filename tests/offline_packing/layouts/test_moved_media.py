"""Media that packs refer to: they can move, by one command and without new packs, and `verify`
opens them."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from offline_packing.runs.run import Run
from offline_packing.verify.verify import render_verdict, verify
from task_encoders.energon_samples import PackedBatch
from task_encoders.loading.packed_folder import PackedFolder
from tests.helpers import formats
from tests.helpers.command import invoke
from tests.helpers.datasets import config_file, packed_run
from tests.helpers.energon_batches import assert_same, batches_of
from tests.world import task_encoder

#: Layout, and the file that says where media lie.
LAYOUTS = {"references": "metadataset.yaml", "indexed": "media_roots.json"}
FORMATS = {"pairs": formats.pairs, "webdataset": formats.webdataset_prepared}


@pytest.fixture(params=[(layout, name) for layout in LAYOUTS for name in FORMATS], ids="-".join)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    layout, name = request.param
    source = FORMATS[name](tmp_path / "data", formats.draw_samples(12))
    return packed_run({**source, "task": "bmr"}, tmp_path / "out", output={"layout": layout})


def batches(run: Run) -> list[PackedBatch]:
    root, encoder = run.workspace.root, task_encoder(run)
    if run.config.output.layout == "indexed":
        packs = PackedFolder(root / "packed_seq_dataset", encoder)
        return [packs.batch([number]) for number in range(len(packs))]
    return batches_of(root, encoder)


def files(run: Run) -> dict[str, bytes]:
    root = run.workspace.root
    return {path.name: path.read_bytes() for path in root.iterdir() if path.is_file()}


def test_moved_data_are_found_after_one_command(run: Run, tmp_path: Path) -> None:
    expected, before, content = batches(run), files(run), run.workspace.manifest.read_text()
    config = config_file(tmp_path / "pack.yaml", run.config)
    shutil.move(tmp_path / "data", tmp_path / "elsewhere")
    result = invoke("run", config, f"source.path={tmp_path}/elsewhere", "output.overwrite=true")
    assert "problems        0\n" in result.stdout
    after = files(run)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {LAYOUTS[run.config.output.layout], "manifest.json"}
    assert_same(batches(run), expected)
    shutil.move(tmp_path / "elsewhere", tmp_path / "data")
    invoke("write", config)
    assert files(run) == before
    assert run.workspace.manifest.read_text() == content


def test_verify_opens_what_packs_refer_to(run: Run, tmp_path: Path) -> None:
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


def test_a_damaged_picture_costs_its_sample_in_every_layout(tmp_path: Path) -> None:
    """Damage that changes neither size nor time shows when the picture is decoded."""
    source = {**formats.pairs(tmp_path / "data", formats.draw_samples(12)), "task": "bmr"}
    found = []
    for layout in LAYOUTS:
        run = packed_run(source, tmp_path / layout, output={"layout": layout, "key_prefix": "a"})
        found.append((run, batches(run)))
    path = sorted((tmp_path / "data").glob("*.jpg"))[3]
    before = path.stat()
    path.write_bytes(b"\0" * before.st_size)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = [batches(run) for run, _ in found]
    (line,) = (line for batch in after[0] for line in batch.dropped)
    assert "bad_image" in line
    for one, other, whole in zip(*after, found[0][1], strict=True):
        assert one.dropped == other.dropped
        assert torch.equal(one.tokens, other.tokens)
        assert len(one.sub_sample_keys) == len(whole.sub_sample_keys) - len(one.dropped)
