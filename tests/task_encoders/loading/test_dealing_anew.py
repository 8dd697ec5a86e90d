"""Ranks and workers change while training: what is left of an epoch is dealt anew, exactly."""

import collections
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from megatron.energon import WorkerConfig

from launch.data.loader_state import from_plain, to_plain
from task_encoders.loading.packed_dataset import get_packed_loader, get_packed_train_dataset
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.settings import PackingSettings
from tests.helpers.legacy_packs import text_folder

NUM_PACKS = 12
#: Ranks, loader processes of each, and steps of one micro batch per rank.
Leg = tuple[int, int, int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_folder(tmp_path_factory.mktemp("texts") / "packs", NUM_PACKS)


@pytest.fixture(scope="module")
def encoder() -> PackedTaskEncoder:
    return PackedTaskEncoder(seq_length=64, settings=PackingSettings(packed=True, bmr=True))


def train(path: Path, encoder: PackedTaskEncoder, legs: Sequence[Leg], **options: Any) -> Any:
    """The keys of all packs that the ranks of each leg read, step by step, from where the ranks of
    the leg before it stood; states go through the plain form of checkpoints."""
    states: list[Any] = []
    read = []
    for ranks, workers, steps in legs:
        with ExitStack() as open_loaders:
            loaders = []
            for rank in range(ranks):
                config = WorkerConfig(rank=rank, world_size=ranks, num_workers=workers)
                dataset = get_packed_train_dataset(path, encoder, worker_config=config, **options)
                loaders.append(get_packed_loader(dataset))
                open_loaders.callback(loaders[-1].close)
                if states:
                    loaders[-1].deal_anew([from_plain(state) for state in states])
            iterators = [iter(loader) for loader in loaders]
            for _ in range(steps):
                read += [key for one in iterators for row in [next(one, None)] if row
                         for key in row.__key__]  # fmt: skip
            states = [to_plain(loader.save_state_rank()) for loader in loaders]
    return read


@pytest.mark.parametrize(
    "legs",
    [
        [(2, 0, 4), (1, 0, 4), (1, 0, 5), (4, 0, 2), (1, 0, 11)],
        [(1, 0, 7), (2, 0, 7), (3, 0, 5)],  # the rest of 5, on two ranks, and on into the next
        [(3, 0, 5), (2, 0, 3), (1, 0, 3), (4, 0, 3)],  # changes in the second epoch
        [(1, 2, 5), (2, 1, 2), (1, 3, 3), (1, 0, 12)],  # other loader processes as well
        [(2, 0, 0), (1, 0, 12), (2, 0, 6)],  # nothing read yet, and an epoch that is over
    ],
)
def test_each_pack_comes_once_per_epoch(
    legs: list[Leg], folder: Path, encoder: PackedTaskEncoder
) -> None:
    read = train(folder, encoder, legs)
    assert len(read) == sum(ranks * steps for ranks, _, steps in legs)
    counts = collections.Counter(read)
    whole, rest = divmod(len(read), NUM_PACKS)
    assert len(counts) == NUM_PACKS
    assert sorted(counts.values()) == [whole] * (NUM_PACKS - rest) + [whole + 1] * rest


@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_one_pass_ends_after_every_pack(
    micro_batch_size: int, folder: Path, encoder: PackedTaskEncoder
) -> None:
    legs = [(2, 0, 2), (3, 0, 1), (1, 0, 20)]
    read = train(folder, encoder, legs, repeat=False, micro_batch_size=micro_batch_size)
    assert len(read) == len(set(read)) == NUM_PACKS


@pytest.mark.parametrize("kind", ["blend", "blend_epochized"])
def test_the_datasets_of_a_blend_are_dealt_each(
    kind: str, folder: Path, encoder: PackedTaskEncoder, tmp_path: Path
) -> None:
    other = text_folder(tmp_path / "other", 6, first=100)
    weights = {"weight": 1.0} if kind == "blend" else {"repetitions": 2}
    blend = {
        "__module__": "megatron.energon",
        "__class__": "MetadatasetV2",
        "splits": {"train": {kind: [{"path": str(p), **weights} for p in (folder, other)]}},
    }
    path = tmp_path / "blend.yaml"
    path.write_text(yaml.safe_dump(blend))
    legs = [(2, 0, 4), (1, 0, 9), (3, 0, 2), (1, 0, 40)]
    counts = collections.Counter(train(path, encoder, legs, repeat=kind == "blend"))
    assert len(counts) == NUM_PACKS + 6
    for own in (
        {n for key, n in counts.items() if (int(key.rpartition("/")[2]) < 100) is here}
        for here in (True, False)
    ):
        assert max(own) - min(own) <= (kind == "blend")
    if kind == "blend_epochized":
        assert set(counts.values()) == {2}
