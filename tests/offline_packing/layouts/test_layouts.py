"""Splits and shards of every layout; what the loader of LLaVA-OneVision-1.5 reads; a layout of
one's own."""

import importlib.util
import io
import json
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from offline_packing.errors import ConfigError, StageError
from offline_packing.layouts import LAYOUTS, Layout
from offline_packing.layouts.shards import ShardFragment, ShardTask, lay_out_shards
from offline_packing.measure.measure import measure
from offline_packing.report.preview import preview
from offline_packing.storage.files import hash_bytes
from offline_packing.storage.tars import PackEntry, Part, scan_tar, tar_size
from offline_packing.verify.verify import verify
from task_encoders.packs.pack import Pack
from tests.helpers.datasets import (
    captioning_pairs,
    dialogue,
    image_bytes,
    make_config,
    make_run,
    pack_all,
    packed_run,
    plan_index,
    write_json,
    write_planned,
)
from tests.helpers.outputs import repair


def questions(root: Path, count: int = 12) -> Path:
    """One picture and one question each; some say where the picture goes."""
    for i in range(count):
        prompt = ("<image>\n" if i % 2 else "") + f"How many squares are in picture {i}?"
        write_json(root / f"{i:03d}.json", {"question": prompt, "answer": f"There are {i}."})
        (root / f"{i:03d}.png").write_bytes(image_bytes(28 * (2 + i % 4), 84, "PNG"))
    return root


@pytest.mark.parametrize("layout", ["energon", "references"])
def test_what_is_not_ours_stays_when_packs_are_overwritten(tmp_path: Path, layout: str) -> None:
    """Though other layouts, or other splits, would give their files such names."""
    source = captioning_pairs(tmp_path / "data", 12)
    pack_all(make_run(source, tmp_path / "out", output={"layout": layout}))
    others = [tmp_path / "out" / name for name in ("notes.jsonl", "packed_seq_dataset_my.bin")]
    for path in others:
        path.write_text("mine")
    output = {"layout": layout, "key_prefix": "new-", "overwrite": True}
    again = packed_run(source, tmp_path / "out", output=output)
    assert verify(again).ok
    assert [path.read_text() for path in others] == ["mine", "mine"]


@pytest.mark.parametrize("task", ["captioning", "vqa"])
def test_llava_onevision(tmp_path: Path, task: str) -> None:
    root = tmp_path / "data"
    captioning_pairs(root, 12) if task == "captioning" else questions(root)
    source = {"format": "pairs", "path": str(root), "task": task}
    run = make_run(source, tmp_path / "out", output={"layout": "llava_onevision"})
    manifest = pack_all(run)
    assert verify(run, deep=True).ok
    meta = run.workspace.nv_meta
    loader = load_module(meta / "sample_loader.py")
    num_samples = 0
    for path in sorted(run.workspace.root.glob("*.tar")):
        offsets = np.fromfile(path.with_suffix(".tar.idx"), dtype="<u8").tolist()
        entries = list(scan_tar(path))
        assert offsets == [*(e.offset for e in entries), entries[-1].offset + entries[-1].size]
        data = path.read_bytes()
        for entry in entries:
            num_samples += check_pack(
                loader, task, {part.name: data[part.offset :][: part.size] for part in entry.parts}
            )
    assert num_samples == manifest.counts.packed == 12
    info = yaml.safe_load((meta / ".info.yaml").read_text())
    assert info == {"shard_counts": {s.name: s.packs for s in manifest.shards}}
    split = yaml.safe_load((meta / "split.yaml").read_text())
    assert split["split_parts"]["train"] == [shard.name for shard in manifest.shards]
    assert split["exclude"] == []
    dataset = yaml.safe_load((meta / "dataset.yaml").read_text())
    assert dataset == {
        "sample_type": {
            "__module__": "aiak_training_llm.data.multimodal",
            "__class__": "PackedCaptioningSample",
        },
        "part_filter": "sample_loader.py:part_filter",
        "sample_loader": "sample_loader.py:sample_loader",
    }


def load_module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("written_loader", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_pack(loader: Any, task: str, parts: dict[str, bytes]) -> int:
    """Check all that their loader needs in a pack; return its number of sub-samples."""
    assert list(parts) == [*(f"img{i}.jpg" for i in range(len(parts) - 1)), "json"]
    record = json.loads(parts["json"])
    assert record["images"] == list(parts)[:-1]
    assert set(record) - {"meta"} == {"images", "prompts", "captions"}
    assert all(loader.part_filter(name) for name in parts)
    sample = loader.sample_loader({"__key__": "k", **parts, "json": record})
    assert set(sample) == {"__key__", "images", "captions", "prompts"}
    assert len(sample["images"]) == len(sample["captions"]) == len(sample["prompts"])
    placeholders = {prompt.count("<image>") for prompt in sample["prompts"]}
    assert placeholders == ({1} if task == "vqa" else {0})
    assert not any("<image>" in caption for caption in sample["captions"])
    for data in sample["images"]:
        Image.open(io.BytesIO(data)).load()
    return len(sample["images"])


#: Samples that that loader cannot use, or trains as something else.
UNFIT = {
    "text": {"question": "How?", "answer": "So.", "images": []},
    "pair": {"question": "<image><image>?", "answer": "No.", "images": ["000.png", "001.png"]},
    "turns": {"messages": dialogue("Q", "A", "More?", "B"), "images": ["000.png"]},
    "system": {
        "messages": [{"role": "system", "content": "Be brief."}, *dialogue("What?", "That.")],
        "images": ["000.png"],
    },
    "tag": {"question": "<image>Tag?", "answer": "Write <image>.", "images": ["000.png"]},
    "pad": {"question": "What is <|image_pad|>?", "answer": "A token.", "images": ["000.png"]},
    "thin": {"question": "A line?", "answer": "Yes.", "images": ["thin.png"]},
}


def test_llava_onevision_sets_aside_what_it_cannot_hold(tmp_path: Path) -> None:
    root = questions(tmp_path / "data", 6)
    for name, record in UNFIT.items():
        write_json(root / f"{name}.json", record)
    (root / "thin.png").write_bytes(image_bytes(90, 3, "PNG"))
    default = {"role": "system", "content": "You are a helpful assistant."}
    record = {"messages": [default, *dialogue("What?", "That.")], "images": ["000.png"]}
    write_json(root / "default.json", record)  # what that loader writes by itself
    source = {"format": "pairs", "path": str(root), "task": "vqa"}
    run = make_run(source, tmp_path / "out", output={"layout": "llava_onevision"})
    counts = pack_all(run).counts
    assert counts.packed == 7
    assert counts.set_aside == {"not_in_layout": len(UNFIT)}
    aside = pq.read_table(run.workspace.plan / "set_aside.parquet").to_pylist()
    details = {row["key"]: row["detail"].removeprefix("layout llava_onevision ") for row in aside}
    assert details == {
        "text": "holds no sample without exactly one image",
        "pair": "holds no sample without exactly one image",
        "turns": "holds no sample of several turns",
        "system": "holds no system message",
        "tag": "holds no text that spells control tokens, nor <image> in an answer or document",
        "pad": "holds no text that spells control tokens, nor <image> in an answer or document",
        "thin": "holds no image 1 or 3 pixels high or wide",
    }
    assert verify(run, deep=True).ok
    other = make_run(source, tmp_path / "energon")
    assert pack_all(other).counts.packed == 7 + len(UNFIT)


def test_llava_onevision_holds_captions_about_tags(tmp_path: Path) -> None:
    """A caption goes through no template, so nothing in it becomes an image."""
    root = captioning_pairs(tmp_path / "data", 4)
    write_json(root / "tag.json", {"caption": "The words <video> and </image>."})
    (root / "tag.png").write_bytes(image_bytes(image_format="PNG"))
    source = {"format": "pairs", "path": str(root), "task": "captioning"}
    run = make_run(source, tmp_path / "out", output={"layout": "llava_onevision"})
    counts = pack_all(run).counts
    assert (counts.packed, counts.set_aside) == (5, {})
    assert verify(run, deep=True).ok


def test_llava_onevision_names_a_sample_that_got_another_turn(tmp_path: Path) -> None:
    root = questions(tmp_path / "data", 2)
    texts = ("Q?", "A.")
    short, long = (json.dumps({"messages": dialogue(*texts * n)}) for n in (1, 2))
    path = root / "odd.json"
    path.write_text(short.ljust(len(long)))
    (root / "odd.png").write_bytes(image_bytes(image_format="PNG"))
    source = {"format": "pairs", "path": str(root), "task": "vqa"}
    run = make_run(source, tmp_path / "out", output={"layout": "llava_onevision"})
    measure(run)
    plan_index(run)
    path.write_text(long)
    with pytest.raises(StageError, match="'odd' changed since it was measured: it has 2 turns"):
        write_planned(run)


def test_layouts_and_tasks(tmp_path: Path) -> None:
    source = {"format": "pairs", "path": str(tmp_path / "data"), "task": "bmr"}
    with pytest.raises(
        ConfigError, match="llava_onevision' holds captioning and vqa only, not bmr"
    ):
        make_config(source, tmp_path / "out", output={"layout": "llava_onevision"})
    with pytest.raises(ConfigError, match=f"choose one of: {', '.join(LAYOUTS)}"):
        make_config(source, tmp_path / "out", output={"layout": "tar"})


@given(
    pack_bytes=st.lists(st.integers(512, 100_000), min_size=1, max_size=60),
    packs_per_shard=st.integers(1, 20),
    max_shard_bytes=st.none() | st.integers(1, 300_000),
    val_share=st.floats(0.05, 0.5),
)
def test_lay_out_shards(
    pack_bytes: list[int], packs_per_shard: int, max_shard_bytes: int | None, val_share: float
) -> None:
    first = round(len(pack_bytes) * (1 - val_share))
    splits = {"train": range(first), "val": range(first, len(pack_bytes))}
    sizes = np.array(pack_bytes, dtype=np.int64)
    shards = lay_out_shards(sizes, splits, packs_per_shard, max_shard_bytes)
    held = [pack for s in shards for pack in range(s.first_pack, s.first_pack + s.num_packs)]
    assert held == list(range(len(pack_bytes)))
    assert len({shard.name for shard in shards}) == len(shards)
    for name, packs in splits.items():
        of_split = [shard for shard in shards if shard.split == name]
        assert sum(shard.num_packs for shard in of_split) == len(packs)
        assert [s.name for s in of_split] == [f"{name}-{i:06d}" for i in range(len(of_split))]
    for shard in shards:
        size = sum(pack_bytes[shard.first_pack : shard.first_pack + shard.num_packs])
        assert 1 <= shard.num_packs <= packs_per_shard
        assert shard.num_packs == 1 or tar_size(size) <= (max_shard_bytes or np.inf)


class ZipLayout(Layout):
    """One zip a shard, its members as in a tar."""

    def shard_file(self, shard_name: str) -> str:
        return f"{shard_name}.zip"

    def write(self, task: ShardTask) -> ShardFragment:
        name = self.shard_file(task.shard.name)
        partial = task.folder / f"{name}.tmp"
        packs = []
        with zipfile.ZipFile(partial, "w") as file:
            for key, rows in task.packs():
                members = self.checked_members(task, rows)
                for part, data in members:
                    file.writestr(zipfile.ZipInfo(f"{key}.{part}"), data)
                parts = tuple(Part(part, 0, len(data)) for part, data in members)
                packs.append(PackEntry(key, 0, sum(part.size for part in parts), parts))
        partial.rename(task.folder / name)
        content = (task.folder / name).read_bytes()
        return self.fragment(task, name, len(content), hash_bytes(content), packs)

    def is_there(self, shard_name: str, split: str, files: Collection[str]) -> bool:
        return self.shard_file(shard_name) in files

    def find_damage(self, task: ShardTask, expected_hash: str) -> list[tuple[str, str]]:
        path = task.folder / self.shard_file(task.shard.name)
        if not path.exists():
            return [(path.name, "is missing")]
        same = hash_bytes(path.read_bytes()) == expected_hash
        return [] if same else [(path.name, "is not what was written")]

    def read_packs(self, task: ShardTask) -> Iterator[Pack]:
        name, keys = self.shard_file(task.shard.name), task.keys()
        for key in keys:
            yield self.read_pack(task.folder, name, key)

    def read_pack(self, folder: Path, shard_file: str, key: str) -> Pack:
        try:
            with zipfile.ZipFile(folder / shard_file) as file:
                names = [name for name in file.namelist() if name.startswith(f"{key}.")]
                return Pack.of(key, {name.partition(".")[2]: file.read(name) for name in names})
        except (OSError, zipfile.BadZipFile) as error:
            raise StageError(f"{shard_file} cannot be read: {error}") from error

    def remove(self, folder: Path) -> None:
        for path in folder.glob("*.zip"):
            path.unlink()


def test_a_layout_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYOUTS, "zip", ZipLayout())
    run = make_run(captioning_pairs(tmp_path / "data"), tmp_path / "out", output={"layout": "zip"})
    manifest = pack_all(run)
    shards = sorted((tmp_path / "out").glob("*.zip"))
    assert [path.name for path in shards] == [shard.name for shard in manifest.shards]
    assert len(shards) > 1
    assert verify(run, deep=True).num_samples == manifest.counts.packed == 40
    assert len(list(preview(run, num_packs=2))) == 2
    before = shards[0].read_bytes()
    shards[0].write_bytes(before[:-1])
    shards[1].unlink()
    assert not verify(run).ok
    repair(run)
    assert shards[0].read_bytes() == before
    assert verify(run, deep=True).ok
