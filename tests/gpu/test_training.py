"""Steps of the real trainer on a GPU, in bfloat16, over packs made here."""

from pathlib import Path
from typing import Any

import pytest
import torch

from launch.config import OptimizerConfig
from launch.loop.optimizer import ShardedAdamW
from launch.loop.parallel import initialize_parallel
from task_encoders.loading.packed_folder import PackedFolder
from tests.helpers.packed_runs import (
    GPU_MODEL,
    bmr_folder,
    losses,
    make_config,
    make_trainer,
    step_lines,
)
from tests.helpers.shared_media import tree_folders
from tests.world import World


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bmr_folder(tmp_path_factory.mktemp("bmr"))


pytestmark = pytest.mark.usefixtures("bmr_environment")


def train(folder: Path, output: Path, dtype: str = "bfloat16", **sections: Any) -> list[float]:
    model = {**GPU_MODEL, "dtype": dtype, **sections.pop("model", {})}
    config = make_config(folder, output, model=model, train={"iterations": 12}, **sections)
    trainer, _, _ = make_trainer(config)
    trainer.resume()
    assert trainer.run()
    return losses(output)


def test_bfloat16_trains_as_float32(folder: Path, tmp_path: Path) -> None:
    exact = train(folder, tmp_path / "float32", "float32")
    rounded = train(folder, tmp_path / "bfloat16")
    assert rounded == pytest.approx(exact, abs=0.05)
    assert rounded[-1] < rounded[0] - 0.1
    for line in step_lines(tmp_path / "bfloat16"):
        assert line["step_seconds"] > 0


def test_recomputed_layers_give_the_same_losses(folder: Path, tmp_path: Path) -> None:
    kept = train(folder, tmp_path / "kept")
    again = train(folder, tmp_path / "again", model={"recompute": "full"})
    assert again == pytest.approx(kept, abs=0.02)


def test_a_checkpoint_goes_on(folder: Path, tmp_path: Path) -> None:
    whole = train(folder, tmp_path / "whole", checkpoint={"every": 6, "keep": 2})
    half = tmp_path / "half" / "checkpoints"
    half.mkdir(parents=True)
    (half / "iter_00000006").symlink_to(tmp_path / "whole" / "checkpoints" / "iter_00000006")
    output = tmp_path / "half"
    config = make_config(
        folder, output, model={**GPU_MODEL, "dtype": "bfloat16"}, train={"iterations": 12}
    )
    trainer, _, _ = make_trainer(config)
    trainer.resume()
    assert trainer.iteration == 6
    assert trainer.run()
    resumed = [line["loss"] for line in step_lines(output)]
    assert resumed == pytest.approx(whole[6:], abs=0.01)


def test_prefix_trees_train_as_the_samples_without(world: World, tmp_path: Path) -> None:
    """In steps of all samples."""
    alone, shared = (
        train(
            folder, tmp_path / folder.name, batch={"global_batch_packs": len(PackedFolder(folder))}
        )
        for folder in tree_folders(world)
    )
    assert shared == pytest.approx(alone, abs=0.05)


def test_the_fused_optimizer_equals_the_one_of_a_cpu(cuda: torch.device) -> None:
    weights = {}
    initialize_parallel()
    for device in (torch.device("cpu"), cuda):
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 32)
        gradients = [torch.randn(32, 64) for _ in range(5)]
        model.to(device)
        optimizer = ShardedAdamW(
            model, OptimizerConfig(weight_decay=0.1), [], torch.float32, device=device
        )
        for gradient in gradients:
            (model.weight * gradient.to(device)).sum().backward()
            optimizer.step(learning_rate=1e-2, denominator=2, max_norm=1.0)
        weights[device.type] = model.weight.detach().cpu()
    torch.testing.assert_close(weights["cuda"], weights["cpu"], rtol=1e-5, atol=1e-6)
