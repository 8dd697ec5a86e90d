"""A tiny Qwen2-VL of transformers on the written packs: the proof of exactness, and a few steps.

The model is randomly initialised, with the real architecture and the real vocabulary. Losses are
computed from the hidden states of labelled positions only, which is exact and keeps the logits of
150,000 words small.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from task_encoders.concatenate import PackedRow, split_row
from task_encoders.energon_samples import PackedBatch
from task_encoders.families import FAMILIES, model_options
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.model_inputs import media_kwargs, to_transformers_kwargs, token_types
from task_encoders.samples import IGNORE_INDEX
from task_encoders.text.qwen_vocabulary import MEDIA_TOKEN_IDS


@dataclass(frozen=True, slots=True)
class LossDifference:
    """Largest difference of a per-token loss to the unpacked one's, over `num_tokens` labels."""

    packed: float
    without_boundaries: float
    num_tokens: int


def tiny_qwen2_vl(*, weight_std: float | None = None) -> Any:
    """Build a Qwen2-VL of about 10 million weights, nearly all of them word embeddings.

    `weight_std` draws every weight from N(0, weight_std²). With transformers' own initialisation a
    model hardly looks at its context, and a broken boundary would go unnoticed.
    """
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    torch.manual_seed(0)
    preset = FAMILIES[model_options().family].tiny
    init = {} if weight_std is None else {"initializer_range": weight_std}
    config = Qwen2VLConfig(
        text_config={**preset.text, **init}, vision_config={**preset.vision, **init}, **preset.whole
    )
    config._attn_implementation = "sdpa"
    return Qwen2VLForConditionalGeneration(config)


def token_losses(model: Any, labels: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """Return the loss of every labelled token of a row, in order, (num_labels,). `labels` is (1,
    S)."""
    hidden = model.model(**inputs).last_hidden_state[0, :-1]
    targets = labels[0, 1:]  # the token at i is predicted from position i - 1
    labelled = targets != IGNORE_INDEX
    logits = model.lm_head(hidden[labelled])
    return F.cross_entropy(logits.float(), targets[labelled], reduction="none")


@torch.no_grad()
def compare_packed_with_unpacked(
    model: Any, folder: PackedFolder, num_packs: int
) -> LossDifference:
    """Compare the per-token losses of the first packs with those of their sub-samples alone.

    Alone, a sub-sample goes through the model as usual: no packing, positions found
    by the model itself. The control runs the packed row as one sequence.
    """
    model.eval()
    found = []
    for number in range(min(num_packs, len(folder))):
        kwargs = to_transformers_kwargs(folder.batch([number]))
        parts = map(alone_inputs, split_row(folder.row(number).row))
        alone = torch.cat([token_losses(model, **inputs) for inputs in parts])
        packed = token_losses(model, **kwargs)
        kwargs["position_ids"][0] = torch.arange(kwargs["input_ids"].shape[1])
        control = token_losses(model, **kwargs)
        differences = (float((losses - alone).abs().max()) for losses in (packed, control))
        found.append((*differences, len(alone)))
    largest, control_largest, counts = zip(*found, strict=True)
    return LossDifference(max(largest), max(control_largest), sum(counts))


def alone_inputs(row: PackedRow) -> dict[str, Any]:
    """Return a row of one sub-sample as the inputs of an unpacked forward."""
    tokens = row.tokens[None]
    media = (row.pixel_values, row.image_grid_thw, row.pixel_values_videos, row.video_grid_thw)
    return {
        "input_ids": tokens,
        "labels": row.labels[None],
        "mm_token_type_ids": token_types(tokens, MEDIA_TOKEN_IDS),
        "use_cache": False,
        **media_kwargs(*media),
    }


def train(model: Any, batches: Iterable[PackedBatch]) -> list[float]:
    """Take one AdamW step per batch; return the mean loss of each step, before the step."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    losses = []
    for batch in batches:
        loss = token_losses(model, **to_transformers_kwargs(batch)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
