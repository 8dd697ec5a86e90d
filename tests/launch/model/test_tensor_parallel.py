"""Two tensor parallel ranks hold one model: same weights, same gradients where they overlap."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from launch.loop.loss import shift_labels
from launch.loop.parallel import (
    initialize_parallel,
)
from launch.model.config import ModelConfig
from launch.model.hf_checkpoint import gather_weights
from launch.model.megatron_model import PackedMegatronModel, build_model, check_supported
from tests.helpers.rank_processes import run_ranks
from tests.helpers.tiny_checkpoints import (
    assert_same_tensors,
    forward,
    packed_batch,
    row_samples,
    transformers_model,
    write_checkpoint,
)

CONFIG = ModelConfig(preset="tiny")


def gathered(model: PackedMegatronModel) -> dict[str, torch.Tensor]:
    tensors = gather_weights(model, model.hf_config)
    return {name: tensor for name, tensor in tensors if tensor is not None}


def equal_on_all_ranks(tensor: torch.Tensor) -> bool:
    copies = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, tensor.contiguous())
    return all(torch.equal(copy, tensor) for copy in copies)


def examine_rank(source: Path, target: Path) -> dict[str, Any]:
    """A model and its gradients as one of two ranks sees them. Also copies a checkpoint."""
    device = initialize_parallel(2)
    build_model(ModelConfig(checkpoint=source), device=device).save_hf_checkpoint(target)
    model = build_model(CONFIG, device=device, seed=5)
    weights = gathered(model)
    reference = transformers_model("qwen2_vl", tied=True)  # finds positions, is not compared
    batch = packed_batch(row_samples(reference, "mixed"))
    batch.tokens[batch.tokens == reference.config.image_token_id] = model.hf_config.image_token_id
    forward(model, batch, shift_labels(batch.labels)).sum().backward()

    parameters = dict(model.named_parameters())
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    replicated = [
        name
        for name, parameter in parameters.items()
        if not getattr(parameter, "tensor_model_parallel", False)
    ]
    same = [equal_on_all_ranks(gradients[name]) for name in replicated]
    return {
        "weights": weights,
        "same": same,
    }


def test_two_ranks_hold_one_model(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "qwen2_vl", tied=False)
    target = tmp_path / "target"
    ranks = run_ranks(2, tmp_path / "ranks", examine_rank, source, target)
    assert len(ranks) == 2
    assert_same_tensors(target, source)
    _check_weights_do_not_depend_on_tensor_parallelism(ranks)
    for rank in ranks:
        assert len(rank["same"]) > 20
        assert all(rank["same"])  # gradients of replicated parameters, without any reduction


def _check_weights_do_not_depend_on_tensor_parallelism(ranks: list[dict[str, Any]]) -> None:
    expected = gathered(build_model(CONFIG, device=initialize_parallel(1), seed=5))
    assert set(ranks[0]["weights"]) == set(expected)
    assert ranks[1]["weights"] == {}
    for name, tensor in expected.items():
        assert torch.equal(ranks[0]["weights"][name], tensor), name
    other = gathered(build_model(CONFIG, device=initialize_parallel(1), seed=6))
    name = "visual.merger.mlp.0.weight"
    assert not torch.equal(other[name], expected[name])


def test_sizes_that_cannot_be_divided_are_refused() -> None:
    text_config = CONFIG.build_transformers_config().text_config
    check_supported(text_config, 2)
    with pytest.raises(ValueError, match="num_key_value_heads 2 cannot be divided"):
        check_supported(text_config, 4)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rope_parameters", {"rope_type": "yarn"}, "'yarn'} are not supported"),
        ("rope_parameters", {"rope_type": "default"}, "'default'} are not supported"),
        (
            "rope_parameters",
            {"rope_type": "default", "mrope_section": [1], "partial_rotary_factor": 0.5},
            "'partial_rotary_factor': 0.5} are not supported",
        ),
        ("hidden_act", "gelu", "hidden_act 'gelu' is not supported"),
        ("layer_types", ["full_attention", "sliding_attention"], "use_sliding_window"),
    ],
)
def test_what_the_model_does_not_compute_is_refused(field: str, value: Any, message: str) -> None:
    text_config = CONFIG.build_transformers_config().text_config
    setattr(text_config, field, value)
    with pytest.raises(ValueError, match=message):
        check_supported(text_config, 1)
