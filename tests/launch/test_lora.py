"""Adapters trained on packs, through transformers and peft."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from launch.model.config import LoraOptions, TransformersModelConfig
from launch.model.transformers_model import build_transformers_model
from tests.helpers.packed_runs import losses
from tests.helpers.parity import token_losses_alone
from tests.helpers.peers import open_packs
from tests.helpers.rank_processes import run_ranks
from tests.helpers.transformers_runs import (
    Case,
    assert_equal_runs,
    command,
    run_here,
    stop,
    stop_here,
    train,
    weights,
)

pytestmark = pytest.mark.usefixtures("bmr_environment")


def adapters(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "lora" / "adapter_model.safetensors")


def test_adapters_learn_as_on_the_samples_alone(case: Case, tmp_path: Path) -> None:
    """The same steps of the same samples through transformers, peft and torch's AdamW."""
    folder, output = case("qwen2_5_vl"), tmp_path / "run"
    options = ["model.lora.rank=4", "train.iterations=3", "batch.global_batch_packs=2"]
    options += ["schedule.decay=constant", "schedule.warmup=0", "optimizer.weight_decay=0"]
    train(command(folder, output, *options, "--lora", family="qwen2_5_vl"))
    trained = adapters(output)
    expected, merged = _adapters_of_samples(folder, num_steps=3, packs_per_step=2)
    assert trained.keys() == expected.keys()
    assert len(trained) == 2 * 7 * 2  # of two layers
    assert max(float((trained[n] - expected[n]).abs().max()) for n in trained) < 1e-5
    assert sum(float(expected[name].abs().sum()) for name in expected if "lora_B" in name) > 0.1
    exported = AutoModelForImageTextToText.from_pretrained(output / "hf").state_dict()
    assert max(float((exported[n] - merged[n]).abs().max()) for n in merged) < 1e-5


def _adapters_of_samples(
    folder: Path, num_steps: int, packs_per_step: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Adapters, and all weights with these merged, after steps on samples one by one."""
    config = TransformersModelConfig(
        family="qwen2_5_vl", checkpoint=folder / "model", lora=LoraOptions(rank=4)
    )
    model = build_transformers_model(config, device=torch.device("cpu")).model
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0)
    packs = open_packs(folder / "packed")
    for step in range(num_steps):
        first = step * packs_per_step
        numbers = range(first, first + packs_per_step)
        torch.cat([token_losses_alone(model, packs, n) for n in numbers]).mean().backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        adamw.step()
        adamw.zero_grad()
    return get_peft_model_state_dict(model), model.merge_and_unload().state_dict()


def test_a_stopped_run_of_adapters_goes_on(
    case: Case, undisturbed: Callable[..., Path], tmp_path: Path
) -> None:
    """With the dropout of an undisturbed run; other adapters are refused."""
    make = partial(command, case("qwen2_vl"))
    options = ["--lora", "model.lora.dropout=0.2"]
    whole = undisturbed("qwen2_vl", *options)
    stopped = make(tmp_path / "stopped", *options)
    stop(stopped, "SIGTERM", 3)
    for other in (["model.lora.rank=8"], ["model.lora.alpha=16"], None):
        asked = [*stopped, *other] if other else make(tmp_path / "stopped")
        assert "model.lora must be the same to resume" in train(asked, 1)
    asked = [*stopped, "model.fsdp=true"]
    assert "model.fsdp must be the same to resume: restore it" in train(asked, 1)
    train(stopped)
    assert_equal_runs(whole, tmp_path / "stopped")
    ours, theirs = adapters(whole), adapters(tmp_path / "stopped")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.exhaustive
def test_sharded_adapters(case: Case, tmp_path: Path) -> None:
    """On two ranks as on one; stopped there, they go on to the last bit."""
    make = partial(command, case("qwen3_5"), family="qwen3_5")
    options = ["model.lora={}", "schedule.learning_rate=1e-4"]
    train(make(tmp_path / "one", *options))
    sharded = make(tmp_path / "two", *options, "model.fsdp=true")
    assert run_ranks(2, tmp_path / "ranks", run_here, sharded) == [0, 0]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    ours, theirs = adapters(tmp_path / "one"), adapters(tmp_path / "two")
    assert ours.keys() == theirs.keys()
    assert max(float((ours[n] - theirs[n]).abs().max()) for n in ours) < 1e-5
    merged, expected = weights(tmp_path / "two"), weights(tmp_path / "one")
    assert max(float((merged[n] - expected[n]).abs().max()) for n in expected) < 1e-5
    stopped = make(tmp_path / "stopped", *options, "model.fsdp=true")
    assert run_ranks(2, tmp_path / "a", stop_here, stopped) == [143, 143]
    assert run_ranks(2, tmp_path / "b", run_here, stopped) == [0, 0]
    assert_equal_runs(tmp_path / "two", tmp_path / "stopped")
