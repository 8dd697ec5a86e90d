"""Training through transformers as a command: that it trains and saves, and what it refuses."""

import os
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    LlavaForConditionalGeneration,
    Qwen2VLForConditionalGeneration,
)

from launch.train_transformers import main
from task_encoders.families import build_sample_encoder
from tests.helpers.datasets import captioning_pairs, make_run, pack_all
from tests.helpers.legacy_packs import legacy_vqa_folder
from tests.helpers.tiny_families import encoder_options, save_tokenizer, tiny_model


def test_the_example_trains_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLINE_PACKED_DATA", "1")
    monkeypatch.setenv("OFFLINE_PACKING_VQA", "1")
    folder = legacy_vqa_folder(tmp_path / "vqa")
    arguments = [str(folder), str(tmp_path / "checkpoint"), "--steps", "2"]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "config.json" in os.listdir(tmp_path / "checkpoint")
    Qwen2VLForConditionalGeneration.from_pretrained(tmp_path / "checkpoint")
    assert "random weights; --model FOLDER trains a checkpoint" in result.output
    assert "--steps 2: 0.33 times all 12 packs" in result.output
    again = CliRunner().invoke(main, arguments)
    assert "checkpoint holds a model already; give OUTPUT another name" in again.output
    assert CliRunner().invoke(main, [*arguments, "--learning-rate", "1e5"]).exit_code == 2


def packed_folder(family: str, root: Path, layout: str = "energon") -> tuple[Path, Path]:
    """Packed captions, measured with a tokenizer of the family, and the tokenizer's folder."""
    save_tokenizer(family, root / "tokenizer")
    source = str(captioning_pairs(root / "source", 12))
    run = make_run(
        {"format": "pairs", "path": source, "task": "captioning"},
        root / "packed",
        model={"family": family, "processor": str(root / "tokenizer"), "max_pixels": None}
        | encoder_options(family),
        pack={"seq_length": 512},
        output={"layout": layout},
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


def test_packs_as_token_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLINE_PACKED_DATA", "1")
    packed, _ = packed_folder("qwen2_vl", tmp_path, "indexed")
    arguments = [str(packed / "packed_seq_dataset"), str(tmp_path / "trained"), "--steps", "1"]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "trained" / "model.safetensors").is_file()


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
