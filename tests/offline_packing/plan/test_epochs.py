"""pack.epochs: every epoch has its own packs of the same samples, in which hardly two of them meet
again, and the loader follows."""

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from megatron.energon import WorkerConfig

from launch.data.packed_data import read_packed_data
from offline_packing import plan_packs
from offline_packing.errors import ConfigError
from offline_packing.measure.measure import measure
from offline_packing.plan.plan import join_plans, plan_epochs
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.runs.artifacts import open_plan
from offline_packing.runs.run import Run
from offline_packing.verify.verify import verify
from task_encoders.loading.packed_dataset import (
    PackedLoader,
    get_packed_loader,
    get_packed_train_dataset,
)
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.settings import PackingSettings
from tests.helpers.datasets import (
    captioning_pairs,
    make_run,
    pack_all,
    packed_run,
    plan_index,
    plan_summary,
)

EPOCHS = 3
COUNT = 96


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("epochs")
    data = captioning_pairs(folder / "data", COUNT)
    source = {"format": "pairs", "path": str(data), "task": "captioning"}
    return packed_run(
        [{**source, "repeat": 1}],
        folder / "out",
        pack={"epochs": EPOCHS, "seq_length": 256},
        output={"layout": "references", "split": {"train": 0.8, "val": 0.2}, "packs_per_shard": 7},
    )


def make_loader(run: Run, num_workers: int, state: Any = None, **options: Any) -> PackedLoader:
    settings = PackingSettings(packed=True)
    encoder = PackedTaskEncoder(seq_length=256, model=run.config.model, settings=settings)
    config = WorkerConfig(rank=0, world_size=1, num_workers=num_workers)
    dataset = get_packed_train_dataset(run.workspace.root, encoder, worker_config=config, **options)
    loader = get_packed_loader(dataset)
    loader.restore_state_rank(state)
    return loader


def keys_of(batches: Any) -> list[tuple[str, ...]]:
    return [tuple(batch.sub_sample_keys) for batch in batches]


def samples_of(run: Run, split: str) -> list[list[str]]:
    lines = (run.workspace.root / f"{split}.jsonl").read_bytes().splitlines()
    return [orjson.loads(line)["pack"]["meta"]["keys"] for line in lines]


def test_each_epoch_has_every_sample_once(packed: Run) -> None:
    plan = open_plan(packed).packs
    manifest = orjson.loads(packed.workspace.manifest.read_bytes())
    assert manifest["epochs"] == {"train": plan.info.epochs}
    packs, val = samples_of(packed, "train"), samples_of(packed, "val")
    assert len(packs) == sum(plan.info.epochs) == EPOCHS * plan.info.epochs[0]
    ends = [0, *itertools.accumulate(plan.info.epochs)]
    epochs = [packs[start:end] for start, end in itertools.pairwise(ends)]
    keys = [sorted(itertools.chain(*epoch)) for epoch in epochs]
    assert keys[0] == keys[1] == keys[2]
    assert len(set(keys[0])) == len(keys[0])
    held_out = sorted(itertools.chain(*val))
    assert sorted(keys[0] + held_out) == sorted({*keys[0], *held_out})
    assert len(keys[0]) + len(held_out) == COUNT
    assert epochs[0] != epochs[1] != epochs[2]
    assert verify(packed, deep=True).problems == []
    again = f"{plan.pairs_again():.2%} of the pairs of samples in a pack meet again in the next"
    assert f"epochs                  3, all counted below; {again}" in plan_summary(packed)
    assert read_packed_data(packed.workspace.root).num_packs == plan.info.epochs[0]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_loader_moves_from_one_to_the_next(packed: Run, num_workers: int) -> None:
    expected = Counter(key for pack in samples_of(packed, "train") for key in pack)
    assert set(expected.values()) == {EPOCHS}
    loader = make_loader(packed, num_workers, repeat=False)
    passes = [keys_of(loader) for _ in range(EPOCHS + 1)]
    PackedLoader.close(loader)
    for one in passes:
        assert Counter(itertools.chain(*one)) == dict.fromkeys(expected, 1)
    assert len({frozenset(one) for one in passes}) == EPOCHS
    assert set(passes[0]) == set(passes[EPOCHS])  # the first again


@pytest.mark.parametrize("num_workers", [0, 2])
def test_restored_at_each_step_around_the_edge(packed: Run, num_workers: int) -> None:
    edge = open_plan(packed).packs.info.epochs[0]
    loader = make_loader(packed, num_workers)
    batches, keys, states = iter(loader), [], []
    for step in range(edge + 8):
        keys += keys_of([next(batches)])
        if edge - 5 <= step < edge + 5:
            states.append((step, loader.save_state_rank()))
    PackedLoader.close(loader)
    assert len(states) == 10
    for step, state in states[:: 1 if num_workers == 0 else 6]:
        again = make_loader(packed, num_workers, state)
        tail = keys_of(itertools.islice(iter(again), len(keys) - step - 1))
        PackedLoader.close(again)
        assert tail == keys[step + 1 :]


@pytest.mark.parametrize(("num_workers", "is_warned"), [(1, False), (5, True)])
def test_packs_of_an_epoch_that_do_not_divide_evenly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_workers: int, is_warned: bool
) -> None:
    data = captioning_pairs(tmp_path / "data", 24)
    order = {"num_ranks": 1, "num_workers": num_workers}
    pack = {"epochs": 5, "order": order}
    run = make_run(data, tmp_path / "out", pack=pack, output={"layout": "references"})
    measure(run)
    (count, *_) = plan_index(run).packs.info.epochs
    assert count % 5  # or the test says nothing: five epochs divide evenly
    assert (f"plan: {count} packs of split train do not divide evenly" in caplog.text) is is_warned


def test_copies_are_numbered_within_an_epoch(tmp_path: Path) -> None:
    data = captioning_pairs(tmp_path / "data", 12)
    source = {"format": "pairs", "path": str(data), "task": "captioning", "repeat": 2}
    run = make_run(source, tmp_path / "out", pack={"epochs": 2}, output={"layout": "references"})
    counts = pack_all(run).counts
    assert counts.packed == counts.samples == 48
    assert verify(run, deep=True).problems == []
    found = Counter(key for pack in samples_of(run, "train") for key in pack)
    assert len(found) == 24
    assert set(found.values()) == {2}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"output": {"layout": "energon"}}, r"pack\.epochs=2 .* would copy all data for each"),
        ({"output": {"layout": "indexed"}}, r"pack\.epochs=2 .* would copy all data for each"),
        (
            {"pack": {"epochs": 2, "strategy": "sequential"}},
            "'sequential' cannot keep several epochs",
        ),
        (
            {"pack": {"epochs": 2, "assignment": "locality"}},
            "locality cannot keep several epochs",
        ),
    ],
)
def test_what_does_not_go_together(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_run(tmp_path, tmp_path.parent / "out", **({"pack": {"epochs": 2}} | sections))


SEQ_LENGTH = 8192


def draw(count: int, seed: int = 0) -> np.ndarray:
    lengths = np.random.default_rng(seed).lognormal(6.2, 0.7, count)
    return np.clip(lengths, 20, SEQ_LENGTH).astype(np.int32)


def pairs(plan: PackPlan) -> set[tuple[int, int]]:
    """All samples that share a pack."""
    return {pair for pack in plan for pair in itertools.combinations(sorted(pack.tolist()), 2)}


def test_pairs_do_not_meet_again() -> None:
    lengths = draw(6000)
    one_plan = plan_packs(lengths, SEQ_LENGTH, seed=0)
    plans = plan_epochs(3, lengths, seq_length=SEQ_LENGTH, seed=0)
    for plan in plans:
        assert np.array_equal(np.sort(plan.sample_ids), np.arange(len(lengths)))
        assert max(int(lengths[pack].sum()) for pack in plan) <= SEQ_LENGTH
        assert plan.num_packs <= one_plan.num_packs
    shares = [len(pairs(a) & pairs(b)) / len(pairs(b)) for a, b in itertools.pairwise(plans)]
    assert max(shares) < 0.02
    assert join_plans({"": plans}).pairs_again() == pytest.approx(np.mean(shares), rel=0.01)
    # which another seed alone does not do
    same = plan_packs(lengths, SEQ_LENGTH, seed=1)
    assert len(pairs(one_plan) & pairs(same)) > 0.1 * len(pairs(same))


def test_pairs_of_copies_are_counted() -> None:
    """Packs of two samples, each used twice: a pair that met twice counts twice."""
    lengths, copy_of = np.full(8, 40), np.arange(8) // 2
    plans = plan_epochs(2, lengths, seq_length=80, seed=0, copy_of=copy_of)
    plan = join_plans({"": [plan.of(copy_of) for plan in plans]})
    before, now = (
        [{*pack.tolist()} for pack in packs] for packs in (list(plan)[:4], list(plan)[4:])
    )
    assert plan.pairs_again() == sum(before.count(pack) for pack in now) / 4 > 0


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_samples": 16},
        {"pad_multiple": 64},
        {"homogeneous": True},
        {"copy_of": np.arange(2000) // 2},
        {"assignment": ["shuffle", "balance"]},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_limits_are_kept(arguments: dict[str, Any]) -> None:
    lengths, kinds = draw(2000), np.arange(2000) % 2
    patches = np.random.default_rng(1).integers(0, 2000, 2000)
    if "homogeneous" in arguments:
        arguments = {**arguments, "groups": kinds}
    if "assignment" in arguments:
        arguments = {**arguments, "balance_by": patches}
    else:
        arguments = {**arguments, "budgets": {"patches": (patches, 20_000)}}
    plans = plan_epochs(2, lengths, seq_length=SEQ_LENGTH, seed=0, **arguments)
    assert abs(plans[0].num_packs - plans[1].num_packs) <= 1
    assert join_plans({"": plans}).pairs_again() < 0.03
    multiple = arguments.get("pad_multiple", 1)
    for pack in plans[1]:
        assert (-(-lengths[pack] // multiple) * multiple).sum() <= SEQ_LENGTH
        assert patches[pack].sum() <= 20_000 or "budgets" not in arguments
        assert len(pack) <= arguments.get("max_samples", 2000)
        assert "homogeneous" not in arguments or len(set(kinds[pack].tolist())) == 1
        assert "copy_of" not in arguments or len(set((pack // 2).tolist())) == len(pack)
    assert np.array_equal(np.sort(plans[1].sample_ids), np.arange(2000))
