"""The three forms in which benchmark_training.py gives the same samples to a model."""

from pathlib import Path

import pytest

from task_encoders.energon_samples import PackedBatch
from tests.helpers.tools import benchmark


def test_all_forms_hold_the_same_samples(folder: Path, tmp_path: Path) -> None:
    loaders = benchmark("training_loaders")
    loaders.write_unpacked(folder, tmp_path)
    options = {"num_workers": 0, "padded_batch_size": 3, "buffer_size": 20}
    rows: dict[str, list[PackedBatch]] = {
        mode: list(loaders.build_loader(mode, packed=folder, unpacked=tmp_path, **options))
        for mode in loaders.MODES
    }
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
