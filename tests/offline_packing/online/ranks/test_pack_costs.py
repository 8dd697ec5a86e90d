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
from offline_packing.runs.run import Run
from task_encoders.families import FAMILIES
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.packs.pack import parse_json
from tests.helpers.unpacked_folders import blend_of
from tests.world import World, task_encoder

SPLIT = {"split": {"train": 0.6, "val": 0.4}}


@pytest.fixture
def captions(world: World) -> Run:
    return world.run("captioning", output=SPLIT)


@pytest.fixture
def dialogues(world: World) -> Path:
    return world.packed("bmr", output=SPLIT)


def tokens_of(folder: PackedFolder) -> list[int]:
    """As the packs themselves say."""
    return [sum(parse_json(p.record, p.key)["meta"]["num_tokens"]) for p in folder]


@pytest.mark.parametrize("split", ["train", "val"])
def test_tokens_and_costs_of_packs(split: str, captions: Run) -> None:
    folder = PackedFolder(captions.workspace.root, split=split)
    tokens, cost = pack_costs(folder)
    assert tokens.tolist() == tokens_of(folder)
    assert len(cost) == len(folder) > 1
    model = FAMILIES["qwen2_vl"].cost
    rows = PackedFolder(folder.path, task_encoder(captions), split=split)
    for number, own in enumerate(cost):
        row = rows.row(number).row
        expected = model.language_flops(row.cu_lengths.diff()).sum()
        expected += model.tower_flops(row.image_grid_thw.prod(1)).sum()
        assert own == pytest.approx(expected)


def test_costs_of_a_blend(captions: Run, dialogues: Path, tmp_path: Path) -> None:
    root = captions.workspace.root
    parts = [f"path: {dialogues}, repetitions: 2", f"path: {root}, subset: {{range: [1, 3]}}"]
    folder = PackedFolder(blend_of(tmp_path / "blend.yaml", parts))
    tokens, cost = pack_costs(folder)
    assert tokens.tolist() == tokens_of(folder)
    is_caption = [pack.subflavors["offline_packing"] == "captioning" for pack in folder]
    own_cost = pack_costs(PackedFolder(root))[1]
    assert cost[is_caption].tolist() == own_cost[1:3].tolist()


def test_the_schedule_is_that_of_a_blend(dialogues: Path, tmp_path: Path) -> None:
    """Of the same datasets, with as many packs, another blend trains others at each step."""
    roots = dialogues, shutil.copytree(dialogues, tmp_path / "copy")
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


def test_a_split_in_one_file_is_found_in_the_plan(world: World) -> None:
    """Also where another split was written before."""
    output = {"layout": "indexed", "split": {"test": 0.4, "train": 0.6}}
    run = world.run("bmr", output=output)
    samples, plan = open_index(run), PackPlan.load(run.workspace.plan)
    for split in ("train", "test"):
        folder = PackedFolder(run.workspace.root, split=split)
        ((root, numbers, planned),) = numbers_in_plans(folder)
        assert root == folder.shards[0].root
        assert numbers.tolist() == list(range(len(folder)))
        for number, pack in enumerate(planned):
            ids = plan.sample_ids[slice(*plan.pack_offsets[pack:][:2])]
            keys = samples.table("key")["key"].take(ids).to_pylist()
            assert [*folder[number].tokens.sub_sample_keys] == keys


def test_packs_without_their_plan_are_named(captions: Run, dialogues: Path, tmp_path: Path) -> None:
    for name in ("plan", "index.json"):
        copy = tmp_path / name
        shutil.copytree(dialogues, copy)
        wrong = copy / "_packing" / name
        shutil.rmtree(wrong) if wrong.is_dir() else wrong.unlink()
        with pytest.raises(StageError, match=f"{name} has no index and plan"):
            pack_costs(PackedFolder(copy))
    shutil.rmtree(copy / "_packing")
    shutil.copytree(captions.workspace.root / "_packing", copy / "_packing")
    with pytest.raises(StageError, match="the shards are not those of its plan and index"):
        pack_costs(PackedFolder(copy))
