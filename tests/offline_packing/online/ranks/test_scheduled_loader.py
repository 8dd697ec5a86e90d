"""Packs of a folder on the ranks of a schedule, through torch's own workers."""

import collections
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from offline_packing.errors import StageError
from offline_packing.online.ranks.pack_costs import pack_costs
from offline_packing.online.ranks.rank_schedule import RankSchedule
from task_encoders.families import FAMILIES
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.loading.schedule import RankSampler, ScheduledLoader
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.packs.pack import parse_json
from task_encoders.settings import PackingSettings
from tests.helpers.datasets import captioning_pairs, make_run, mixed_pairs, pack_all
from tests.helpers.legacy_packs import text_folder

NUM_PACKS = 9


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> PackedFolder:
    path = text_folder(tmp_path_factory.mktemp("texts") / "packs", NUM_PACKS)
    settings = PackingSettings(packed=True, bmr=True)
    return PackedFolder(path, PackedTaskEncoder(seq_length=64, settings=settings))


def make_loader(folder: PackedFolder, rank: int, workers: int, ranks: int = 2) -> ScheduledLoader:
    lengths = np.arange(1, len(folder) + 1)
    schedule = RankSchedule(lengths, None, ranks, seed=1)
    return ScheduledLoader(folder, schedule, rank, num_workers=workers)


def keys_of(batches: Any) -> list[str]:
    return [" ".join(batch.__key__) for batch in batches]


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_share_each_epoch(workers: int, texts: PackedFolder) -> None:
    loaders = [make_loader(texts, rank, workers) for rank in range(2)]
    for _ in range(2):
        assert [len(loader) for loader in loaders] == [5, 5]
        keys = [key for loader in loaders for key in keys_of(loader)]
        times = collections.Counter(keys)
        assert sorted(times) == [f"{i:02d}" for i in range(NUM_PACKS)]
        assert sorted(times.values()) == [1] * 8 + [2]


def test_a_restored_loader_gives_the_rest_and_nothing_else(texts: PackedFolder) -> None:
    """Workers read ahead: what they have not delivered is not lost. Any number of them goes on."""
    loader = make_loader(texts, 1, 2)
    states, keys = [loader.state_dict()], []
    for _ in range(2):
        for batch in loader:
            keys += keys_of([batch])
            states.append(loader.state_dict())
    assert len(keys) == 10
    for step, state in enumerate(states):
        restored = make_loader(texts, 1, step % 3)
        restored.load_state_dict(state)
        rest = [key for _ in range(3) for key in keys_of(restored)]
        assert rest[: 10 - step] == keys[step:], step


def test_an_iteration_that_is_left_goes_on(texts: PackedFolder) -> None:
    loader, whole = make_loader(texts, 0, 1), keys_of(make_loader(texts, 0, 0))
    first = next(iter(loader))
    assert len(loader) == 4
    assert keys_of([first, *loader]) == whole


@pytest.mark.parametrize("workers", [0, 2])
def test_its_length_may_be_asked_at_any_time(workers: int, texts: PackedFolder) -> None:
    """Also while workers read ahead."""
    plain, asked = make_loader(texts, 0, 0), make_loader(texts, 0, workers)
    for _ in range(2):
        left = len(asked)
        assert left == 5
        for batch, expected in zip(asked, plain, strict=True):
            left -= 1
            assert len(asked) == left
            assert batch.__key__ == expected.__key__


class Samples:
    """A map-style dataset of samples that are not packs."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths

    def __getitem__(self, number: int) -> list[int]:
        return [number] * self.lengths[number]

    @staticmethod
    def collate(samples: Sequence[list[int]]) -> list[int]:
        return [token for sample in samples for token in sample]


def test_samples_under_a_budget_of_tokens() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 200)
    data, schedule = Samples(lengths.tolist()), RankSchedule(lengths, None, 3, budget=100)
    rows = [list(ScheduledLoader(data, schedule, rank)) for rank in range(3)]
    assert len({len(own) for own in rows}) == 1
    tokens = [token for own in rows for row in own for token in row]
    assert np.bincount(tokens).tolist() == lengths.tolist()
    assert max(len(row) for own in rows for row in own) <= 100


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_saves_its_sampler(workers: int) -> None:
    """torchdata's: it rewinds the sampler to what its workers delivered."""
    lengths = np.arange(1, 60)

    def make() -> StatefulDataLoader[Any]:
        sampler = RankSampler(RankSchedule(lengths, None, 3, budget=100), 1)
        data = Samples(lengths.tolist())
        return StatefulDataLoader(
            data,
            batch_sampler=sampler,
            collate_fn=data.collate,
            num_workers=workers,
        )

    loader = make()
    states, rows = [loader.state_dict()], []
    for row in loader:
        rows.append(row)
        states.append(loader.state_dict())
    assert len(rows) == 6
    for step in range(0, len(rows), 1 if workers == 0 else 2):
        restored = make()
        restored.load_state_dict(states[step])
        assert list(restored) == rows[step:], step


def end_process(samples: Any) -> None:
    os._exit(3)


def test_a_worker_that_dies_is_an_error(texts: PackedFolder) -> None:
    schedule = RankSchedule(np.ones(NUM_PACKS, np.int64))
    loader = ScheduledLoader(texts, schedule, 0, end_process, num_workers=1)
    with pytest.raises(RuntimeError, match="worker"):
        next(iter(loader))


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
    path = tmp_path / "blend.yaml"
    path.write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n"
        "    blend_epochized:\n"
        f"      - {{path: {outputs / 'bmr'}, repetitions: 2}}\n"
        f"      - {{path: {outputs / 'captioning'}, subset: {{range: [1, 3]}}}}\n"
    )
    folder = PackedFolder(path)
    tokens, cost = pack_costs(folder)
    assert tokens.tolist() == tokens_of(folder)
    captions = [pack.subflavors["offline_packing"] == "captioning" for pack in folder]
    own_cost = pack_costs(PackedFolder(outputs / "captioning"))[1]
    assert cost[captions].tolist() == own_cost[1:3].tolist()


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
