"""PackPlan on disk: round trip, interruption, damage."""

import numpy as np
import pytest

from offline_packing import plan_packs
from offline_packing.planner.pack_plan import PackPlan, PlanInfo


def make_plan() -> PackPlan:
    info = PlanInfo(
        seq_length=10,
        strategy="auto",
        seed=7,
        pad_multiple=1,
        num_tokens=18,
        lower_bound=2,
        reason_names=("empty", "over_seq_length"),
        settings={"shuffle": True},
    )
    return PackPlan(
        np.array([4, 0, 2, 1], np.int32),
        np.array([0, 2, 4], np.int64),
        np.array([3], np.int32),
        np.array([1], np.uint8),
        info,
    )


def test_round_trip(tmp_path) -> None:
    plan = make_plan()
    plan.save(tmp_path / "plan")
    loaded = PackPlan.load(tmp_path / "plan")
    assert loaded.info == plan.info
    assert loaded.statistics() == plan.statistics()
    for name in ("sample_ids", "pack_offsets", "set_aside_ids", "set_aside_reasons"):
        before, after = getattr(plan, name), getattr(loaded, name)
        assert before.dtype == after.dtype
        assert before.tolist() == after.tolist()
    assert isinstance(loaded.sample_ids, np.memmap)


def test_interrupted_save_is_not_loadable(tmp_path, monkeypatch) -> None:
    plan = make_plan()
    plan.save(tmp_path)

    def fail(*args, **kwargs) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(np.lib.format, "write_array_header_1_0", fail)
    with pytest.raises(OSError, match="disk full"):
        plan.save(tmp_path)
    with pytest.raises(FileNotFoundError, match="run the plan stage again"):
        PackPlan.load(tmp_path)


def test_damaged_or_foreign_plan_is_refused(tmp_path) -> None:
    make_plan().save(tmp_path)
    np.save(tmp_path / "sample_ids.npy", np.arange(3))
    with pytest.raises(ValueError, match=r"sample_ids\.npy has shape"):
        PackPlan.load(tmp_path)
    text = (tmp_path / "plan.json").read_text()
    text = text.replace('"format_version": 1', '"format_version": 99')
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ValueError, match="format_version 99"):
        PackPlan.load(tmp_path)


def test_a_plan_is_a_sequence_of_packs() -> None:
    plan = plan_packs([5, 4, 3, 8, 20], 8)
    assert len(plan) == plan.num_packs == 3
    assert [pack.tolist() for pack in plan] == [plan.pack(i).tolist() for i in range(3)]
    assert repr(plan) == (
        "PackPlan(3 packs of 8 tokens, 4 samples, 1 set aside, fill 83.33%, gap 0.000%)"
    )
    assert bool(plan)
