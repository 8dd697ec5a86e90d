"""M-RoPE's angles equal those of transformers."""

import torch
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding

from launch.model.rotary import rope_frequencies
from tests.helpers.transformers_sources import needs_transformers


def test_angles_equal_those_of_transformers() -> None:
    needs_transformers("5.17", "joins the three rows' angles in its attention")
    sections = [16, 24, 24]
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    config = Qwen2VLTextConfig(hidden_size=256, num_attention_heads=2, rope_parameters=rope)
    position_ids = torch.randint(0, 4000, (3, 1, 50), generator=torch.Generator().manual_seed(0))
    cos, sin = Qwen2VLRotaryEmbedding(config)(torch.zeros(1), position_ids)
    angles = rope_frequencies(position_ids, head_dim=128, base=1e6, sections=sections)
    assert angles.shape == (50, 1, 1, 128)
    assert torch.equal(angles.cos()[:, 0, 0], cos[0])
    assert torch.equal(angles.sin()[:, 0, 0], sin[0])


def test_text_counts_up_as_in_ordinary_rope() -> None:
    position_ids = torch.arange(7).expand(3, 1, 7)
    angles = rope_frequencies(position_ids, head_dim=8, base=100.0, sections=[1, 1, 2])[:, 0, 0]
    frequencies = torch.tensor([1, 100**-0.25, 100**-0.5, 100**-0.75])
    expected = torch.arange(7)[:, None] * frequencies.repeat(2)
    torch.testing.assert_close(angles, expected)
