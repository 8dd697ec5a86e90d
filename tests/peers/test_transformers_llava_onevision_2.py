"""LLaVA-OneVision-2's own modeling file in transformers' Trainer, on packs in Energon's layout.

LLAVA_ONEVISION_2 names a checkout of EvolvingLMMs-Lab/LLaVA-OneVision-2."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from task_encoders.families import build_sample_encoder
from tests.helpers.hf_trainers import check_resuming, packed_trainer, recorded_run
from tests.helpers.peers import check_losses, small_packs
from tests.helpers.tiny_checkpoints import randomise
from tests.helpers.tiny_families import save_tokenizer
from tests.peers import Say

if not os.environ.get("LLAVA_ONEVISION_2"):
    pytest.skip("LLAVA_ONEVISION_2=DIR names no checkout of it", allow_module_level=True)
sys.path.append(str(Path(os.environ["LLAVA_ONEVISION_2"]).resolve() / "transformers_impl"))

FAMILY = "llava_onevision_2"
VERSION = f"transformers {transformers.__version__}, {FAMILY}, its modeling file"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its code, as its `save_merged` writes one. The helpers load it by its
    model type, for which transformers' Auto classes are told of the same code."""
    from llavaonevision2 import LlavaOnevision2Config, LlavaOnevision2ForConditionalGeneration

    AutoConfig.register(LlavaOnevision2Config.model_type, LlavaOnevision2Config)
    AutoModelForImageTextToText.register(
        LlavaOnevision2Config, LlavaOnevision2ForConditionalGeneration
    )
    folder = tmp_path_factory.mktemp(FAMILY) / "checkpoint"
    save_tokenizer(FAMILY, folder)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    text = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1024}
    tower = {"num_attention_heads": 2, "spatial_merge_size": 2, "out_hidden_size": 64}
    token_ids: Any = build_sample_encoder(FAMILY, str(folder)).media_token_ids
    config = LlavaOnevision2Config(
        text_config={"model_type": "qwen3", **sizes, **text},
        vision_config={**sizes, **tower},
        **token_ids,
    )
    LlavaOnevision2Config.register_for_auto_class()
    LlavaOnevision2ForConditionalGeneration.register_for_auto_class("AutoModelForCausalLM")
    with torch.no_grad():
        randomise(LlavaOnevision2ForConditionalGeneration(config)).save_pretrained(folder)
    return folder


def make(output: Path, _: Any, packs: Any, checkpoint: Path, **options: Any) -> Any:
    """transformers' Trainer on the model with its code, as anyone loads it."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules.")
    return packed_trainer(output, model, packs, checkpoint, **options)


def test_steps_are_those_of_the_samples_alone_and_are_resumed(
    checkpoint: Path, tmp_path: Path, say: Say
) -> None:
    packed = small_packs(FAMILY, checkpoint, tmp_path)
    _, losses = check_resuming(tmp_path, recorded_run, make, checkpoint, packed)
    say(f"{check_losses(packed, checkpoint, losses)}, 6 steps resumed after 3 to the last bit")
