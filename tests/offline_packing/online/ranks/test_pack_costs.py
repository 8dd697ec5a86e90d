"""Tokens and costs of written packs, by their index and plan."""

import collections
import shutil
from pathlib import Path
from typing import Any

import pytest

from offline_packing.errors import StageError
from offline_packing.online.ranks.pack_costs import numbers_in_plans, pack_costs, schedule_of
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.runs.artifacts import open_index
from task_encoders.families import FAMILIES
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.packs.pack import parse_json
from task_encoders.settings import PackingSettings
from tests.helpers.datasets import captioning_pairs, make_run, mixed_pairs, pack_all
from tests.helpers.unpacked_folders import blend_of


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Captions in two splits, and dialogues."""
    root = tmp_path_factory.mktemp("outputs")
    for task, draw in (("captioning", captioning_pairs), ("bmr", mixed_pairs)):
        source = {"format": "pairs", "path": str(draw(root / "data" / task)), "task": task}
        split = {"train": 0.6, "val": 0.4}
        pack_all(make_run(source, root / task, output={"split": split}))
    return root


def tokens_of(folder: PackedFolder) -> list[int]:
    """As the packs themselves say."""
    return [sum(parse_json(p.record, p.key)["meta"]["num_tokens"]) for p in folder]


@pytest.mark.parametrize("split", ["train", "val"])
def test_tokens_and_costs_of_packs(split: str, outputs: Path) -> None:
    folder = PackedFolder(outputs / "captioning", split=split)
    tokens, cost = pack_costs(folder)
    assert tokens.tolist() == tokens_of(folder)
    assert len(cost) == len(folder) > 1
    model = FAMILIES["qwen2_vl"].cost
    encoder = PackedTaskEncoder(
        seq_length=512, max_pixels=28 * 28 * 64, settings=PackingSettings(packed=True)
    )
    for number, own in enumerate(cost):
        row = PackedFolder(folder.path, encoder, split=split).row(number).row
        expected = model.language_flops(row.cu_lengths.diff()).sum()
        expected += model.tower_flops(row.image_grid_thw.prod(1)).sum()
        assert own == pytest.approx(expected)


def test_costs_of_a_blend(outputs: Path, tmp_path: Path) -> None:
    captions = f"path: {outputs / 'captioning'}, subset: {{range: [1, 3]}}"
    parts = [f"path: {outputs / 'bmr'}, repetitions: 2", captions]
    folder = PackedFolder(blend_of(tmp_path / "blend.yaml", parts))
    tokens, cost = pack_costs(folder)
    assert tokens.tolist() == tokens_of(folder)
    is_caption = [pack.subflavors["offline_packing"] == "captioning" for pack in folder]
    own_cost = pack_costs(PackedFolder(outputs / "captioning"))[1]
    assert cost[is_caption].tolist() == own_cost[1:3].tolist()


def test_the_schedule_is_that_of_a_blend(outputs: Path, tmp_path: Path) -> None:
    """Of the same datasets, with as many packs, another blend trains others at each step."""
    roots = outputs / "bmr", shutil.copytree(outputs / "bmr", tmp_path / "copy")
    options: dict[str, Any] = {"num_ranks": 1, "packs_per_row": 1, "seed": 0, "repeat": True}
    found = collections.Counter()
    for first in ("[0, 2]", "[1, 3]"):
        for times in ((1, 2), (2, 1)):
            parts = [
                f"path: {root}, subset: {{range: {first}}}, repetitions: {n}"
                for root, n in zip(roots, times, strict=True)
            ]
            folder = PackedFolder(blend_of(tmp_path / "blend.yaml", parts))
            found[schedule_of(folder, order="written", **options).digest] += len(folder)
    assert [*found.values()] == [6] * 4


def test_a_split_in_one_file_is_found_in_the_plan(tmp_path: Path) -> None:
    """Also where another split was written before."""
    source = {"format": "pairs", "path": str(mixed_pairs(tmp_path / "data")), "task": "bmr"}
    output = {"layout": "indexed", "split": {"test": 0.4, "train": 0.6}}
    pack_all(run := make_run(source, tmp_path / "packed", output=output))
    samples, plan = open_index(run), PackPlan.load(run.workspace.plan)
    for split in ("train", "test"):
        folder = PackedFolder(tmp_path / "packed", split=split)
        ((root, numbers, planned),) = numbers_in_plans(folder)
        assert root == folder.shards[0].root
        assert numbers.tolist() == list(range(len(folder)))
        for number, pack in enumerate(planned):
            ids = plan.sample_ids[slice(*plan.pack_offsets[pack:][:2])]
            keys = samples.table("key")["key"].take(ids).to_pylist()
            assert [*folder[number].tokens.sub_sample_keys] == keys


def test_packs_without_their_plan_are_named(outputs: Path, tmp_path: Path) -> None:
    for name in ("plan", "index.json"):
        copy = tmp_path / name
        shutil.copytree(outputs / "bmr", copy)
        wrong = copy / "_packing" / name
        shutil.rmtree(wrong) if wrong.is_dir() else wrong.unlink()
        with pytest.raises(StageError, match=f"{name} has no index and plan"):
            pack_costs(PackedFolder(copy))
    shutil.rmtree(copy / "_packing")
    shutil.copytree(outputs / "captioning" / "_packing", copy / "_packing")
    with pytest.raises(StageError, match="the shards are not those of its plan and index"):
        pack_costs(PackedFolder(copy))
