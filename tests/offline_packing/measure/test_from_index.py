"""Stages from one index: samples that another output measured are taken without measuring."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from offline_packing.config.packing import parse_config
from offline_packing.errors import ConfigError, DamagedError, StageError
from offline_packing.index.table import part_name
from offline_packing.measure.measure import measure, preview_measure
from offline_packing.runs.artifacts import open_index
from offline_packing.runs.manifest import require_manifest
from offline_packing.runs.run import Run, open_encoder
from offline_packing.runs.set_aside import check_set_aside as check_media
from offline_packing.verify.verify import verify
from tests.helpers.datasets import (
    captioning_pairs,
    dialogue,
    image_bytes,
    index_rows,
    make_config,
    make_run,
    pack_all,
    packed_run,
    plan_index,
)
from tests.helpers.faults import killing
from tests.helpers.formats import (
    draw_samples,
    jsonl,
    lines,
    of_lines,
    parquet,
    webdataset,
    write_file,
)
from tests.helpers.long_conversations import conversations, run_of
from tests.helpers.outputs import files_of, flip_byte, shard_files
from tests.helpers.shared_media import MODEL, shared_media
from tests.world import World

Options = dict[str, Any]


def three(root: Path) -> list[Options]:
    """Three sources, and in the first an id of three samples, and two that are set aside."""
    found = [
        {**write(root / name, draw_samples(count, seed)), "task": "vqa", "name": name}
        for seed, (name, write, count) in enumerate(
            [("chats", jsonl, 14), ("tars", webdataset, 9), ("tables", parquet, 11)]
        )
    ]
    asked = [dialogue("<image>\nWhat?", text) for text in ("One.", "Two.", "Two.")]
    more = [{"id": "same", "messages": one, "images": ["images/s0000_0.jpg"]} for one in asked]
    del found[2]["name"]  # it is called as its folder
    chats = root / "chats" / "chat.jsonl"
    broken = b'{\n{"id": "lost", "question": "What?", "answer": "It.", "image": "no.jpg"}\n'
    chats.write_bytes(chats.read_bytes() + lines(more) + broken)
    return found


def sections(**more: Options) -> dict[str, Options]:
    output = {"key_prefix": "p_", "split": {"train": 0.8, "val": 0.2}, **more.pop("output", {})}
    engine = {"samples_per_part": 5, **more.pop("engine", {})}
    return {"output": output, "engine": engine, "pack": {"max_set_aside": 1}, **more}


@pytest.fixture
def whole(world: World) -> Run:
    """All three sources, measured."""
    sources = world.source(three)

    def make(folder: Path) -> None:
        measure(make_run(sources, folder, **sections()))

    return make_run(sources, world.made("outputs/three sources", make)[0], **sections())


def stage(whole: Run, folder: Path, /, **more: Any) -> Run:
    """A run over the index of another; options of its source, and sections."""
    own = ("name", "skip", "weight", "repeat", "task", "text_only")
    beside = {k: more.pop(k) for k in own if k in more}
    source = {"format": "index", "path": str(whole.workspace.root), **beside}
    return make_run(source, folder, **sections(**more))


def packed_stage(whole: Run, folder: Path, /, **more: Any) -> Run:
    pack_all(run := stage(whole, folder, **more))
    return run


def keys_of(run: Run) -> list[str]:
    return [row["key"] for row in index_rows(run)]


def test_a_stage_is_what_measuring_anew_gives(
    whole: Run, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorter = {"pack": {"seq_length": 256, "max_set_aside": 1}}
    anew = world.run(three, **sections(**shorter))
    made = stage(whole, tmp_path / "stage", **shorter)
    assert f"/{whole.workspace.root.name} (parts: 4)" in preview_measure(made)
    with monkeypatch.context() as patch:
        encoder = open_encoder(made.config.model)
        patch.setattr(type(encoder), "measure", killing(encoder.measure, 0))
        measure(made)
        plan_index(made)
    pack_all(made)
    assert index_rows(made) == index_rows(anew)
    assert len({row["source_id"] for row in index_rows(made)}) == 3
    assert any("@" in key for key in keys_of(made))
    (info, other) = (replace(open_index(run).info, files={}) for run in (made, anew))
    for one in (info, other):
        one.fingerprint.update({f"source.{i}.listing": "" for i in range(3)})
    assert info == other
    assert info.set_aside == {"bad_json": 1, "missing_image": 1}
    assert not files_of(made.workspace.files)
    found = [files_of(run.workspace.plan) | shard_files(run) for run in (made, anew)]
    for files in found:
        del files["manifest.json"]
    assert found[0] == found[1]
    assert len(found[0]) > 6
    for path in made.workspace.set_aside.iterdir():
        assert pq.read_table(path) == pq.read_table(anew.workspace.set_aside / path.name)
    assert verify(made, deep=True).ok


def test_a_name_picks_one_source(whole: Run, tmp_path: Path) -> None:
    made = packed_stage(whole, tmp_path / "stage", name="tables", repeat=2)
    (source,) = made.config.source
    assert (source.format, source.repeat) == ("parquet", 2)
    assert require_manifest(made.workspace.root).counts.packed == 22
    assert sorted(keys_of(made)) == [f"tables/s{i:04d}" for i in range(11)]
    assert {row["source_id"] for row in index_rows(made)} == {0}
    # The next stage, from this one.
    measure(again := stage(made, tmp_path / "again", name="other"))
    assert sorted(keys_of(again)) == [f"other/s{i:04d}" for i in range(11)]
    root = made.workspace.root
    twice = [{"format": "index", "path": f"{root}/{at}", "name": at} for at in (".", "../stage")]
    with pytest.raises(ConfigError, match="remove one of the two sources"):
        make_config(twice, tmp_path / "twice")


def test_texts_of_an_index_are_meant_to_be_without_pictures(tmp_path: Path) -> None:
    """text_only changes no row, and is asked for only when packs are to be written."""
    source = of_lines(tmp_path / "a.jsonl", [{"question": "Is it?", "answer": "It is."}], "vqa")
    measure(own := make_run(source, tmp_path / "all", **sections()))
    measure(made := stage(own, tmp_path / "stage"))
    with pytest.raises(StageError, match=r"go on with source\.text_only=true"):
        check_media(made)
    check_media(stage(own, tmp_path / "stage", text_only=True))


def test_sources_of_several_indexes(whole: Run, tmp_path: Path) -> None:
    """Outputs of one folder, apart by source.skip, and a source that is measured."""
    data = {"format": "jsonl", "path": str(tmp_path / "data"), "task": "vqa"}
    jsonl(tmp_path / "data", draw_samples(6))
    first = packed_run(data, tmp_path / "first", **sections())
    later = [(f"later{key}", *rest) for key, *rest in draw_samples(3)]
    jsonl(tmp_path / "data" / "later", later)
    data["skip"] = str(first.workspace.root)
    measure(second := make_run(data, tmp_path / "second", **sections()))
    own = {**parquet(tmp_path / "own", draw_samples(2)), "task": "vqa"}
    taken = [
        {"format": "index", "path": str(run.workspace.root), **name}
        for run, name in ((first, {}), (second, {"name": "b"}), (whole, {"name": "tars"}))
    ]
    made = packed_run([*taken, own], tmp_path / "stage", **sections())
    found = keys_of(made)
    assert found[:9] == [*(f"data/s{i:04d}" for i in range(6)), *(f"b/{key}" for key, *_ in later)]
    assert found[9:18] == [key for key in keys_of(whole) if key.startswith("tars/")]
    assert found[18:] == ["own/s0000", "own/s0001"]
    sources_of = [row["source_id"] for row in index_rows(made)]
    assert sources_of == [0] * 6 + [1] * 3 + [2] * 9 + [3] * 2
    assert verify(made, deep=True).ok
    # As it is in the manifest, it is the same configuration.
    config = require_manifest(made.workspace.root).config
    output = {**config["output"], "path": str(tmp_path / "again")}
    assert parse_config({**config, "output": output}).source == made.config.source
    read = [one.get("index", "") for one in config["source"]]
    assert read == [*(one["path"] for one in taken), ""]
    # The folder, called as one of its two sources there, holds nothing new.
    named = {**data, "name": "data", "skip": str(made.workspace.root)}
    assert measure(make_run(named, tmp_path / "named", **sections())).info.num_samples == 0


def test_what_is_skipped_is_of_the_same_source(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Records without ids have the same keys in files of the same name. What was set aside is
    skipped as well."""
    everything = []
    for name in "abc":
        rows = [{"question": f"{name}{i}?", "answer": "It is."} for i in range(5)] + [{}]
        more = {"name": name, "text_only": True}
        everything.append(of_lines(tmp_path / name / "train.jsonl", rows, "vqa", **more))
    measure(own := make_run(everything, tmp_path / "all", **sections()))
    pack_all(first := stage(own, tmp_path / "first", name="a"))
    more = {"format": "index", "path": str(own.workspace.root)}
    pack_all(two := make_run([{**more, "name": n} for n in "ab"], tmp_path / "two", **sections()))
    for skipped, left in ((first, "bc"), (two, "c")):
        skip = str(skipped.workspace.root)
        rest = stage(own, tmp_path / f"rest {left}", skip=skip)
        info = measure(rest).info
        assert info.num_skipped == 18 - 6 * len(left)
        assert info.set_aside == {"bad_record": len(left)}
        assert {key.partition("/")[0] for key in keys_of(rest)} == {*left}
    none = stage(own, tmp_path / "none", name="a", skip=str(first.workspace.root))
    assert measure(none).info.num_samples == 0
    assert f"{two.workspace.root} holds no samples of {tmp_path}/c/train.jsonl" in caplog.text


def test_cut_conversations(tmp_path: Path) -> None:
    records = conversations(8, seed=3, most=30)
    pack = {"seq_length": 256, "max_set_aside": 1}
    cut = run_of(tmp_path, records, "all", pack=pack, engine={"samples_per_part": 4})
    measure(cut)
    index = {"format": "index", "path": str(cut.workspace.root)}
    splits = {**pack, "on_overlong": "split_turns"}
    other = {**splits, "seq_length": 512, "split_turns": {"context_turns": 1}}
    with pytest.raises(StageError, match=r"the index of .*all cannot be used") as error:
        measure(make_run(index, tmp_path / "stage", pack=other))
    assert "pack.seq_length was 256, is 512" in str(error.value)
    assert "pack.split_turns was" in str(error.value)
    made = packed_run({**index, "name": "x"}, tmp_path / "stage", pack=splits)
    assert open_index(made).info.split == open_index(cut).info.split
    for row, old in zip(index_rows(made), index_rows(cut), strict=True):
        assert row["key"] == f"x/{old['key']}"
        assert bool(row["part"]) == bool(old["part"])
        assert row["part"] is None or row["part"]["key"] == f"x/{old['part']['key']}"
    assert verify(made, deep=True).ok
    # The first half is packed already.
    half = run_of(tmp_path / "half", records[:4], "out", pack=pack)
    pack_all(half)
    skip = {**index, "skip": [str(half.workspace.root)]}
    measure(rest := make_run(skip, tmp_path / "rest", pack=splits))
    rows = [row for row in index_rows(cut) if int(row["key"].strip("c").partition("[")[0]) >= 4]
    assert index_rows(rest) == rows
    info, parts = open_index(rest).info, [row["part"]["key"] for row in rows if row["part"]]
    assert info.num_skipped == 4
    assert info.split == {"conversations": len(set(parts)), "samples": len(parts)}
    assert len(set(parts)) < len(parts)


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"model": {"max_pixels": 28 * 28 * 32}}, r"model\.max_pixels was 50176, is 25088"),
        ({"output": {"layout": "loongforge"}}, r"index\.layout was not set, is"),
        (
            {"model": {"family": "qwen2_5_vl"}},
            "model.tokenizer was another tokenizer, is the tokenizer of model.family=qwen2_5_vl "
            "and model.processor=builtin",
        ),
    ],
)
def test_other_settings_are_refused(
    whole: Run, tmp_path: Path, more: dict[str, Options], what: str
) -> None:
    with pytest.raises(StageError, match=f"the index of .* cannot be used: .*{what}.*"):
        measure(stage(whole, tmp_path / "stage", **more))


def test_rules_may_be_more_than_are_asked(world: World, tmp_path: Path) -> None:
    more = sections(output={"layout": "loongforge"})
    own = make_run(world.source(three)[2], tmp_path / "all", **more)
    measure(own)
    measure(stage(own, tmp_path / "stage"))
    assert index_rows(stage(own, tmp_path / "stage"))[0]["room"] == 1


@pytest.mark.parametrize(
    ("more", "what"),
    [
        (
            {"name": "table"},
            "name='table': the index of .* does not hold it; choose chats, tars, tables",
        ),
        ({"weight": 2}, "weight=2.0: the index of .* holds several sources; set source.name"),
        ({"task": "bmr"}, "task='bmr': the index of .* was measured for vqa; leave it out"),
        ({"max_media": 3}, "max_media=3: samples of an index are as they were measured"),
        ({"fields": {}}, "fields is not a known field"),
        ({"output": True}, "is named by source.skip or format index; new packs need"),
        ({"path": "nothing"}, "nothing has no complete index to read; run measure there"),
    ],
)
def test_bad_options(whole: Run, tmp_path: Path, more: Options, what: str) -> None:
    source = {"format": "index", "path": str(whole.workspace.root), **more}
    folder = whole.workspace.root if source.pop("output", False) else tmp_path / "stage"
    with pytest.raises((ConfigError, StageError), match=what) as error:
        make_config(source, folder)
    assert "\n" not in str(error.value)


def test_what_changed_since(world: World, tmp_path: Path) -> None:
    moved, sources = tmp_path / "moved", world.source(three)
    shutil.copytree(sources[0]["path"].rpartition("/")[0], moved)
    source = {**sources[0], "path": str(moved / "chat.jsonl")}
    measure(own := make_run(source, tmp_path / "all", **sections()))
    made = packed_stage(own, tmp_path / "stage")
    # More data change nothing.
    with (moved / "more.jsonl").open("wb") as file:
        file.write(lines([{"id": "new", "messages": dialogue("What?", "It.")}]))
    pack_all(made)
    there = own.workspace.index / part_name(1)
    kept = there.read_bytes()
    there.write_bytes(kept[:-9])
    with pytest.raises(DamagedError, match=r"part-00001\.parquet is not as it was measured"):
        measure(stage(own, tmp_path / "other"))
    there.write_bytes(kept)
    # Another index.
    smaller: Options = {"model": {"max_pixels": 28 * 28 * 32}}
    other = sections(output={"overwrite": True}, engine={"samples_per_part": 3}, **smaller)
    measure(make_run(source, own.workspace.root, **other))
    with pytest.raises(StageError, match=r"source\.0\.listing: .*all has another index now"):
        measure(stage(own, tmp_path / "stage", **smaller))


def test_pictures_of_two_indexes_are_apart(tmp_path: Path) -> None:
    """Prefix trees join samples of one picture; equal places in two folders are two pictures."""
    share = {"model": MODEL, "pack": {"seq_length": 1024, "share_prefixes": True}}
    runs = []
    for i in range(2):
        root = tmp_path / f"data{i}"
        source = shared_media(root, (12, 0, 0), (1, 0), sides=[112])
        runs.append(make_run(source, tmp_path / f"all{i}", **share))
        # The same size and first bytes, as is all that is hashed of it.
        write_file(root / "0.jpg", image_bytes(112, 112) + bytes(1 << 15) + bytes([i]))
        measure(runs[i])
    rows = [index_rows(run)[0] for run in runs]
    assert rows[0]["prefix_hash"] == rows[1]["prefix_hash"]
    assert rows[0]["prefix_media"] == rows[1]["prefix_media"]
    taken = [
        {"format": "index", "path": str(run.workspace.root), "name": f"s{i}"}
        for i, run in enumerate(runs)
    ]
    made = packed_run(taken, tmp_path / "stage", **share)
    media = {(row["source_id"], row["prefix_media"]) for row in index_rows(made)}
    assert len(media) == len({own for _, own in media}) == 2
    assert verify(made, deep=True).ok


def test_a_medium_of_other_bytes_is_not_copied(tmp_path: Path) -> None:
    """Replaced by one of the same size and time after it was measured."""
    data = captioning_pairs(tmp_path / "data", 6)
    measured = make_run(data, tmp_path / "all")
    measure(measured)
    path = next(data.rglob("*.jpg"))
    times = path.stat()
    flip_byte(path, -20)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    made = make_run({"format": "index", "path": str(tmp_path / "all")}, tmp_path / "stage")
    with pytest.raises(StageError, match=rf"{path.name} changed since it was measured: it begins"):
        pack_all(made)
    flip_byte(path, -20)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    pack_all(made)
    assert verify(made, deep=True).ok
    flip_byte(path, -20)
    assert f"{path.name} changed since" in str(verify(made, deep=True).problems)
