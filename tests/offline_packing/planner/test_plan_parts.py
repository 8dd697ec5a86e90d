"""Many-part index in, many-part plan out: complete, resumable, refused when the input changed."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offline_packing.errors import StageError
from offline_packing.planner.plan_parts import load_parts, plan_parts, read_num_tokens
from offline_packing.planner.windows import WindowOptions

OPTIONS = WindowOptions(seq_length=1000, window=100)


def parts(number: int = 4) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 1050, 250 + 10 * i).astype(np.int32) for i in range(number)]


def contents(folder) -> list[tuple[list[int], list[int], list[int]]]:
    return [
        (plan.sample_ids.tolist(), plan.pack_offsets.tolist(), plan.set_aside_ids.tolist())
        for plan in load_parts(folder)
    ]


def test_every_row_of_the_index_is_in_one_pack_or_set_aside(tmp_path):
    lengths = np.concatenate(parts())
    totals = plan_parts(parts(), tmp_path, OPTIONS, pad_multiple=8)
    plans = list(load_parts(tmp_path))
    assert len(plans) == totals["num_parts"] == 5
    packed = np.concatenate([plan.sample_ids for plan in plans])
    aside = np.concatenate([plan.set_aside_ids for plan in plans])
    assert sorted([*packed.tolist(), *aside.tolist()]) == list(range(len(lengths)))
    assert totals["num_samples"] == len(lengths)
    assert totals["num_set_aside"] == len(aside) == ((lengths == 0) | (lengths > 1000)).sum()
    padded = -(-lengths // 8) * 8
    for plan in plans:
        loads = [padded[plan.pack(i)].sum() for i in range(plan.num_packs)]
        assert max(loads) <= 1000
        assert sum(loads) == plan.info.num_tokens
    assert totals["num_packs"] == sum(plan.num_packs for plan in plans)
    assert totals["num_tokens"] == padded[packed].sum()


def test_a_killed_run_goes_on_after_the_last_complete_part(tmp_path):
    plan_parts(parts(), tmp_path / "whole", OPTIONS)

    def killed():
        yield from parts()[:2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plan_parts(killed(), tmp_path / "resumed", OPTIONS)
    with pytest.raises(FileNotFoundError, match=r"parts.json is missing"):
        list(load_parts(tmp_path / "resumed"))
    kept = (tmp_path / "resumed/part-00001/sample_ids.npy").stat().st_mtime_ns
    plan_parts(parts(), tmp_path / "resumed", OPTIONS)
    assert (tmp_path / "resumed/part-00001/sample_ids.npy").stat().st_mtime_ns == kept
    assert contents(tmp_path / "resumed") == contents(tmp_path / "whole")


def test_a_half_written_part_is_planned_again(tmp_path):
    plan_parts(parts(), tmp_path, OPTIONS)
    before = contents(tmp_path)
    (tmp_path / "part-00002/plan.json").unlink()
    (tmp_path / "part-00002/state.npz").unlink()
    plan_parts(parts(), tmp_path, OPTIONS)
    assert contents(tmp_path) == before


def test_a_changed_index_or_setting_is_refused(tmp_path):
    plan_parts(parts(), tmp_path, OPTIONS)
    changed = parts()
    changed[1][7] += 1
    with pytest.raises(StageError, match=r"part-00001 was planned from other lengths"):
        plan_parts(changed, tmp_path, OPTIONS)
    with pytest.raises(StageError, match=r"part-00000 was planned .* other settings"):
        plan_parts(parts(), tmp_path, WindowOptions(seq_length=1000, window=99))
    (tmp_path / "part-00001/plan.json").unlink()
    with pytest.raises(StageError, match=r"part-00002 was planned from other lengths"):
        plan_parts(changed, tmp_path, OPTIONS)


def test_lengths_are_read_from_parquet_part_by_part(tmp_path):
    for number, num_tokens in enumerate(parts(2)):
        table = pa.table(
            {"key": [str(i) for i in range(len(num_tokens))], "num_tokens": num_tokens}
        )
        pq.write_table(table, tmp_path / f"part-{number:05d}.parquet")
    read = list(read_num_tokens(sorted(tmp_path.glob("*.parquet"))))
    for found, written in zip(read, parts(2), strict=True):
        np.testing.assert_array_equal(found, written)


def test_an_empty_index_gives_an_empty_complete_plan(tmp_path):
    assert plan_parts([], tmp_path, OPTIONS)["num_packs"] == 0
    assert [plan.num_packs for plan in load_parts(tmp_path)] == [0]
