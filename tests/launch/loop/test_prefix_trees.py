"""Training on packs whose samples share prefixes: as on the same packs without; and what is refused
before weights are read."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from launch.config import LaunchConfig
from launch.data.broadcast import EvenRows, broadcast_batch
from launch.loop import setup
from launch.loop.metrics import read_metrics
from launch.loop.parallel import initialize_parallel
from launch.model import packed_attention
from launch.train_transformers import TransformersConfig
from launch.trainers.shared import open_as_measured
from offline_packing.errors import StageError
from task_encoders.energon_samples import PackedBatch
from task_encoders.families import FAMILIES
from task_encoders.settings import PackingSettingsError
from tests.helpers.packed_runs import make_config, step_lines, trained
from tests.helpers.rank_processes import run_ranks
from tests.helpers.shared_media import few_trees, tree_folders
from tests.helpers.tiny_families import tiny_model
from tests.helpers.transformers_runs import command
from tests.helpers.transformers_runs import train as train_transformers
from tests.world import World

pytestmark = pytest.mark.usefixtures("bmr_environment")


@pytest.fixture
def folders(world: World) -> tuple[Path, Path]:
    """Packs, and packs of the same samples as trees."""
    return tree_folders(world)


def test_steps_are_those_of_the_samples_without_trees(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """Losses, denominators, gradients and weights of a step of all samples; micro batches of two
    packs, and validation."""
    sections: dict[str, Any] = {
        "train": {"iterations": 1, "normalization": "sqrt"},
        "batch": {"global_batch_packs": 100},
        "data": {"micro_batch_size": 2, "repeat": False},
        "validation": {"every": 1},
    }
    outputs = [tmp_path / folder.name for folder in folders]
    models = [
        trained(make_config(*paths, **sections)).model
        for paths in zip(folders, outputs, strict=True)
    ]
    (other,), (own,) = map(step_lines, outputs)
    for name in ("loss", "grad_norm"):
        assert own[name] == pytest.approx(other[name], rel=1e-4), name
    assert own["sub_samples"] == other["sub_samples"]
    assert own["tokens"] < 0.7 * other["tokens"]
    assert own["packs"] < other["packs"]
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    (whole,), (shared,) = (
        [line["validation_loss"] for line in read_metrics(path) if "validation_loss" in line]
        for path in (output / "metrics.jsonl" for output in outputs)
    )
    assert shared == pytest.approx(whole, rel=1e-5)


#: A model whose angles depend on a sample's length.
ANGLES = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6}
SHORT = {"max_position_embeddings": 64, "rope_parameters": ANGLES}
DYNAMIC: dict[str, Any] = {"family": "internvl3", "text": SHORT}


@pytest.mark.parametrize(
    ("kind", "sections", "message"),
    [
        (LaunchConfig, {"parallel": {"context": 2}}, r"parallel.context=2: .* prefixes; set 1"),
        (LaunchConfig, {"data": {"cross_sample_attention": True}}, "set False, or pack without"),
        (LaunchConfig, {"model": DYNAMIC}, "angles of all others with its prefix; pack with"),
        (TransformersConfig, {"model": DYNAMIC}, "angles of all others with its prefix"),
        (TransformersConfig, {"model": {"attention": "eager"}}, "model.attention=eager: .*auto"),
        (LaunchConfig, {"data": {"online": {"seq_length": 512}}}, "prefixes; .* without data.onl"),
    ],
)
def test_what_knows_no_trees_is_refused_before_weights_are_read(
    kind: Any,
    sections: dict[str, Any],
    message: str,
    folders: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(setup, "build_run_model", None)
    content: dict[str, dict[str, Any]] = {
        "data": {"path": str(folders[1]), "num_workers": 0},
        "batch": {"global_batch_packs": 1},
        "output": {"path": str(tmp_path)},
    }
    content |= {name: content.get(name, {}) | own for name, own in sections.items()}
    with pytest.raises((StageError, ValueError), match=message):
        setup.build_trainer(kind.model_validate(content), initialize_parallel(1))


def trees_of(folder: Path) -> PackedBatch:
    return open_as_measured(folder, "any trainer", trees=True)[0].batch([0, 1])


def _even(folder: Path) -> list[list[int]]:
    """Parents and boundaries of a row beside a rank that has a video; and parents of one that was
    sent."""
    device = initialize_parallel(1)
    own = trees_of(folder)
    config = tiny_model("qwen2_vl", {"image_token_id": 1, "video_token_id": 2}).config
    other = replace(own, video_grid_thw=own.image_grid_thw[:1])
    rank, group = distributed.get_rank(), distributed.group.WORLD
    even: Any = EvenRows(FAMILIES["qwen2_vl"], config, device)(other if rank else own)
    sent: Any = broadcast_batch(own if rank == 0 else None, device, group)
    return [one[0].tolist() for one in (even.parents, even.cu_lengths, sent.parents)]


def test_rows_that_are_padded_or_sent_keep_their_trees(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    own = trees_of(folders[1])
    with pytest.raises(PackingSettingsError, match=f"{folders[1]} holds samples that share prefix"):
        open_as_measured(folders[1], "any trainer")
    assert (own.parents >= 0).sum() > 10
    (padded, boundaries, _), (*_, sent) = run_ranks(2, tmp_path, _even, folders[1])
    assert padded == [*own.parents[0].tolist(), -1]
    assert boundaries[:-1] == own.cu_lengths[0].tolist()
    assert sent == own.parents[0].tolist()


def test_attention_computes_in_the_dtype_of_autocast(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where weights are float32, rotated queries are, too, which flash attention does not take."""
    found = set[torch.dtype]()
    kernel = packed_attention.KERNELS["sdpa"]

    def recorded(*tensors: Any) -> torch.Tensor:
        found.update(one.dtype for one in tensors[:3])
        return kernel(*tensors)

    monkeypatch.setattr(packed_attention, "KERNELS", {"sdpa": recorded})
    checkpoint, trees, _ = few_trees(world, "qwen2_vl")
    options = [f"model.checkpoint={checkpoint}", f"data.path={trees}", "train.iterations=1"]
    train_transformers(command(tmp_path, tmp_path / "run", *options, "model.dtype=bfloat16"))
    assert found == {torch.bfloat16}
    assert "prefix_trees" not in (tmp_path / "run" / "hf" / "config.json").read_text()
