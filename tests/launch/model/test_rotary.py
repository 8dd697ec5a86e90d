"""Angles of M-RoPE and of 'dynamic' ones equal those of transformers."""

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from launch.model.megatron_model import rope_base, rope_frequencies


def test_dynamic_angles_are_those_of_each_sample_alone() -> None:
    """Within max_position_embeddings and beyond it; the second sample is padded."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6}
    config = Qwen2Config(
        hidden_size=256, num_attention_heads=2, rope_parameters=rope, max_position_embeddings=16
    )
    lengths = [10, 40, 33]
    expected = []
    for length in lengths:
        cos, _ = Qwen2RotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
        expected.append(cos[0])
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=torch.tensor([0, 10, 50, 83], dtype=torch.int32),
        cu_seqlens_q_padded=torch.tensor([0, 10, 51, 84], dtype=torch.int32),
    )
    base = rope_base(rope, params, max_positions=16, head_dim=128)
    positions = torch.cat([torch.arange(length) for length in (10, 41, 33)])
    angles = rope_frequencies(positions[None, None], head_dim=128, base=base)[:, 0, 0]
    real = torch.arange(84) != 50
    torch.testing.assert_close(angles.cos()[real], torch.cat(expected), atol=1e-5, rtol=0)
    fixed = rope_frequencies(positions[None, None], head_dim=128, base=1e6)[:, 0, 0]
    assert float((fixed.cos()[real] - torch.cat(expected)).abs().max()) > 0.5
