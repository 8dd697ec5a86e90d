"""Gemma 4: the tokens of an image see each other within their segment of a packed row, in
transformers' own attention, and kernels that cannot do that are refused by name."""

from typing import Any

import pytest
import torch

from launch.model.config import tiny_config, transformers_classes
from launch.model.segments import check_attention, isolate_segments
from task_encoders.model_inputs import media_kwargs
from tests.helpers.tiny_checkpoints import randomise
from tests.helpers.tiny_families import image_masks, needs_family

IMAGE, BEGIN, END = 900, 902, 903
IDS = {"image_token_id": IMAGE, "video_token_id": 901, "boi_token_id": BEGIN, "eoi_token_id": END}
#: Tokens of each segment, and (place, rows, columns) of its images: one longer than the window.
SEGMENTS = [(30, [(5, 3, 4)]), (12, []), (170, [(2, 10, 12), (130, 5, 5)]), (20, [(1, 2, 3)])]


#: Patches along the side of a token.
POOLS = {"gemma4": 3, "gemma4_unified": 1}


@pytest.fixture(params=POOLS)
def family(request: Any) -> Any:
    needs_family(request.param)
    return request.param


def model(family: str, attention: str = "sdpa", **text: Any) -> Any:
    config = tiny_config(family, {"vocab_size": 1024, **text}, **IDS)
    built = transformers_classes(family).model._from_config(config, attn_implementation=attention)
    return randomise(built).eval()


def rows(family: str) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """Tokens of the row, and the media of each segment."""
    pool = POOLS[family]
    generator = torch.Generator().manual_seed(0)
    parts, media = [], []
    for length, images in SEGMENTS:
        tokens = torch.randint(10, 800, (length,), generator=generator)
        for start, height, width in images:
            end = start + height * width
            tokens[start - 1], tokens[start:end], tokens[end] = BEGIN, IMAGE, END
        grids = torch.tensor([(1, pool * h, pool * w) for _, h, w in images]).reshape(-1, 3)
        values = 3 * (48 // pool) ** 2
        pixels = torch.rand(int(grids.prod(1).sum()), values, generator=generator)
        parts.append(tokens)
        media.append({"pixels": pixels, "grids": grids})
    return torch.cat(parts), media


def packed(tokens: torch.Tensor, media: list[dict[str, Any]], **other: Any) -> dict[str, Any]:
    pixels, grids = (torch.cat([one[name] for one in media]) for name in ("pixels", "grids"))
    return {
        "input_ids": tokens[None],
        "position_ids": torch.cat([torch.arange(length) for length, _ in SEGMENTS])[None],
        "use_cache": False,
        **media_kwargs(pixels, grids, layout="sequences"),
        **other,
    }


def alone(model: Any, tokens: torch.Tensor, media: list[dict[str, Any]]) -> torch.Tensor:
    """Logits of each segment by transformers itself, with the masks of its `generate`."""
    logits = []
    for part, one in zip(tokens.split([length for length, _ in SEGMENTS]), media, strict=True):
        images = media_kwargs(one["pixels"], one["grids"], layout="sequences")
        masks = image_masks(model, part[None], (part == IMAGE).int()[None])
        logits.append(model(part[None], attention_mask=masks, use_cache=False, **images).logits[0])
    return torch.cat(logits)


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention"])
@torch.compiler.set_stance("force_eager")  # flex attention's own formula: compiled, it takes 40 s
@torch.no_grad()
def test_packed_equals_alone(family: str, attention: str) -> None:
    """Also for an image longer than the window; the forward of transformers' Gemma 4 takes the
    images of the first segment for those of all, that of 12B shows images beyond its window."""
    whole, changed = model(family, attention), model(family, attention)
    isolate_segments(changed)
    tokens, media = rows(family)
    expected = alone(whole, tokens, media)
    found = changed(**packed(tokens, media)).logits[0]
    torch.testing.assert_close(found, expected, atol=3e-5, rtol=0)
    types = (tokens == IMAGE).int()[None]
    theirs = whole(**packed(tokens, media, mm_token_type_ids=types)).logits[0]
    assert (theirs - expected).abs().max() > 1
    merged = {"position_ids": torch.arange(len(tokens))[None], "mm_token_type_ids": types}
    control = changed(**packed(tokens, media, **merged)).logits[0]
    assert (control - expected).abs().max() > 1


@pytest.mark.parametrize("bidirectional", ["vision", None])
def test_kernels_that_cannot_are_refused_by_name(family: str, bidirectional: str | None) -> None:
    text = {"use_bidirectional_attention": bidirectional, "global_head_dim": 512}
    config = tiny_config(family, text)
    reason = "mask in which an image" if bidirectional else "heads of at most 256, .* some of 512"
    for name in ("flash_attention_2", "flash_attention_3"):
        with pytest.raises(ValueError, match=f"attention '{name}' .*{reason}.*; set sdpa"):
            check_attention(config, name)
    check_attention(config, "flex_attention")
    check_attention(tiny_config("qwen3_vl"), "flash_attention_2")
