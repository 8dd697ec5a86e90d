"""The three forms in which benchmark_training.py gives the same samples to a model."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.model.config import ModelConfig
from launch.model.megatron.model import model_outline
from launch.model.megatron.weights import published_shapes
from task_encoders.energon_samples import PackedBatch
from tests.helpers.command import benchmark, run_benchmark
from tests.helpers.shared_media import tree_folders
from tests.world import World


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


def test_what_cannot_be_measured_is_refused_before_weights_are_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*options: str) -> str:
        result = run_benchmark("benchmark_training", folder, *options)
        assert result.exit_code == 1
        return result.output

    assert "1000 steps and a warm-up take 1001 packs >" in refused("--steps", "1000")
    assert "shapes '7b' need a CUDA device" in refused("--shapes", "7b")
    report = benchmark("benchmark_training")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (80 * 2**30, 0))
    assert "139.0 GiB for weights and optimizer > 80.0 GiB" in refused("--shapes", "7b")
    report.check_fit("2b")


@pytest.mark.parametrize(("shapes", "billions"), [("2b", 2.209), ("7b", 8.291)])
def test_models_have_as_many_weights_as_the_published_ones(shapes: str, billions: float) -> None:
    """The counts are those that the checkpoints' pages on the Hugging Face hub show."""
    config = ModelConfig(**benchmark("training_shapes").SHAPES[shapes])
    count = sum(math.prod(shape) for shape in published_shapes(model_outline(config)).values())
    assert count / 1e9 == pytest.approx(billions, abs=5e-4)


def test_branches_are_samples(world: World) -> None:
    """As its process for packs with shared prefixes measures them."""
    options: dict[str, Any] = {"packed": tree_folders(world)[1], "unpacked": None}
    options |= {"num_workers": 0, "padded_batch_size": 3, "buffer_size": 20}
    report = benchmark("benchmark_training")
    found = report.run_mode("shared", "cpu", 1, options)
    assert found["steps"][0]["samples"] > 1
    table = report.render_table(dict.fromkeys(("offline", "shared"), found["summary"]))
    assert "| run | samples/s | × offline |" in table
