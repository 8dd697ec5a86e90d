"""LLaVA-OneVision-1.5 and 2 of transformers' parts, since transformers has no such models."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel


class LlavaOneVision(nn.Module):
    """A tower that attends within each image and merges 2 by 2 patches into a token (the published
    ones are pretrained as RICE, with the same patches and rotary positions, and as OneVision
    Encoder), and Qwen3, whose positions count tokens. `depth`: frames of a patch."""

    def __init__(self, token_ids: Mapping[str, int], depth: int) -> None:
        super().__init__()
        self.token_ids = token_ids
        vision = Qwen2VLVisionConfig(
            depth=2, embed_dim=32, hidden_size=64, num_heads=2, temporal_patch_size=depth
        )
        self.visual = Qwen2VisionTransformerPretrainedModel._from_config(vision)
        self.config = Qwen3Config(
            vocab_size=1024,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
        )
        self.language_model = Qwen3ForCausalLM._from_config(self.config)

    def forward(
        self,
        input_ids: torch.Tensor,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        pixel_values_videos: torch.Tensor | None = None,
        video_grid_thw: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """The language model's output for inputs of `to_transformers_kwargs`."""
        embeddings = self.language_model.get_input_embeddings()(input_ids)
        for kind, pixels, grids in (
            ("image_token_id", pixel_values, image_grid_thw),
            ("video_token_id", pixel_values_videos, video_grid_thw),
        ):
            places = input_ids == self.token_ids[kind]
            if pixels is None:
                assert not places.any()
                continue
            features = self.visual(pixels, grid_thw=grids).pooler_output
            assert len(features) == int(places.sum())
            embeddings = embeddings.masked_scatter(places[..., None], features)
        return self.language_model(inputs_embeds=embeddings, **kwargs)
