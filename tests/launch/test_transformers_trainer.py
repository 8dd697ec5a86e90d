"""The transformers example: the collator's arguments, Trainer's loss, and that it trains."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.nn import functional as F
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    LlavaForConditionalGeneration,
    Qwen2VLForConditionalGeneration,
    TrainingArguments,
)

from launch.model_config import config_of_preset, transformers_classes
from launch.transformers_trainer import PackedRows, PackedTrainer, collate_packed, main
from task_encoders.families import build_sample_encoder
from task_encoders.sample_encoder import IGNORE_INDEX
from tests.helpers.datasets import captioning_pairs, make_run, pack_all
from tests.helpers.legacy_packs import legacy_vqa_folder
from tests.helpers.tiny_checkpoints import (
    packed_batch,
    row_samples,
    transformers_model,
    unpacked_inputs,
)
from tests.helpers.tiny_families import encoder_options, save_tokenizer, tiny_model


def trainer(folder: Path, rows: list[Any], **options: Any) -> PackedTrainer:
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    model = transformers_model("qwen2_vl", tied=False)
    dataset = PackedRows(rows)
    return PackedTrainer(args=args, model=model, train_dataset=dataset, eval_dataset=dataset)


def test_loss_of_a_step_is_the_mean_over_all_tokens_of_the_samples_alone(tmp_path: Path) -> None:
    """Two packs with unlike numbers of labels, accumulated: each token counts the same."""
    model = transformers_model("qwen2_vl", tied=False)
    packs = [row_samples(model, "mixed"), row_samples(model, "several_images", seed=40)]
    losses = []
    with torch.no_grad():
        for sample in [sample for pack in packs for sample in pack]:
            logits = model(**unpacked_inputs(sample)).logits[0, :-1]
            labels = torch.from_numpy(sample.labels[1:])
            losses.append(F.cross_entropy(logits, labels, reduction="none")[labels >= 0])
    tokens = torch.cat(losses)
    assert len(tokens) > 80

    rows = [packed_batch(pack) for pack in packs]
    run = trainer(tmp_path, rows, max_steps=1, gradient_accumulation_steps=2, learning_rate=0.0)
    run.train()
    assert run.state.log_history[0]["loss"] == pytest.approx(float(tokens.mean()), abs=2e-4)
    weighted_by_pack = [float(torch.cat(part).mean()) for part in (losses[:5], losses[5:])]
    assert abs(sum(weighted_by_pack) / 2 - float(tokens.mean())) > 1e-3  # what else it could be


def test_evaluation_reads_the_same_rows(tmp_path: Path) -> None:
    model = transformers_model("qwen2_vl", tied=False)
    rows = [packed_batch(row_samples(model, "mixed"))]
    run = trainer(tmp_path, rows, max_steps=1, prediction_loss_only=True)
    with torch.no_grad():
        expected = float(run.model.eval()(**collate_packed(rows)).loss)
    assert run.evaluate()["eval_loss"] == pytest.approx(expected, abs=1e-5)


def test_several_rows_are_refused() -> None:
    rows = [packed_batch(row_samples(transformers_model("qwen2_vl", tied=True), "no_image"))] * 2
    with pytest.raises(ValueError, match="2 rows in a batch; set per_device_train_batch_size=1"):
        collate_packed(rows)


def test_a_process_with_several_gpus_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda _: 2))
    with pytest.raises(ValueError, match="start with torchrun --nproc-per-node 2"):
        trainer(tmp_path, [], max_steps=1)


def test_models_with_recurrent_layers_are_made_ready(tmp_path: Path) -> None:
    """Given whole, or made anew for every run."""

    def tiny_model() -> Any:
        return transformers_classes("qwen3_5").model(config_of_preset("qwen3_5", "tiny"))

    model = tiny_model()
    args = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    for given in ({"model": model}, {"model_init": tiny_model}):
        decoder = PackedTrainer(args=args, **given).model.model.language_model
        layers = decoder.layers[:3]
        assert all(vars(layer.linear_attn)["forward"].func for layer in layers)
        assert len(decoder._forward_pre_hooks) == 1


def test_collated_labels_are_counted_as_they_are_used() -> None:
    batch = packed_batch(row_samples(transformers_model("qwen2_vl", tied=True), "mixed"))
    labels = collate_packed([batch])["labels"]
    counted_by_trainer = int((labels != IGNORE_INDEX).sum())
    used_by_model = int((labels[:, 1:] != IGNORE_INDEX).sum())
    assert counted_by_trainer == used_by_model > 20


def test_the_example_trains_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLINE_PACKED_DATA", "1")
    monkeypatch.setenv("OFFLINE_PACKING_VQA", "1")
    folder = legacy_vqa_folder(tmp_path / "vqa")
    arguments = [str(folder), str(tmp_path / "checkpoint"), "--steps", "2"]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "config.json" in os.listdir(tmp_path / "checkpoint")
    Qwen2VLForConditionalGeneration.from_pretrained(tmp_path / "checkpoint")


def packed_folder(family: str, root: Path) -> tuple[Path, Path]:
    """Packed captions, measured with a tokenizer of the family, and the tokenizer's folder."""
    save_tokenizer(family, root / "tokenizer")
    source = str(captioning_pairs(root / "source", 12))
    run = make_run(
        {"format": "pairs", "path": source, "task": "captioning"},
        root / "packed",
        model={"family": family, "processor": str(root / "tokenizer"), "max_pixels": 0}
        | encoder_options(family),
        pack={"seq_length": 512},
    )
    pack_all(run)
    return root / "packed", root / "tokenizer"


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5 of experts"])
def test_a_checkpoint_of_any_family(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLINE_PACKED_DATA", "1")
    family, *experts = family.split(" of ")
    packed, checkpoint = packed_folder(family, tmp_path)
    token_ids = build_sample_encoder(family, str(checkpoint)).media_token_ids
    model = tiny_model(family, token_ids, experts=bool(experts))
    model.save_pretrained(checkpoint)
    output = tmp_path / "trained"
    arguments = [str(packed), str(output), "--model", str(checkpoint), "--steps", "1"]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    trained = AutoModelForImageTextToText.from_pretrained(output)
    assert type(trained) is type(model)
    assert len(AutoTokenizer.from_pretrained(output)) > 700
    weights = dict(trained.named_parameters())
    changed = [n for n, weight in model.named_parameters() if not torch.equal(weight, weights[n])]
    assert len(changed) > 30


def test_a_random_model_on_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Family, tokenizer and size of images are those of the packs' manifest."""
    monkeypatch.setenv("OFFLINE_PACKED_DATA", "1")
    packed, _ = packed_folder("llava_1_5", tmp_path)
    arguments = [str(packed), str(tmp_path / "trained"), "--steps", "1"]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    config = LlavaForConditionalGeneration.from_pretrained(tmp_path / "trained").config
    assert config.vision_config.image_size == 56


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--family", "llava_onevision_1_5"],
            "error: family llava_onevision_1_5 has no model in transformers; train it with its own",
        ),
        (["--model", "other"], "is a 'other_vl', of no family here; train it with its own code"),
        (["--model", "."], "error: checkpoint . has no config.json; give a folder that holds a"),
    ],
)
def test_what_cannot_be_trained_is_said_in_one_line(
    arguments: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other").mkdir()
    Path("other/config.json").write_text('{"model_type": "other_vl"}')
    Path("packs").mkdir()
    result = CliRunner().invoke(main, ["packs", "trained", *arguments])
    assert result.exit_code == 1
    assert line in result.output
    assert result.output.count("\n") == 1
