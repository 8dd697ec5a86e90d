"""Packs as token ids: megatron-core opens them, and their rows are those of the tars; packs with
texts and token ids."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset
from torch.utils.data import DataLoader

from offline_packing.errors import StageError
from offline_packing.measure.measure import measure
from offline_packing.report.preview import preview
from offline_packing.runs.run import Run
from offline_packing.verify.verify import verify
from task_encoders.energon_samples import BATCH_TENSORS
from task_encoders.loading.folder_shards import PackedFolderError
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.packs.indexed_file import SEQUENCES, IndexedFile
from task_encoders.packs.pack import PackFormatError
from task_encoders.settings import PackingSettings
from tests.helpers.datasets import (
    dialogue,
    image_bytes,
    make_run,
    mixed_pairs,
    pack_all,
    plan_index,
    write_json,
    write_planned,
)
from tests.helpers.energon_batches import batches_of
from tests.helpers.outputs import files_of
from tests.helpers.videos import make_video
from tests.world import Source, World, copy_of, task_encoder

SEQ_LENGTH = 1024
PACK = {"seq_length": SEQ_LENGTH}
BMR = PackingSettings(packed=True, bmr=True)


def indexed_run(source: Any, folder: Path, **output: Any) -> Run:
    output = {"layout": "indexed", **output}
    return make_run(source, folder, pack=PACK, output=output)


def with_clips(folder: Path) -> Source:
    """Write dialogues with no image, one, two, or a video and an image."""
    mixed_pairs(folder, 40)
    for i in range(3):
        (folder / f"clip{i}.mp4").write_bytes(make_video(4 + i))
        texts = dialogue("<video><image>\nSame?", "Yes. " * (i + 1))
        record = {"messages": texts, "images": [f"clip{i}.jpg"], "videos": [f"clip{i}.mp4"]}
        (folder / f"clip{i}.jpg").write_bytes(image_bytes(84, 56 + 28 * i))
        write_json(folder / f"clip{i}.json", record)
    return {"format": "pairs", "path": str(folder), "task": "bmr"}


@pytest.fixture(scope="module")
def runs(world: World) -> dict[str, Run]:
    """Return the same plan in tars and as token ids."""
    output = {"packs_per_shard": 3}
    return {
        layout: world.run(with_clips, pack=PACK, output={**output, "layout": layout})
        for layout in ("energon", "indexed")
    }


def prefix_of(run: Run) -> Path:
    return run.workspace.root / "packed_seq_dataset"


@pytest.mark.parametrize(
    ("workers", "options"),
    [(0, {}), (2, {"pad_to_seq_length": True, "pixel_transport": "uint8"})],
)
def test_rows_are_those_of_the_tars(
    runs: dict[str, Run], workers: int, options: dict[str, Any]
) -> None:
    encoder = task_encoder(runs["energon"], **options)
    batches = batches_of(runs["energon"].workspace.root, encoder, workers)
    expected = {batch.__key__[0]: batch for batch in batches}
    dataset = PackedFolder(prefix_of(runs["indexed"]), encoder)
    found = list(DataLoader(dataset, collate_fn=dataset.collate, num_workers=workers))
    assert [batch.__key__[0] for batch in found] == sorted(expected)
    assert len(found) == len(dataset) > 3
    assert sum(len(batch.video_grid_thw) for batch in found) == 3
    for batch in found:
        other = expected[batch.__key__[0]]
        assert batch.sub_sample_keys == other.sub_sample_keys
        for name in BATCH_TENSORS:
            assert torch.equal(getattr(batch, name), getattr(other, name)), name


def test_megatron_core_opens_it(runs: dict[str, Run]) -> None:
    run = runs["indexed"]
    theirs, ours = IndexedDataset(str(prefix_of(run))), IndexedFile(prefix_of(run))
    shards = json.loads(run.workspace.manifest.read_text())["shards"]
    roots = json.loads((run.workspace.root / "media_roots.json").read_text())
    assert len(shards) > 1
    count = len(theirs.document_indices) - 1
    assert count == len(ours) == sum(shard["packs"] for shard in shards)
    encoder = task_encoder(runs["energon"])
    rows = {b.__key__[0]: b for b in batches_of(runs["energon"].workspace.root, encoder)}
    num_tokens = 0
    for i in range(count):
        first = theirs.document_indices[i]
        assert theirs.document_indices[i + 1] - first == len(SEQUENCES)
        cu_lengths, tokens, labels, mask, record = theirs[first : first + len(SEQUENCES)]
        pack = json.loads(record.tobytes())
        row = rows[pack["key"]]
        assert cu_lengths.tolist() == row.cu_lengths[0].tolist()
        assert tokens.tolist() == row.tokens[0].tolist()
        assert labels.tolist() == row.labels[0].tolist()
        loss_mask = mask.view(np.uint8)[: len(tokens)]
        assert loss_mask.tolist() == row.loss_mask[0].tolist()
        for root, file, offset, size, _, start, length in pack["media"]:
            assert len(Path(roots[root], file).read_bytes()[offset or 0 :]) >= size
            assert (tokens[start] != tokens[start + 1 : start + length - 1]).all()  # tags around
            assert (labels[start : start + length] == -100).all()
        num_tokens += len(tokens)
    size = sum(prefix_of(run).with_suffix(end).stat().st_size for end in (".bin", ".idx"))
    places = sum(theirs.sequence_lengths[0::5]) * 4 + sum(theirs.sequence_lengths[4::5]) * 4
    assert size - places <= 12 * num_tokens
    images = sum(path.stat().st_size for path in Path(run.config.source[0].path).glob("*.[jm]p*"))
    assert size < images


def test_they_are_shown_as_others_are(runs: dict[str, Run]) -> None:
    shown = [list(preview(runs[layout], num_packs=3)) for layout in ("energon", "indexed")]
    for one, other in zip(*shown, strict=True):
        assert one.key == other.key
        for mine, theirs in zip(one.sub_samples, other.sub_samples, strict=True):
            found = [(sub.spans, sub.images, sub.videos) for sub in (mine, theirs)]
            assert found[0] == found[1]


def test_what_a_kill_leaves_is_completed(world: World, tmp_path: Path) -> None:
    """Killed after the pieces were joined, and while they were."""
    output = {"layout": "indexed", "packs_per_shard": 1, "split": {"train": 0.7, "val": 0.3}}
    run = copy_of(world.run("bmr", output=output), tmp_path / "out")
    root, expected = run.workspace.root, files_of(run.workspace.root)
    assert {"packed_seq_dataset.bin", "packed_seq_dataset_val.idx"} <= expected.keys()
    assert not any(name.startswith("train-") for name in expected)  # put together
    run.workspace.manifest.unlink()
    write_planned(run)
    assert files_of(root) == expected
    run.workspace.manifest.unlink()
    run.workspace.fragment("train-000001").unlink()
    (root / "packed_seq_dataset.idx").unlink()
    (root / "packed_seq_dataset.bin.0123456789ab.tmp").write_bytes(b"half")
    write_planned(run)
    assert files_of(root) == expected


def test_a_medium_that_is_gone_or_has_changed_is_named(tmp_path: Path) -> None:
    data = mixed_pairs(tmp_path / "data", 12)
    run = indexed_run({"format": "pairs", "path": str(data), "task": "bmr"}, tmp_path / "out")
    measure(run)
    plan_index(run)
    path = data / "0001_0.jpg"
    before, stat = path.read_bytes(), path.stat()
    path.write_bytes(before + b"\0")
    # Not even where modification times are not looked at: training would refuse it.
    accepting = replace(run, accept_mismatch=frozenset({"modification_time"}))
    with pytest.raises(StageError, match=r"0001_0\.jpg changed since it was measured"):
        write_planned(accepting)
    path.write_bytes(before)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    write_planned(run)
    dataset = PackedFolder(prefix_of(run), task_encoder(run))

    def refused(message: str) -> None:
        with pytest.raises(PackFormatError, match=message):
            [dataset.row(number) for number in range(len(dataset))]

    path.write_bytes(before + b"\0")
    refused(r"0001_0\.jpg changed .* bytes, were")
    path.unlink()
    refused(r"0001_0\.jpg cannot be read: No such file")
    assert any("0001_0.jpg" in problem for problem in verify(run, deep=True).problems)
    path.write_bytes(before)  # the same, but nobody can know
    refused(r"0001_0\.jpg changed .*another time")


def test_media_in_tars_stay_there(world: World, tmp_path: Path) -> None:
    """A range of a tar is a place as well."""
    run = world.run("webdataset", output={"layout": "indexed"})
    assert verify(copy_of(run, tmp_path / "out"), deep=True).num_images == 11


@pytest.mark.parametrize("source", ["parquet", "webdataset_gz"])
def test_media_without_a_place_are_refused_by_name(
    world: World, tmp_path: Path, source: str
) -> None:
    run = indexed_run(world.source(source), tmp_path / "out")
    with pytest.raises(StageError, match=r"those of .* are in a (parquet_row|stream); set output"):
        pack_all(run)


def test_settings_that_do_not_match_are_refused(runs: dict[str, Run], tmp_path: Path) -> None:
    run = runs["indexed"]
    prefix, encoder = prefix_of(run), task_encoder(run)

    def limited(max_pixels: int) -> PackedTaskEncoder:
        return PackedTaskEncoder(seq_length=SEQ_LENGTH, max_pixels=max_pixels, settings=BMR)

    with pytest.raises(ValueError, match="max_pixels"):
        PackedFolder(prefix, limited(9999))
    with pytest.raises(PackedFolderError, match="neither a packed folder nor a metadataset"):
        PackedFolder(prefix.with_name("nothing"), encoder)
    for end in (".bin", ".idx"):  # without the manifest that says how they were made
        shutil.copy(prefix.with_suffix(end), tmp_path)
    shutil.copy(prefix.with_name("media_roots.json"), tmp_path)
    copy = tmp_path / prefix.name
    with pytest.raises(PackFormatError, match=r"ps_00000000' were made with other settings"):
        PackedFolder(copy, limited(784 * 9)).row(0)
    assert len(PackedFolder(copy, encoder).row(0).row.tokens) > 1
    copy.with_suffix(".bin").write_bytes(b"\0" * 8)
    with pytest.raises(PackedFolderError, match=r"\.bin is damaged: it is not as long as \.idx"):
        PackedFolder(copy, encoder)
