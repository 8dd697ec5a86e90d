"""Exported packs: converted to tars as upstream does, read back, opened by megatron-core, killed at
any moment, checked."""

import itertools
import json
import os
import pickle
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from click.testing import CliRunner
from megatron.core.datasets.indexed_dataset import IndexedDataset

from offline_packing.cli.commands import cli
from offline_packing.engines.local import LocalEngine
from offline_packing.errors import DamagedError, StageError
from offline_packing.export import nemo
from offline_packing.export.export import export
from offline_packing.export.exported import PIECES, ShardExport
from offline_packing.export.nemo import SEQUENCES
from offline_packing.measure.measure import measure
from offline_packing.runs.manifest import require_manifest
from offline_packing.runs.run import Run
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.packs.pack import restore_pack
from task_encoders.storage.paths import path_of
from tests.helpers.datasets import index_rows, make_run
from tests.helpers.outputs import files_of, flip_byte, members_of
from tests.helpers.videos import VIDEO_MODEL
from tests.scenarios import TREES
from tests.world import World, copy_of, task_encoder

KINDS = ("images", "videos")


@pytest.fixture
def packed(world: World) -> Run:
    """Captions in three shards."""
    return world.run("captioning")


def packs_of(folder: Path) -> dict[str, bytes]:
    return {
        name: data for name, data in files_of(folder).items() if not name.startswith("_export/")
    }


def samples_of(run: Run) -> dict[str, int]:
    return {row["key"]: row["num_tokens"] for row in index_rows(run)}


def samples_in(folder: Path, task: str, scratch: Path) -> dict[str, int]:
    """Measure exported packs."""
    run = make_run({"format": "packs", "path": str(folder), "task": task}, scratch / "again")
    measure(run)
    return samples_of(run)


@pytest.mark.parametrize(
    ("task", "output"),
    [
        ("bmr", {}),
        ("bmr", {"media": "refer"}),
        ("vqa", {"layout": "loongforge"}),
        ("vqa", {"layout": "llava_onevision"}),
        ("bmr", {"layout": "llava_onevision2"}),
        ("captioning", {}),
    ],
)
def test_packs_are_those_of_the_shards_and_are_read_back(
    tmp_path: Path, world: World, task: str, output: dict[str, str]
) -> None:
    run = world.run(task, output=output)
    folder = tmp_path / "new" / "raw_packing_data"
    done = export(run.workspace.root, folder)
    shards, found = members_of(run.workspace.root), packs_of(folder)
    if output.get("media"):
        shards = members_of(world.packed(task))
        for name in [name for name in shards if name.endswith(".json")]:
            record = json.loads(shards[name])
            del record["meta"]["checksums"]
            shards[name] = json.dumps(record).encode()
    assert found.keys() == shards.keys()
    assert done.num_files == len(found) > 20
    for name, data in found.items():
        if not name.endswith(".json"):
            assert data == shards[name]
            continue
        record, before = json.loads(data), json.loads(shards[name])
        assert record["prompt"] == record["prompts"] == before.get("prompt", before.get("prompts"))
        assert record == {**before, "prompt": record["prompt"], "prompts": record["prompts"]}
    assert samples_in(folder, task, tmp_path) == samples_of(run)


def convert(folder: Path, target: Path) -> None:
    """As convert_packedsample_to_wds.py of LLaVA-OneVision-1.5 does at a5eb942: every `*.json` is a
    pack, images are renamed, and of the JSON `images`, `captions` and `prompts` are kept."""
    target.mkdir()
    with webdataset.ShardWriter(f"{target}/pretrain-%06d.tar", maxcount=3, verbose=0) as sink:
        for path in folder.glob("*.json"):
            raw = json.loads(path.read_bytes())
            images = [(folder / f"{path.stem}.{name}").read_bytes() for name in raw["images"]]
            members = {f"img{i}.jpg": data for i, data in enumerate(images)}
            kept = {name: raw.get(name, []) for name in ("prompts", "captions", "images")}
            sink.write({"__key__": path.stem, **members, "json": json.dumps(kept).encode()})


def test_questions_survive_the_converter_of_others(tmp_path: Path, world: World) -> None:
    run, folder = world.run("vqa"), tmp_path / "raw_packing_data"
    export(run.workspace.root, folder)
    convert(folder, tmp_path / "wds")
    wds = members_of(tmp_path / "wds")
    for path in folder.glob("*.json"):
        ours, theirs = (
            restore_pack(one, path.stem, "vqa") for one in (path.read_bytes(), wds[path.name])
        )
        assert [sub.turns for sub in ours.sub_samples] == [sub.turns for sub in theirs.sub_samples]  # type: ignore[union-attr]
        assert all(sub.turns[0].prompt for sub in theirs.sub_samples)  # type: ignore[union-attr]
    again = samples_in(tmp_path / "wds", "vqa", tmp_path)
    assert sorted(again.values()) == sorted(samples_of(run).values())


def test_each_split_has_a_folder(tmp_path: Path, world: World) -> None:
    root = world.packed("captioning", output={"split": {"train": 0.6, "val": 0.4}})
    export(root, tmp_path / "raw")
    expected = {
        f"{one}/{name}" for one in ("train", "val") for name in members_of(root, f"{one}*.tar")
    }
    assert packs_of(tmp_path / "raw").keys() == expected


@pytest.mark.parametrize("media", ["copy", "refer"])
def test_megatron_core_opens_token_ids(world: World, tmp_path: Path, media: str) -> None:
    output = {"media": media, "packs_per_shard": 2, "split": {"train": 0.6, "val": 0.4}}
    sections = {"model": VIDEO_MODEL, "pack": {"seq_length": 128}, "output": output}
    run, folder = world.run("videos", **sections), tmp_path / "nemo"
    packs, root = 0, run.workspace.root
    export(root, folder, "nemo")
    names = ["packed_seq_dataset", "packed_seq_dataset_val"]
    files = [f"{name}.{ending}" for name in names for ending in ("bin", "idx")]
    assert sorted(path.name for path in folder.iterdir()) == ["_export", "media_roots.json", *files]
    roots = json.loads((folder / "media_roots.json").read_text())
    for split, name in zip(("train", "val"), names, strict=True):
        theirs = IndexedDataset(str(folder / name))
        ours = PackedFolder(root, task_encoder(run), split=split)
        bounds = [*itertools.pairwise(theirs.document_indices.tolist())]
        assert len(bounds) == len(ours)
        for number, (first, end) in enumerate(bounds):
            assert end - first == len(SEQUENCES)
            cu_lengths, tokens, labels, mask, record = theirs[first:end]
            raw, row = ours[number], ours.batch([number])
            pack = json.loads(record.tobytes())
            assert pack["key"] == raw.key
            assert cu_lengths.tolist() == row.cu_lengths[0].tolist()
            assert tokens.tolist() == row.tokens[0].tolist()
            assert labels.tolist() == row.labels[0].tolist()
            assert mask.view(np.uint8)[: len(tokens)].tolist() == row.loss_mask[0].tolist()
            shown = [pack[kind][i] for i in range(len(pack["images"])) for kind in KINDS]
            for name, place in zip(itertools.chain(*shown), pack["media"], strict=True):
                at, file, offset, size, _, start, length = place
                data = Path(roots[at], file).read_bytes()[offset or 0 :][:size]
                assert data == raw.media[name]
                inside = tokens[start : start + length]
                assert (labels[start : start + length] == -100).all()
                assert len(inside) == length > 3
        packs += len(bounds)
    assert packs == sum(shard.packs for shard in require_manifest(root).shards) > 4


class Backwards(LocalEngine):
    """Engine that runs the last task first, and each as another process would get it."""

    def run(self, function: Any, tasks: Iterable[Any], listener: Any = None) -> Iterator[Any]:
        sent = pickle.loads(pickle.dumps((function, [*tasks][::-1])))
        return super().run(*sent, listener)


def test_token_ids_are_completed_and_checked(packed: Run, tmp_path: Path) -> None:
    """By tasks that end in any order, into a folder and a storage."""
    root, expected = packed.workspace.root, tmp_path / "whole"
    export(root, expected, "nemo")
    export(root, tmp_path / "nemo", "nemo", Backwards(0))
    assert files_of(tmp_path / "nemo") == files_of(expected)
    stored = path_of(f"memory://{tmp_path.name}")
    export(root, stored, "nemo")
    assert export(root, stored, "nemo").was_complete
    name = "packed_seq_dataset.bin"
    assert (stored / name).read_bytes() == (expected / name).read_bytes()
    flip_byte(expected / name, 40)
    with pytest.raises(DamagedError, match=rf"{name} is missing or damaged; remove the folder"):
        export(root, expected, "nemo")


def test_a_processor_that_changed_is_refused(world: World, tmp_path: Path) -> None:
    run = copy_of(world.run("captioning"), tmp_path / "out")
    manifest = require_manifest(run.workspace.root)
    config = {**manifest.config, "model": {**manifest.config["model"], "max_pixels": 3136}}
    changed = manifest.model_copy(update={"config": config})
    task = ShardExport(run.workspace.root, tmp_path, changed, changed.shards[0])
    (tmp_path / PIECES).mkdir(parents=True)
    with pytest.raises(StageError, match=r"tokens, was measured with \d+: the model's processor"):
        nemo.write(task, task.output / task.line.name)


def export_and_die(output: Path, folder: Path, after: int, to: str) -> bool:
    """Export in a fork that is killed before it opens or renames a file again, after some times;
    returns whether it was."""
    pid = os.fork()
    if not pid:
        left = itertools.count(after, -1)

        def step(event: str, arguments: tuple[object, ...]) -> None:
            is_ours = event in ("open", "os.rename") and ".partial" in str(arguments[0])
            if is_ours and not next(left):
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(step)
        export(output, folder, to, progress=False)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize(("to", "every"), [("raw", 11), ("nemo", 17)])
def test_killed_at_any_moment_and_run_again(
    packed: Run, tmp_path: Path, to: str, every: int
) -> None:
    """The bytes are those of an export that nobody killed; half of one never has its name."""
    root = packed.workspace.root
    export(root, tmp_path / "whole", to)
    expected = files_of(tmp_path / "whole")
    for after in itertools.count(0, every):
        folder = tmp_path / f"{to}{after}"
        if not export_and_die(root, folder, after, to):
            break
        assert not folder.exists()
        assert not export(root, folder, to).was_complete
        assert files_of(folder) == expected
        assert not folder.with_name(f"{folder.name}.partial").exists()
    assert after > max(20, len(expected))


@pytest.mark.parametrize("name", ["*ps_00000000.json", "*ps_00000001.img*", "_export/train-*.json"])
def test_changed_files_of_finished_shards_are_written_again(
    packed: Run, tmp_path: Path, name: str
) -> None:
    root, folder = packed.workspace.root, tmp_path / "raw"
    export(root, folder)
    expected = files_of(folder)
    for change in ("flip", "unlink", "folder"):
        (folder / "_export/manifest.json").unlink()
        file = min(folder.rename(tmp_path / "raw.partial").glob(name))
        flip_byte(file, -1)
        if change != "flip":
            file.unlink()
        if change == "folder":
            file.mkdir()
        export(root, folder)
        assert files_of(folder) == expected
        assert export(root, folder).was_complete


def test_damage_is_named(packed: Run, tmp_path: Path) -> None:
    folder, root = tmp_path / "raw", copy_of(packed, tmp_path / "out").workspace.root
    export(root, folder)
    assert export(root, folder).was_complete
    for path in (*sorted(folder.glob("ps_00000000.*")), *(folder / "_export").glob("*.json")):
        before = path.read_bytes()
        flip_byte(path, len(before) // 2)
        with pytest.raises((DamagedError, StageError), match=r"remove the folder"):
            export(root, folder)
        path.unlink()
        if path.parent == folder:
            with pytest.raises(DamagedError, match=f"such as {path.name}; remove"):
                export(root, folder)
        path.write_bytes(before)
    export(root, folder)
    shard = min(root.glob("*.tar"))
    flip_byte(shard, 700)
    with pytest.raises(DamagedError, match=rf"{shard.name} is missing, or not what was written"):
        export(root, tmp_path / "other")


def test_what_is_refused(packed: Run, world: World, tmp_path: Path) -> None:
    folder, other = tmp_path / "raw", world.packed("captioning", output={"key_prefix": "two"})
    foreign = world.packed("vqa", output={"layout": "llava_onevision"})
    trees = world.packed("shared media", **TREES)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "a.txt").write_text("of somebody")
    export(packed.workspace.root, folder)
    new = tmp_path / "new"
    for root, place, to, message in (
        (foreign, new, "nemo", r"to nemo: .*output.layout=llava_onevision\); pack to energon"),
        (trees, new, "nemo", r"to nemo: they hold samples that share prefixes"),
        (trees, new, "raw", r"to raw: they hold samples that share prefixes"),
        (tmp_path / "nothing", folder, "raw", r"no manifest in .*; run write first"),
        (other, folder, "raw", "holds an export of other packs"),
        (packed.workspace.root, folder, "nemo", "or in another form; remove the folder"),
        (other, tmp_path / "own", "raw", "holds files of something else; choose another"),
    ):
        with pytest.raises(StageError, match=message):
            export(root, place, to)


def test_the_command(packed: Run, tmp_path: Path) -> None:
    root, folder = str(packed.workspace.root), str(tmp_path / "raw")

    def call(*arguments: str) -> str:
        given = ["export", root, *arguments, "engine.workers=0"]
        return " ".join(CliRunner().invoke(cli, given, catch_exceptions=False).output.split())

    packs = sum(shard.packs for shard in require_manifest(packed.workspace.root).shards)
    assert call(folder, "--dry-run").startswith(f"would write {packs} packs, ")
    assert not Path(folder).exists()
    assert f"exported {packs} packs in " in call(folder)
    assert call(folder, "--dry-run").startswith(f"would check the files of {packs} packs")
    assert f"checked {packs} packs in " in call(folder, "--quiet")
    assert "is not of the form engine.KEY=VALUE" in call(folder, "workers=2")
    nemo = str(tmp_path / "nemo")
    assert f"exported {packs} packs in " in call(nemo, "--to=nemo")
    assert f"checked {packs} packs in 3 files" in call(nemo, "--to=nemo")
