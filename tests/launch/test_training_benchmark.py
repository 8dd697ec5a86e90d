"""The three forms in which benchmark_training.py gives the same samples to a model."""

import pytest

from task_encoders.energon_samples import PackedBatch
from tests.helpers.packed_runs import SEQ_LENGTH, bmr_folder
from tests.helpers.tools import benchmark

PADDED_BATCH = 3


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[PackedBatch]]:
    loaders = benchmark("training_loaders")
    packed = bmr_folder(tmp_path_factory.mktemp("bmr"))
    unpacked = tmp_path_factory.mktemp("unpacked")
    loaders.write_unpacked(packed, unpacked)
    return {
        mode: list(
            loaders.build_loader(
                mode,
                packed=packed,
                unpacked=unpacked,
                num_workers=0,
                padded_batch_size=PADDED_BATCH,
                buffer_size=20,
            )
        )
        for mode in loaders.MODES
    }


def test_all_forms_hold_the_same_samples(rows: dict[str, list[PackedBatch]]) -> None:
    keys = {
        mode: sorted(key for batch in batches for key in batch.sub_sample_keys)
        for mode, batches in rows.items()
    }
    tokens = {
        mode: sum(int((~batch.attn_mask).sum()) for batch in batches)
        for mode, batches in rows.items()
    }
    assert len(keys["offline"]) > 20
    assert keys["padded"] == keys["online"] == keys["offline"]
    assert tokens["padded"] == tokens["online"] == tokens["offline"]


def test_a_padded_row_is_as_wide_as_its_longest_sample(rows: dict[str, list[PackedBatch]]) -> None:
    padding = 0
    for batch in rows["padded"]:
        widths = batch.cu_lengths[0].diff()
        real = [int((~part).sum()) for part in batch.attn_mask[0].split(widths.tolist())]
        assert len(real) <= PADDED_BATCH
        assert set(widths.tolist()) == {max(real)}
        assert batch.position_ids.shape == (3, 1, batch.tokens.shape[1])
        padding += int(batch.attn_mask.sum())
    assert padding > 0


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_packed_rows_are_not_padded(mode: str, rows: dict[str, list[PackedBatch]]) -> None:
    assert not any(batch.attn_mask.any() for batch in rows[mode])
    assert max(batch.tokens.shape[1] for batch in rows[mode]) <= SEQ_LENGTH
    assert len(rows["offline"]) <= len(rows["online"])


def test_the_table_compares_with_padding() -> None:
    report = benchmark("benchmark_training")
    step = {"seconds": 2.0, "wait": 0.1, "samples": 4, "tokens": 50, "positions": 100, "flops": 1e9}
    padded = report.summarize([step] * 3, 1e9) | {"memory_gib": 1.0}
    offline = report.summarize([{**step, "seconds": 1.0, "positions": 50}] * 3, 1e9)
    assert padded["mfu"] == pytest.approx(0.5)
    assert padded["padding"] == pytest.approx(0.5)
    table = report.render_table({"padded": padded, "offline": offline | {"memory_gib": 0.5}})
    assert "| offline | 4.00 | 2.00 | 2.00 |" in table
    assert "| NeVA, TP 8 | 89.16 | 1.40 |" in table
    assert "| NeVA, TP 4, PP 2 | 93.84 | 1.47 |" in table
