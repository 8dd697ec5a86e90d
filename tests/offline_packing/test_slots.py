"""Packs that go over 1, 2 and 4 ranks, from a configuration to the rows of each rank."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.energon import WorkerConfig
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from launch.data.open_packs import open_as_measured
from launch.trainers.transformers_trainer import PackedTrainer
from offline_packing.errors import ConfigError
from offline_packing.online import RankSchedule, pack_costs
from offline_packing.report.report import report
from offline_packing.runs.artifacts import open_plan
from offline_packing.runs.manifest import read_manifest
from offline_packing.runs.run import Run
from offline_packing.verify.verify import verify
from task_encoders import (
    PackedTaskEncoder,
    ScheduledLoader,
    get_packed_train_dataset,
    to_packed_seq_params,
)
from task_encoders.loading.folder_shards import PackedFolderError
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.loading.slots import SlotRows
from task_encoders.packs.pack_format import cut_multiple
from task_encoders.settings import PackingSettingsError
from tests.helpers.datasets import (
    image_bytes,
    make_config,
    packed_run,
    plan_summary,
    write_json,
)

RANKS = {"ranks": 4, "tokens_per_rank": 384}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("slots")
    return packed_run(
        heavy_pairs(root / "source", 160),
        root / "packed",
        pack={"context_parallel": RANKS, "seq_length": 1536},
        output={"packs_per_shard": 8, "split": {"train": 0.8, "val": 0.2}},
    )


def heavy_pairs(root: Path, count: int) -> Path:
    """Captions of a few words to several hundred, of a small picture each, no two of them equal."""
    root.mkdir()
    rng = np.random.default_rng(0)
    words = np.exp(np.log(30) + 1.2 * rng.standard_normal(count)).clip(3, 450).astype(int)
    for i, number in enumerate(words.tolist()):
        write_json(root / f"{i:04d}.json", {"caption": "a red hat " * number})
        (root / f"{i:04d}.jpg").write_bytes(image_bytes(56 + 28 * (i % 3), 56, shade=i))
    return root


@pytest.fixture
def folder(packed: Run, monkeypatch: pytest.MonkeyPatch) -> PackedFolder:
    monkeypatch.setenv("OFFLINE_PACKED_DATA", "1")
    encoder = PackedTaskEncoder(seq_length=1536, model=packed.config.model)
    return PackedFolder(packed.workspace.root, encoder)


def test_the_longest_pack_is_what_all_ranks_hold(tmp_path: Path) -> None:
    pack = make_config(tmp_path / "s", tmp_path / "o", pack={"context_parallel": RANKS}).pack
    assert pack.slots is not None
    assert pack.seq_length == 512  # as given; by default all of it
    assert type(pack)(context_parallel=RANKS).seq_length == 4 * 384  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"pack": {"context_parallel": {"ranks": 4}}}, "write {size: 4}"),
        ({"pack": {"context_parallel": {"size": 2, "ranks": 2}}}, "write {size: 4}"),
        ({"pack": {"context_parallel": {"size": 512}}}, "multiples of 1024 > seq_length 512"),
        ({"pack": {"context_parallel": RANKS, "seq_length": 2048}}, "seq_length 2048 > 4 ranks"),
        ({"pack": {"context_parallel": RANKS, "epochs": 2}}, "cannot keep several epochs"),
        (
            {"pack": {"context_parallel": RANKS}, "output": {"layout": "indexed"}},
            "does not store over how many ranks",
        ),
    ],
)
def test_what_cannot_be_combined_is_refused(
    tmp_path: Path, sections: dict[str, dict[str, object]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(tmp_path / "source", tmp_path / "packed", **sections)


def test_artifacts_hold_the_ranks_of_packs(packed: Run) -> None:
    plan, manifest = open_plan(packed).packs, read_manifest(packed.workspace.root)
    assert plan.cp_sizes is not None
    assert set(plan.cp_sizes.tolist()) == {1, 2, 4}
    assert manifest is not None
    assert manifest.context_parallel is not None
    stored = [size for line in manifest.shards for size in line.cp_sizes]
    assert stored == plan.cp_sizes.tolist()
    assert manifest.counts.packs["val"] > 0
    ends = np.cumsum(list(manifest.counts.packs.values()))
    assert np.isin(ends, plan.slot_offsets).all()  # each split has slots of its own
    slots = len(plan.slot_offsets) - 1
    summary = plan_summary(packed)
    assert f"{slots} of 4 ranks x 384 tokens" in summary
    assert "idle in slots" in summary
    above = slots - plan.info.lower_bound
    assert f"{plan.num_packs} packs in {slots} slots, {above} above the lower" in report(packed)
    document = json.loads((packed.workspace.report / "report.json").read_bytes())
    assert document["plan"]["slots"] == slots
    assert 0 <= document["plan"]["idle_in_slots"] < 0.5


def test_verify_compares_ranks_with_the_plan(packed: Run) -> None:
    result = verify(packed, deep=True)
    assert result.ok, result.problems
    manifest = read_manifest(packed.workspace.root)
    assert manifest is not None
    first = manifest.shards[0]
    other = first.model_copy(update={"cp_sizes": (first.cp_sizes[-1], *first.cp_sizes[:-1], 4)})
    wrong = manifest.model_copy(update={"shards": (other, *manifest.shards[1:])})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offline_packing.verify.verify.require_manifest", lambda root: wrong)
        problems = verify(packed).problems
    assert "manifest.json does not list the planned ranks of each pack" in problems


def test_each_rank_reads_its_row_of_every_slot(folder: PackedFolder) -> None:
    rows = SlotRows(folder)
    turns = rows.in_turn(4, repeat=False)
    loaders = [ScheduledLoader(rows, turns, rank) for rank in range(4)]
    keys: list[str] = []
    for slot in zip(*loaders, strict=True):
        rank = 0
        while rank < 4:
            row = slot[rank]
            size = row.local_cp_size
            assert rank % size == 0
            assert {tuple(one.__key__) for one in slot[rank : rank + size]} == {tuple(row.__key__)}
            assert not (row.cu_lengths % cut_multiple(size)).any()
            assert row.tokens.shape[1] <= size * 384
            params = to_packed_seq_params(row)
            assert params.local_cp_size == size
            assert torch.equal(params.cu_seqlens_q_padded, row.cu_lengths.flatten())
            keys += row.sub_sample_keys
            rank += size
    assert sorted(keys) == sorted(set(keys))
    expected = [key for pack in folder for key in folder.row(pack.number).sub_sample_keys]
    assert sorted(keys) == sorted(expected)


def test_slots_of_another_number_of_ranks_are_refused(folder: PackedFolder) -> None:
    with pytest.raises(PackedFolderError, match=r"slots are for 4 ranks, and there are 6; train"):
        SlotRows(folder).in_turn(6)


def test_packs_of_different_ranks_share_no_row(folder: PackedFolder) -> None:
    sizes, encoder = SlotRows(folder).slots.cp_sizes.tolist(), folder.task_encoder
    assert encoder is not None
    one, more = sizes.index(1), sizes.index(4)
    with pytest.raises(ValueError, match="different numbers of ranks"):
        encoder.batch([folder.row(one), folder.row(more)])


def test_readers_without_slots_refuse_them_by_name(
    packed: Run, folder: PackedFolder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    root, encoder = packed.workspace.root, folder.task_encoder
    assert encoder is not None
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    with pytest.raises(PackingSettingsError, match="in slots, and Energon deals packs one by one"):
        get_packed_train_dataset(root, encoder, worker_config=config)
    with pytest.raises(PackingSettingsError, match="TRL trains each pack on one rank"):
        open_as_measured(root, "TRL")
    with pytest.raises(PackingSettingsError, match="PackedTrainer trains each pack on one rank"):
        PackedTrainer(args=TrainingArguments(root / "out", use_cpu=True), train_dataset=folder)
    scheduled = ScheduledLoader(folder, RankSchedule(*pack_costs(folder), num_ranks=2), rank=0)
    for loader in (DataLoader(folder, collate_fn=folder.collate), scheduled):  # type: ignore[arg-type]
        with pytest.raises(PackingSettingsError, match="a batch of a PackedFolder is for one rank"):
            next(iter(loader))  # type: ignore[call-overload]
