"""Packs whose samples share prefixes, and the same samples packed without."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from offline_packing.layouts.energon_metadata import index_pack_folder
from offline_packing.storage.tars import TarShardWriter
from task_encoders.families import build_sample_encoder, model_options
from task_encoders.loading.packed_folder import PackedFolder, RawPack
from task_encoders.packs.pack import Pack, sub_samples_of_pack
from task_encoders.packs.pack_format import (
    JSON_PART,
    PackedSubSample,
    Tree,
    media_part_names,
    pack_json,
)
from task_encoders.sample_encoder import SampleEncoder
from tests.helpers.datasets import WORDS, dialogue, image_bytes, make_run, pack_all, write_json


def questions(root: Path, pictures: int = 4, per_picture: int = 40, size: int = 140) -> Path:
    """Dialogues on pictures, some with a second picture in the question; a few have none."""
    rng = np.random.default_rng(0)
    root.mkdir(parents=True)
    for number in range(pictures):
        (root / f"picture{number}.jpg").write_bytes(image_bytes(size + 28 * number, size))
    for i in range(pictures * per_picture):
        first, *texts = (
            " ".join(rng.choice(WORDS, rng.integers(2, 12))) for _ in range(2 + 2 * (i % 2))
        )
        names = [f"picture{i % pictures}.jpg"] if i % 11 else []
        more = [f"other{i}.jpg"] if names and i % 7 == 3 else []
        for name in more:
            (root / name).write_bytes(image_bytes(56, 84, shade=i))
        first = "<image>\n" * len(names) + first + " like <image>?" * len(more)
        content = {"messages": dialogue(first, *texts), "images": names + more}
        write_json(root / (f"q{i:03d}.json" if names else f"output_{i:08d}.json"), content)
    return root


def tree_folders(root: Path, **sections: dict[str, Any]) -> tuple[Path, Path]:
    """A folder of packs, and the same packs as trees, some in a val split."""
    run = make_run(
        {"format": "pairs", "path": str(questions(root / "source")), "task": "bmr"},
        root / "plain",
        pack={"seq_length": 1024},
        output={"packs_per_shard": 2, "split": {"val": 0.3, "train": 0.7}},
        **sections,
    )
    pack_all(run)
    return root / "plain", share_prefixes(root / "plain", root / "trees")


def share_prefixes(plain: Path, folder: Path) -> Path:
    """Copy packs, in each of which the samples that begin with one picture become a tree."""
    shutil.copytree(plain, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    encoder = build_sample_encoder(model_options(**manifest["config"]["model"]))
    num_trees = 0
    for split in {shard["split"] for shard in manifest["shards"]}:
        packs = iter(PackedFolder(plain, split=split))
        for shard in manifest["shards"]:
            if shard["split"] == split:
                with open(folder / shard["name"], "wb") as file:
                    writer = TarShardWriter(file)
                    for _ in range(shard["packs"]):
                        pack = next(packs)
                        members = _with_trees(pack, encoder, manifest["task"])
                        num_trees += b'"trees"' in members[-1][1]
                        writer.add(pack.key, members)
                    writer.finish()
    assert num_trees
    index_pack_folder(folder)
    for name in ("split.yaml", "dataset.yaml"):
        shutil.copy(plain / ".nv-meta" / name, folder / ".nv-meta" / name)
    (folder / "manifest.json").write_text(json.dumps(manifest | {"version": 2}))
    return folder


def _with_trees(pack: RawPack, encoder: SampleEncoder, task: str) -> list[tuple[str, bytes]]:
    """Members of a pack of trees."""
    record = json.loads(pack.record)
    groups: dict[object, list[Any]] = {}
    for one in sub_samples_of_pack(Pack(pack.key, record, pack.media), task, ""):
        groups.setdefault(one.images[0] if one.images else one.key, []).append(one)
    subs: list[PackedSubSample] = []
    trees, media = [], []
    for group in groups.values():
        alone = min(group, key=lambda one: len(one.images))  # whose last image is the shared one
        is_tree = len(group) > 1 and len(alone.images) == 1
        if is_tree:
            tokens = encoder.encode(alone.sample, alone.images).tokens
            is_image = tokens == encoder.media_token_ids["image_token_id"]
            shared = int(np.flatnonzero(is_image)[-1]) + 1
            trees.append(Tree(len(subs), len(group), shared, 1, 0))
        for number, one in enumerate(group):
            first = int(is_tree and number > 0)
            names = [name.rpartition(".")[2] for name in one.sample.images[first:]]
            subs.append(PackedSubSample(one.sample, tuple(names), one.num_tokens))
            media += one.images[first:]
    generation = record["meta"].get("generation", "")
    content = pack_json(subs, task, trees=trees, generation=generation, media=media)
    names = media_part_names([e for sub in subs for e in sub.extensions])
    return [*zip(names, media, strict=True), (JSON_PART, content)]
