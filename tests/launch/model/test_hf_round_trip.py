"""Hugging Face -> megatron-core -> Hugging Face gives back every bit, whatever the sharding."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from launch.loop.parallel import initialize_parallel
from launch.model.config import ModelConfig, transformers_class
from launch.model.megatron.model import build_model, check_supported
from launch.model.megatron.weights import (
    gather_weights,
    random_weights,
    weight_files,
    write_checkpoint,
)
from tests.helpers import tiny_checkpoints
from tests.helpers.packed_runs import TINY_MODEL
from tests.helpers.tiny_checkpoints import all_tensors, assert_same_tensors, transformers_model

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


def round_trip(source: Path, family: str, target: Path, dtype: Any) -> None:
    config = ModelConfig(family=family, checkpoint=source, dtype=dtype)
    build_model(config, device=initialize_parallel()).save_hf_checkpoint(target)


def test_round_trip_is_bit_identical(tmp_path: Path) -> None:
    """Load and save a checkpoint in several files; test_model_parity does it for all families."""
    family, source, target = "qwen2_5_vl", tmp_path / "source", tmp_path / "target"
    model = transformers_model(family, tied=False).to(torch.bfloat16)
    model.save_pretrained(source, max_shard_size="500KB")
    (source / "tokenizer.json").write_text("{}")
    assert len(weight_files(source)) > 2
    round_trip(source, family, target, "bfloat16")
    assert_same_tensors(target, source)
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (target / name).read_bytes() == (source / name).read_bytes()

    loaded = transformers_class(family).from_pretrained(target, dtype="auto")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])


def test_checkpoints_are_written_in_shards_and_in_another_dtype(tmp_path: Path) -> None:
    source = tiny_checkpoints.write_checkpoint(tmp_path / "source", "qwen2_vl", tied=True)
    device = initialize_parallel()
    model = build_model(ModelConfig(checkpoint=source), device=device)
    target = tmp_path / "target"
    target.mkdir()
    (target / "of_an_older_run").touch()
    tensors = gather_weights(model, model.hf_config)
    write_checkpoint(target, tensors, model.hf_config, like=source, max_shard_bytes=500_000)
    files = weight_files(target)
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert not (target / "of_an_older_run").exists()
    assert_same_tensors(target, source)
    total = sum(tensor.nbytes for tensor in all_tensors(source).values())
    assert json.loads((target / INDEX_FILE).read_text())["metadata"]["total_size"] == total
    transformers_class("qwen2_vl").from_pretrained(target)
    round_trip(source, "qwen2_vl", tmp_path / "other", "bfloat16")
    assert json.loads((tmp_path / "other" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {t.dtype for t in all_tensors(tmp_path / "other").values()} == {torch.bfloat16}


def test_random_weights_make_a_checkpoint_that_transformers_loads(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    device = initialize_parallel()
    text = {**TINY_MODEL["text"], "vocab_size": 151_936}
    config = ModelConfig(**{**TINY_MODEL, "text": text})
    model = build_model(config, device=device, seed=3)
    model.save_hf_checkpoint(tmp_path / "target")
    loaded = transformers_class("qwen2_vl").from_pretrained(tmp_path / "target")
    ours = model.language_model.embedding.word_embeddings.weight
    assert torch.equal(loaded.model.language_model.embed_tokens.weight, ours)
    assert 0.019 < float(ours.std()) < 0.021
    name, down = "model.layers.0.mlp.down_proj.weight", model.layers()[0].mlp.linear_fc2.weight
    read, other = (
        random_weights(model.hf_config, {name: down.shape}, seed=seed, device=device)
        for seed in (3, 4)
    )
    assert torch.equal(read(name, None, 0, 1), down)
    assert not torch.equal(other(name, None, 0, 1), down)
    for dim in (0, 1):  # whatever the number of tensor parallel ranks
        assert torch.equal(torch.cat([read(name, dim, rank, 2) for rank in range(2)], dim), down)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "target")
    assert tokenizer("Hello world")["input_ids"] == [9707, 1879]
    assert (tmp_path / "target" / "preprocessor_config.json").is_file()
    config = ModelConfig(family="qwen3_vl", text={"vocab_size": 1024})  # without such files
    build_model(config, device=device).save_hf_checkpoint(tmp_path / "other")
    transformers_class("qwen3_vl").from_pretrained(tmp_path / "other")


def test_incomplete_checkpoints_are_refused(tmp_path: Path) -> None:
    source = tiny_checkpoints.write_checkpoint(tmp_path / "source", "qwen2_vl", tied=False)
    device = initialize_parallel()
    config = ModelConfig(checkpoint=source)

    tensors = load_file(source / SINGLE_FILE)
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, source / SINGLE_FILE)
    with pytest.raises(
        ValueError, match=r"lacks 1 of .* tensors, the first is 'model.norm.weight'"
    ):
        build_model(config, device=device)

    save_file({**tensors, "model.norm.weight": norm[:-1]}, source / SINGLE_FILE)
    with pytest.raises(ValueError, match=r"model.norm.weight: shape \(127,\)"):
        build_model(config, device=device)

    (source / INDEX_FILE).write_text('{"weight_map": {"model.norm.weight": "../outside"}}')
    with pytest.raises(ValueError, match=r"no file '\.\./outside'"):
        build_model(config, device=device)

    (source / INDEX_FILE).unlink()
    (source / SINGLE_FILE).rename(source / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no file 'model\.safetensors'"):
        build_model(config, device=device)


def test_the_flat_config_of_published_checkpoints_is_read(tmp_path: Path) -> None:
    """config.json of Qwen2-VL-2B-Instruct, where the text model's fields are at the top."""
    published: dict[str, Any] = {
        "model_type": "qwen2_vl",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_hidden_layers": 28,
        "num_key_value_heads": 2,
        "image_token_id": 151655,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "sliding_window": 32768,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "vision_config": {"depth": 32, "embed_dim": 1280, "hidden_size": 1536, "num_heads": 16},
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    found = ModelConfig(checkpoint=tmp_path).build_transformers_config()
    check_supported(found.text_config, 2)
    assert found.tie_word_embeddings
    assert found.image_token_id == 151655
    for name in ("num_hidden_layers", "hidden_size", "intermediate_size"):
        assert getattr(found.text_config, name) == published[name]
    assert published["vision_config"].items() <= found.vision_config.to_dict().items()
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    assert rope.items() <= found.text_config.rope_parameters.items()
