"""Blank images for rows without one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from task_encoders.families import FAMILIES, build_sample_encoder
from task_encoders.model_inputs import media_kwargs, segment_kwargs
from tests.helpers.tiny_families import encoder_options, save_tokenizer, tiny_model

IN_TRANSFORMERS = [name for name, family in FAMILIES.items() if family.transformers_name]


@pytest.mark.parametrize("family", IN_TRANSFORMERS)
@torch.no_grad()
def test_the_model_takes_a_blank_image(family: str, tmp_path: Path) -> None:
    """Its forward compares the features of images with their tokens."""
    save_tokenizer(family, tmp_path)
    encoder: Any = build_sample_encoder(family, str(tmp_path), **encoder_options(family))
    model = tiny_model(family, encoder.media_token_ids).eval()
    blank = FAMILIES[family].build.blank_image(model.config)
    layout = FAMILIES[family].build.IMAGE_LAYOUT
    media = media_kwargs(torch.zeros(blank.shape), torch.tensor([blank.grid]), layout=layout)
    image = encoder.media_token_ids["image_token_id"]

    def logits(num_tokens: int) -> torch.Tensor:
        tokens = torch.tensor([[*[image] * num_tokens, 5]])
        positions = torch.arange(tokens.shape[1]).expand(encoder.POSITION_ROWS, 1, -1)
        ends = torch.tensor([0, tokens.shape[1]])
        positions = segment_kwargs(positions, ends)["position_ids"]
        return model(tokens, position_ids=positions, use_cache=False, **media).logits

    assert logits(blank.num_tokens).isfinite().all()
    with pytest.raises(ValueError, match=r"[Ii]mage"):
        logits(blank.num_tokens + 1)
