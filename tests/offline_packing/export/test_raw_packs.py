"""Exported packs: converted to tars as upstream does, read back, killed at any moment, checked."""

import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import webdataset
from click.testing import CliRunner

from offline_packing.cli.commands import cli
from offline_packing.errors import DamagedError, StageError
from offline_packing.export.raw_packs import export
from offline_packing.runs.manifest import require_manifest
from offline_packing.runs.run import Run
from offline_packing.verify.verify import verify
from task_encoders.packs.pack import restore_pack
from tests.helpers.datasets import index_rows, make_run, pack_all
from tests.helpers.outputs import files_of, flip_byte, members_of
from tests.world import World, copy_of


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


@pytest.mark.parametrize(
    ("task", "layout"),
    [
        ("bmr", "energon"),
        ("vqa", "loongforge"),
        ("vqa", "llava_onevision"),
        ("bmr", "llava_onevision2"),
        ("captioning", "energon"),
    ],
)
def test_packs_are_those_of_the_shards_and_are_read_back(
    tmp_path: Path, world: World, task: str, layout: str
) -> None:
    run = world.run(task, output={"layout": layout})
    folder = tmp_path / "new" / "raw_packing_data"
    done = export(run.workspace.root, folder)
    shards, found = members_of(run.workspace.root), packs_of(folder)
    assert found.keys() == shards.keys()
    assert done.num_files == len(found) > 20
    for name, data in found.items():
        if not name.endswith(".json"):
            assert data == shards[name]
            continue
        record, before = json.loads(data), json.loads(shards[name])
        assert record["prompt"] == record["prompts"] == before.get("prompt", before.get("prompts"))
        assert record == {**before, "prompt": record["prompt"], "prompts": record["prompts"]}
    source = {"format": "packs", "path": str(folder), "task": task}
    again = make_run(source, tmp_path / "again", pack={"seq_length": 512})
    assert pack_all(again).counts.packed == len(index_rows(run))
    assert verify(again, deep=True).ok
    assert samples_of(again) == samples_of(run)


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
    source = {"format": "packs", "path": str(tmp_path / "wds"), "task": "vqa"}
    again = make_run(source, tmp_path / "again", pack={"seq_length": 512})
    assert pack_all(again).counts.packed == len(index_rows(run))
    assert verify(again, deep=True).ok
    assert sorted(samples_of(again).values()) == sorted(samples_of(run).values())


def test_each_split_has_a_folder(tmp_path: Path, world: World) -> None:
    run = world.run("captioning", output={"split": {"train": 0.6, "val": 0.4}})
    export(run.workspace.root, tmp_path / "raw")
    names = {Path(name) for name in packs_of(tmp_path / "raw")}
    assert {name.parent.name for name in names} == {"train", "val"}
    for split in ("train", "val"):
        shards = members_of(run.workspace.root, f"{split}*.tar")
        assert {name.name for name in names if name.parent.name == split} == set(shards)


def export_and_die(output: Path, folder: Path, after: int) -> bool:
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
        export(output, folder, progress=False)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def test_killed_at_any_moment_and_run_again(packed: Run, tmp_path: Path) -> None:
    """The bytes are those of an export that nobody killed; half of one never has its name."""
    root = packed.workspace.root
    export(root, tmp_path / "whole")
    expected = files_of(tmp_path / "whole")
    for after in itertools.count(0, 3):
        folder = tmp_path / f"raw{after}"
        if not export_and_die(root, folder, after):
            break
        assert not folder.exists()
        assert not export(root, folder).was_complete
        assert files_of(folder) == expected
        assert not folder.with_name(f"{folder.name}.partial").exists()
    assert after > len(expected)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", ["*ps_00000000.json", "*ps_00000001.img*", "_export/train-*.json"])
def test_changed_files_of_finished_shards_are_written_again(
    packed: Run, tmp_path: Path, name: str
) -> None:
    root, folder = packed.workspace.root, tmp_path / "raw"
    export(root, folder)
    expected = files_of(folder)
    changes: list[Callable[[Path], object]] = [Path.unlink, lambda path: flip_byte(path, -1)]
    for change in (*changes, make_folder):
        (folder / "_export/manifest.json").unlink()
        partial = folder.rename(tmp_path / "raw.partial")
        change(min(partial.glob(name)))
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
    references = world.packed("captioning", output={"layout": "references"})
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "a.txt").write_text("of somebody")
    export(packed.workspace.root, folder)
    for root, to, message in (
        (references, folder, "hold no media: its output.layout is references; pack"),
        (tmp_path / "nothing", folder, r"no manifest in .*; run write first"),
        (other, folder, "holds packs of another output"),
        (other, tmp_path / "own", "holds files of others; name another folder"),
    ):
        with pytest.raises(StageError, match=message):
            export(root, to)


def test_the_command(packed: Run, tmp_path: Path) -> None:
    root, folder = str(packed.workspace.root), str(tmp_path / "raw")

    def call(*arguments: str) -> str:
        ran = CliRunner().invoke(cli, ["export", root, *arguments], catch_exceptions=False)
        return " ".join(ran.output.split())

    packs = sum(shard.packs for shard in require_manifest(packed.workspace.root).shards)
    assert call(folder, "--dry-run").startswith(f"would write {packs} packs, ")
    assert not Path(folder).exists()
    assert f"exported {packs} packs in " in call(folder)
    assert call(folder, "--dry-run").startswith(f"would check the files of {packs} packs")
    assert f"checked {packs} packs in " in call(folder, "--quiet")
    assert "export needs a local folder" in call("memory://raw")
