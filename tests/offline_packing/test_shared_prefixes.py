"""Packs whose samples share prefixes, from plan to rows: each sample once and as it is alone, each
medium once; and whoever does not know such packs refuses them."""

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from megatron.energon import WorkerConfig, get_loader, get_train_dataset
from megatron.energon.errors import FatalSampleError

from offline_packing.errors import StageError
from offline_packing.export.raw_packs import export
from offline_packing.layouts import LAYOUTS
from offline_packing.layouts.shards import ShardFragment
from offline_packing.online.energon import OnlineTaskEncoder, get_online_train_dataset
from offline_packing.report.pages import render_packs
from offline_packing.report.preview import preview
from offline_packing.report.preview_text import render_pack
from offline_packing.runs.artifacts import open_index, open_plan
from offline_packing.runs.manifest import require_manifest
from offline_packing.runs.run import Run
from offline_packing.upkeep.blend import blend
from offline_packing.verify.verify import verify
from task_encoders import concatenate
from task_encoders.loading.packed_dataset import get_packed_train_dataset
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.packs.pack import restore_pack
from task_encoders.packs.references import metadataset_of
from task_encoders.settings import PackingSettings, PackingSettingsError
from tests.helpers.datasets import dialogue, index_rows, make_run, pack_all, packed_run
from tests.helpers.elements import Elements
from tests.helpers.outputs import files_of, members_of
from tests.helpers.shared_media import MODEL, shared_media

SEQ_LENGTH = 1024
#: Raised for a sample, or already by the manifest.
Refusal = (FatalSampleError, PackingSettingsError)
REFUSED = r"holds samples that share prefixes.*train it with launch\.train"


Options = dict[str, Any]


def options(layout: str = "energon", share: Any = True, **sections: Options) -> dict[str, Options]:
    pack = {"seq_length": SEQ_LENGTH, "share_prefixes": share, **sections.pop("pack", {})}
    output = {"layout": layout, "packs_per_shard": 2, "split": {"train": 0.8, "val": 0.2}}
    output |= sections.pop("output", {})
    return {"model": MODEL, **sections, "pack": pack, "output": output}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Options:
    return shared_media(tmp_path_factory.mktemp("prefixes") / "data")


@pytest.fixture(scope="module")
def runs(source: Options, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Run]:
    root = tmp_path_factory.mktemp("runs")
    return {
        (layout, share): packed_run(source, root / f"{layout}{share}", **options(layout, share))
        for layout in ("energon", "references")
        for share in (True, False)
    }


def task_encoder(kind: Any = PackedTaskEncoder, *, trees: bool = True, **changed: Any) -> Any:
    settings = PackingSettings(packed=True, vqa=True)
    own = {"seq_length": SEQ_LENGTH, "settings": settings, "trees": trees}
    return kind(**(MODEL | own | changed))


def rows_of(run: Run, **changed: Any) -> Iterator[Any]:
    """The rows of all splits."""
    for split in run.config.output.split:
        folder = PackedFolder(run.workspace.root, task_encoder(**changed), split=split)
        yield from map(folder.row, range(len(folder)))


def same_rows(found: concatenate.PackedRow, alone: concatenate.PackedRow) -> None:
    for name in ("tokens", "loss_weights", "position_ids", "pixel_values", "pixel_values_videos"):
        assert torch.equal(getattr(found, name), getattr(alone, name)), name
    assert found.media_counts.tolist() == alone.media_counts.tolist()


@pytest.mark.parametrize("layout", ["energon", "references"])
def test_every_sample_stands_once_as_it_is_alone(
    layout: str, runs: dict[tuple[str, bool], Run]
) -> None:
    shared, plain = runs[layout, True], runs[layout, False]
    for run in (shared, plain):
        verified = verify(run, deep=True)
        assert verified.problems == []
        assert verified.num_samples == 76
    alone = {
        key: part
        for row in rows_of(plain, trees=False)
        for key, part in zip(row.sub_sample_keys, concatenate.split_row(row.row), strict=True)
    }
    num_tokens, seen, num_trees = 0, Counter[str](), 0
    for row in rows_of(shared):
        num_tokens += len(row.row.tokens)
        num_trees += len(set(row.row.parents.tolist()) - {-1})
        assert not row.dropped
        for key, part in zip(row.sub_sample_keys, concatenate.split_row(row.row), strict=True):
            seen[key] += 1
            same_rows(part, alone[key])
    assert seen == Counter(alone.keys())
    counts, before = require_manifest(shared.workspace.root), require_manifest(plain.workspace.root)
    planned = open_plan(shared).packs.info.num_tokens
    assert num_tokens == counts.counts.tokens == planned < 0.7 * before.counts.tokens
    assert before.counts.tokens == sum(row["num_tokens"] for row in index_rows(plain))
    assert counts.counts.packed == before.counts.packed == 76
    assert (counts.version, before.version) == (2, 1)
    assert num_trees > 12


def test_each_medium_of_a_tree_is_a_member_once(runs: dict[tuple[str, bool], Run]) -> None:
    members = {share: members_of(runs["energon", share].workspace.root) for share in (True, False)}
    media = {share: [n for n in own if not n.endswith(".json")] for share, own in members.items()}
    assert len(media[False]) == 70
    plan, rows = open_plan(runs["energon", True]).packs, index_rows(runs["energon", True])
    is_first = np.flatnonzero(np.asarray(plan.branches) == 0)
    with_media = [rows[number]["media"] for number in plan.sample_ids[is_first]]
    assert len(media[True]) == sum(map(len, with_media)) < 30
    shards = {share: files_of(runs["references", share].workspace.root) for share in (True, False)}
    sizes = {share: len(own["train.jsonl"]) for share, own in shards.items()}
    assert sizes[True] < sizes[False]


def test_bytes_are_estimated_without_what_is_shared(runs: dict[tuple[str, bool], Run]) -> None:
    for share in (True, False):
        run = runs["energon", share]
        plan, layout = open_plan(run).packs, LAYOUTS["energon"]
        estimated = layout.pack_bytes(open_index(run), plan)
        shards = require_manifest(run.workspace.root).shards
        fragments = [run.workspace.fragment(line.name.removesuffix(".tar")) for line in shards]
        found = [pack.size for path in fragments for pack in ShardFragment.load(path).packs]
        assert len(found) == len(estimated)
        # at most what JSON is estimated too large, in blocks of a tar
        assert all(0 <= more <= 512 * 40 for more in estimated - np.array(found)), share


@pytest.mark.parametrize("bad", ["picture", "trees", "order"])
def test_verify_sees_what_is_not_as_planned(
    bad: str,
    source: Options,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = tmp_path / "data"
    shutil.copytree(Path(source["path"]).parent, data)
    own = {**source, "path": str(data / "questions.jsonl")}
    run = packed_run(own, tmp_path / "out", **options(output={"split": {"train": 1.0}}))
    assert verify(run, deep=True).problems == []
    if bad == "picture":  # only of the source, in bytes that no header shows
        path = data / "0.jpg"
        times = path.stat().st_mtime_ns
        content = bytearray(path.read_bytes())
        content[-40] ^= 0xFF
        path.write_bytes(content)
        os.utime(path, ns=(times, times))
        assert verify(run).problems == []
        problems = verify(run, deep=True).problems
        assert len(problems) > 1
        assert all("0.jpg changed since it was measured" in line for line in problems)
    elif bad == "trees":
        monkeypatch.setattr("offline_packing.layouts.base.trees_of", lambda samples: [])
        others = make_run(own, tmp_path / "others", **options(output={"split": {"train": 1.0}}))
        pack_all(others)
        assert any("meta.trees is not what was planned" in p for p in verify(others).problems)
    else:  # rows that do not give back what went in
        split_row = concatenate.split_row

        def changed(row: Any) -> list[Any]:
            for one in (parts := split_row(row)):
                one.position_ids.add_(1)
                one.pixel_values.fill_(7)
            return parts

        monkeypatch.setattr(concatenate, "split_row", changed)
        problems = verify(run, deep=True).problems
        assert any("it has other position_ids and pixel_values than" in p for p in problems)


def loaded(root: Path, encoder: PackedTaskEncoder, dataset_of: Any, **given: Any) -> list[Any]:
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = dataset_of(root, task_encoder=encoder, worker_config=config, **given)
    return list(get_loader(dataset))


PLAIN = {"batch_size": 1, "shuffle_buffer_size": None, "max_samples_per_sequence": None}
ONCE = {"repeat": False}


@pytest.mark.parametrize("layout", ["energon", "references"])
def test_every_reader_refuses_packs_that_it_does_not_know(
    layout: str, runs: dict[tuple[str, bool], Run], tmp_path: Path
) -> None:
    root = tmp_path / "packed"
    shutil.copytree(runs[layout, True].workspace.root, root)
    (root / "manifest.json").unlink()
    plain = runs[layout, False].workspace.root
    blended = tmp_path / "blend.yaml"
    blended.write_text(blend([runs[layout, True].workspace.root, plain], each_once=True))
    old, new = task_encoder(trees=False), task_encoder()
    energon: tuple[Any, Any, Options] = (metadataset_of(root), get_train_dataset, PLAIN | ONCE)
    readers: list[Callable[[PackedTaskEncoder], Any]] = [
        lambda encoder: loaded(energon[0], encoder, energon[1], **energon[2]),
        lambda encoder: loaded(root, encoder, get_packed_train_dataset, **ONCE),
        lambda encoder: loaded(blended, encoder, get_packed_train_dataset, **ONCE),
        lambda encoder: list(map(PackedFolder(root, encoder).row, range(2))),
        lambda encoder: PackedFolder(root, encoder).batch([0, 1]),
        lambda encoder: list(map(PackedFolder(blended, encoder).row, range(5))),
    ]
    for number, read in enumerate(readers):
        with pytest.raises(Refusal, match=REFUSED):
            read(old)
        assert read(new), number
    online = task_encoder(OnlineTaskEncoder, trees=False)
    with pytest.raises(Refusal, match=REFUSED):
        loaded(Path(str(metadataset_of(root))), online, get_online_train_dataset, **ONCE)


def test_a_blend_gives_every_sample_of_both(
    runs: dict[tuple[str, bool], Run], tmp_path: Path
) -> None:
    roots = [runs["energon", share].workspace.root for share in (True, False)]
    path = tmp_path / "blend.yaml"
    path.write_text(blend(roots, each_once=True))
    batches = loaded(path, task_encoder(), get_packed_train_dataset, micro_batch_size=2, **ONCE)
    keys = Counter(key for batch in batches for key in batch.sub_sample_keys)
    assert set(keys.values()) == {2}
    assert len(keys) == sum(line.samples for line in train_lines(roots[1]))


def train_lines(root: Path) -> list[Any]:
    return [line for line in require_manifest(root).shards if line.split == "train"]


def test_export_refuses_them_by_name(runs: dict[tuple[str, bool], Run], tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"share prefixes \(pack.share_prefixes\)"):
        export(runs["energon", True].workspace.root, tmp_path / "raw_packing_data")


def test_they_are_packed_again_as_whole_samples(
    runs: dict[tuple[str, bool], Run], tmp_path: Path
) -> None:
    packs = {"format": "packs", "path": str(runs["energon", True].workspace.root), "task": "vqa"}
    again = packed_run(packs, tmp_path / "again", **options(share=False))
    assert verify(again, deep=True).problems == []
    both = again, runs["energon", False]
    samples = [{one.key: (one, media) for one, media in restored(run)} for run in both]
    assert samples[0].keys() == samples[1].keys()
    for key, (sample, media) in samples[0].items():
        first, originals = samples[1][key]
        assert (sample.turns, media) == (first.turns, originals)
    once_more = packed_run(packs, tmp_path / "shared", **options())
    assert verify(once_more, deep=True).problems == []
    counts = [require_manifest(run.workspace.root).counts for run in (again, once_more)]
    assert counts[1].tokens < 0.7 * counts[0].tokens


def restored(run: Run) -> Iterator[tuple[Any, list[bytes]]]:
    members = members_of(run.workspace.root)
    for name in [name for name in members if name.endswith(".json")]:
        key = name.removesuffix(".json")
        for sub in restore_pack(members[name], key).sub_samples:
            yield sub, [members[f"{key}.{one}"] for one in sub.media]


def test_new_samples_of_the_same_media_are_packed_by_themselves(
    source: Options, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(Path(source["path"]).parent, data)
    path = data / "questions.jsonl"
    lines = path.read_text().splitlines()
    first = packed_run({**source, "path": str(path)}, tmp_path / "old", **options())
    more = [json.dumps({**json.loads(line), "id": f"new{i}"}) for i, line in enumerate(lines[:20])]
    more = [line.replace("Where is", "And where is") for line in more]
    path.write_text("\n".join([*lines, *more]) + "\n")
    skip = {**source, "path": str(path), "skip": [str(first.workspace.root)]}
    new = packed_run(skip, tmp_path / "new", **options())
    assert verify(new, deep=True).problems == []
    assert {row["key"] for row in index_rows(new)} == {f"new{i}" for i in range(20)}


@pytest.mark.parametrize("pad_multiple", [1, 16])
def test_media_of_their_own_after_shared_ones(pad_multiple: int, tmp_path: Path) -> None:
    """Dialogues that begin with two pictures, or a picture and a video, and show more later."""
    shared_media(tmp_path / "data", (12, 2, 0))
    records = []
    for number in range(24):
        leading = [["0.jpg", "1.jpg"], ["2.jpg", "0.mp4"], ["1.mp4"]][number % 3]
        own = [[f"{3 + number % 9}.jpg"], [], ["0.mp4", "4.jpg"]][number // 3 % 3]
        marks = [
            "".join(f"<{'image' if 'jpg' in n else 'video'}>" for n in s) for s in (leading, own)
        ]
        said = [
            f"{marks[0]}\nWhat is {number}?",
            "This.",
            f"{marks[1]}And this?",
            f"It is {number}.",
        ]
        names = leading + own
        images, videos = ([n for n in names if end in n] for end in ("jpg", "mp4"))
        record = {
            "id": str(number),
            "messages": dialogue(*said),
            "images": images,
            "videos": videos,
        }
        records.append(json.dumps(record))
    (tmp_path / "data" / "questions.jsonl").write_text("\n".join(records))
    source = {"format": "jsonl", "path": str(tmp_path / "data/questions.jsonl"), "task": "bmr"}
    pack, output = {"pad_multiple": pad_multiple}, {"split": {"train": 1.0}}
    for layout in ("energon", "references"):
        run = packed_run(source, tmp_path / layout, **options(layout, pack=pack, output=output))
        assert verify(run, deep=True).problems == []
        settings = PackingSettings(packed=True, bmr=True)
        rows = list(rows_of(run, settings=settings, pad_multiple=pad_multiple))
        assert (
            sum(row.row.media_counts.sum().item() for row in rows)
            < sum(len(row["media"]) for row in index_rows(run)) - 20
        )
        assert sum(len(row.row.tokens) for row in rows) == open_plan(run).packs.info.num_tokens
        assert sum(len(row.sub_sample_keys) for row in rows) == 24
        assert max(len(row.row.tokens) for row in rows) <= SEQ_LENGTH
        previews = list(preview(run, num_packs=100))
        assert sum(len(one.images + one.videos) for p in previews for one in p.sub_samples) == sum(
            row.row.media_counts.sum().item() for row in rows
        )


def test_captions(tmp_path: Path) -> None:
    """Their first token is trained: the trunk's last token stands at the head of each branch."""
    source = shared_media(tmp_path / "data", (40, 6, 0), (5, 2), captions=True)
    runs = [packed_run(source, tmp_path / f"{on}", **options(share=on)) for on in (True, False)]
    assert [verify(run, deep=True).problems for run in runs] == [[], []]
    tokens = [require_manifest(run.workspace.root).counts.tokens for run in runs]
    rows = list(rows_of(runs[0], settings=PackingSettings(packed=True)))
    assert sum(len(row.row.tokens) for row in rows) == tokens[0] < 0.7 * tokens[1]
    trained = sum(int((row.row.loss_weights > 0).sum()) for row in rows)
    assert trained == sum(row["num_loss_tokens"] for row in index_rows(runs[1]))


def test_token_ids(source: Options, runs: dict[tuple[str, bool], Run], tmp_path: Path) -> None:
    run = packed_run(source, tmp_path / "ids", **options(output={"pretokenize": True}))
    assert verify(run, deep=True).problems == []
    for found, expected in zip(rows_of(run), rows_of(runs["energon", True]), strict=True):
        assert found.sub_sample_keys == expected.sub_sample_keys
        assert torch.equal(found.row.tokens, expected.row.tokens)
        assert torch.equal(found.row.parents, expected.row.parents)
        assert torch.equal(found.row.position_ids, expected.row.position_ids)


def test_preview_shows_a_trunk_with_its_branches(runs: dict[tuple[str, bool], Run]) -> None:
    packs = list(preview(runs["energon", True], num_packs=100))
    page = render_packs(packs, "vqa").decode()
    elements, shown = Elements(page), click.unstyle("".join(map(render_pack, packs)))
    trunks = [sub for pack in packs for sub in pack.sub_samples if sub.num_branches]
    assert len(trunks) > 12
    assert "each branch (↳) below it sees the trunk and itself" in page
    for trunk in trunks:
        assert trunk.num_loss_tokens == 0
        assert len(trunk.images) + len(trunk.videos) == 1
        assert any(piece.kind == "vision" for span in trunk.spans for piece in span.pieces)
    for pack in packs:
        for number, sub in enumerate(pack.sub_samples):
            if sub.num_branches:
                branches = pack.sub_samples[number + 1 :][: sub.num_branches]
                assert all(one.is_branch and not one.images + one.videos for one in branches)
            else:
                (turn,) = sub.sample.turns
                assert turn.answer in elements.text
                assert ("↳ " + sub.sample.key in elements.text) == sub.is_branch
    media = [sub.images + sub.videos for pack in packs for sub in pack.sub_samples]
    assert elements.names["img"] == sum(map(len, media)) < 30
    assert f"trunk of {trunks[0].num_branches} samples" in elements.text
    assert re.search(r"#\d+ trunk of \d+ samples  [\d,]+ tokens", shown)
    plain = list(preview(runs["energon", False], num_packs=100))
    assert "trunk" not in render_packs(plain, "vqa").decode()
