"""Packs in transformers' Trainer: the collator's arguments, the loss of a step, resuming; and steps
of one kind, in trainers whose ranks take packs in turn."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, TrainingArguments

from launch.model.config import tiny_config, transformers_class
from launch.trainers.shared import warn_of_mixed_steps
from launch.trainers.transformers_trainer import PackedTrainer, UnreadPacks, collate_packed
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.packs.manifest import PackColumns
from task_encoders.samples import IGNORE_INDEX
from tests.helpers.hf_trainers import QUIET, check_resuming, packed_trainer, recorded_run
from tests.helpers.peers import open_packs, refuse_packs_of_few, small_packs, token_losses_alone
from tests.world import World


@pytest.fixture(scope="module")
def case(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint and packs for it."""
    checkpoint = world.checkpoint("qwen2_vl")
    return checkpoint, small_packs("qwen2_vl", checkpoint, tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def packs(case: tuple[Path, Path]) -> PackedFolder:
    return open_packs(case[1], pixel_transport="uint8")


@pytest.fixture(scope="module")
def model(case: tuple[Path, Path]) -> Any:
    return AutoModelForImageTextToText.from_pretrained(case[0]).eval()


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma4"])
def test_loss_of_a_step_is_the_mean_over_all_tokens_of_the_samples_alone(
    family: str, model: Any, packs: PackedFolder, world: World, tmp_path: Path
) -> None:
    """Packs of unlike numbers of labels, in several rows: each token counts the same. Also of
    Gemma, whose class says that its loss cannot divide by the labels of a step."""
    per_row = rows = 2
    if family == "gemma4":
        checkpoint, per_row = world.checkpoint(family), 1
        packs = open_packs(small_packs(family, checkpoint, tmp_path, samples=16))
        model = AutoModelForImageTextToText.from_pretrained(checkpoint).eval()
    count = per_row * rows
    refuse_packs_of_few(packs, range(count))
    with torch.no_grad():
        alone = [token_losses_alone(model, packs, number) for number in range(count)]
    options = {"max_steps": 1, "learning_rate": 0.0, "per_device_train_batch_size": per_row}
    run = packed_trainer(tmp_path, model, packs, gradient_accumulation_steps=rows, **options)
    run.train()
    expected = float(torch.cat(alone).mean())
    assert run.state.log_history[0]["loss"] == pytest.approx(expected, abs=2e-4)
    weighted_by_pack = sum(float(part.mean()) for part in alone) / count
    assert abs(weighted_by_pack - expected) > (1e-3 if family == "gemma4" else 5e-4)


def test_logits_are_made_where_there_are_labels(
    model: Any, packs: PackedFolder, tmp_path: Path
) -> None:
    """In training, and unless a loss of one's own is to see them all. Pixels are bytes until the
    inputs are prepared, which may be done twice."""
    run = packed_trainer(tmp_path, model, packs)
    collated = collate_packed([UnreadPacks(packs)[0]])
    assert collated["batch"].imgs.dtype == torch.uint8
    inputs = run._prepare_inputs(collated)
    assert run._prepare_inputs(inputs).keys() == inputs.keys() > {"pixel_values"}
    num_labels = int((inputs["labels"] != IGNORE_INDEX).sum())
    made: list[int] = []
    hook = model.lm_head.register_forward_hook(lambda *call: made.append(call[2].shape[1]))
    model.train()
    loss = run.compute_loss(model, inputs)
    run.compute_loss_func = lambda outputs, labels, num_items_in_batch: outputs.logits.sum()
    run.compute_loss(model, dict(inputs))
    run.compute_loss_func = None
    whole = run.compute_loss(model.eval(), inputs)
    hook.remove()
    num_tokens = inputs["input_ids"].shape[1]
    assert made == [num_labels + 1, num_tokens, num_tokens]
    assert 20 < num_labels < num_tokens
    assert loss.item() == pytest.approx(whole.item(), rel=1e-6)


def test_a_resumed_run_is_the_run_that_went_on(
    case: tuple[Path, Path], tmp_path: Path, bmr_environment: None
) -> None:
    packs, losses = check_resuming(tmp_path, recorded_run, packed_trainer, *case)
    assert len(packs) == len(losses) == 6


def test_several_gpus_and_smoothed_labels_are_refused(
    model: Any, packs: PackedFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainer shifts labels itself for models of text only."""
    with pytest.raises(ValueError, match="set label_smoothing_factor 0"):
        packed_trainer(tmp_path, model, packs, label_smoothing_factor=0.1)
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda _: 2))
    with pytest.raises(ValueError, match="start with torchrun --nproc-per-node 2"):
        packed_trainer(tmp_path, model, packs)


def test_models_with_recurrent_layers_are_made_ready(packs: PackedFolder, tmp_path: Path) -> None:
    """Given whole, or made anew for every run."""

    def tiny_model() -> Any:
        return transformers_class("qwen3_5")(tiny_config("qwen3_5"))

    args = TrainingArguments(output_dir=str(tmp_path), **QUIET)
    for given in ({"model": tiny_model()}, {"model_init": tiny_model}):
        trainer = PackedTrainer(args=args, train_dataset=packs, **given)
        decoder = trainer.model.model.language_model
        layers = decoder.layers[:3]
        assert all(vars(layer.linear_attn)["forward"].func for layer in layers)
        assert len(decoder._forward_pre_hooks) == 1


class Packs:
    """Stands for a folder of packs."""

    path = "out/packed"

    def __init__(self, media: list[int], uniform_ranks: int) -> None:
        self.media, self.uniform_ranks = np.array(media, np.uint8), uniform_ranks

    def __len__(self) -> int:
        return len(self.media)

    def columns(self) -> PackColumns:
        return PackColumns(self.media, np.ones(len(self)), np.ones(len(self)))


@pytest.mark.parametrize(
    ("media", "uniform", "ranks", "size", "said"),
    [
        ([1, 0, 1, 0], 0, 2, 1, "pack with pack.order={num_ranks: 2, uniform: true}"),
        ([1, 1, 1, 0, 0, 0], 3, 2, 1, "pack with pack.order={num_ranks: 2, uniform: true}"),
        ([1, 1, 0, 0, 1, 1], 2, 2, 2, "let a rank take 1 at a time"),
        ([1, 1, 0, 0], 2, 2, 2, ""),
        ([1, 1, 1, 1, 0, 0, 0, 0], 4, 2, 1, ""),
        ([1, 1, 1], 0, 2, 1, ""),
        ([1, 0, 1], 0, 1, 1, ""),
    ],
)
def test_mixed_steps_are_warned_of(
    media: list[int],
    uniform: int,
    ranks: int,
    size: int,
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_mixed_steps(Packs(media, uniform), ranks, size)
        warn_of_mixed_steps([1, 2, 3], ranks, size)  # nothing is known of their media
    assert len(caplog.messages) == bool(said)
    assert said in caplog.text
