"""A tiny Qwen2-VL of transformers on the written packs: the proof of exactness, and a few steps.

The model is randomly initialised, with the real architecture and the real vocabulary. Losses are
computed from the hidden states of labelled positions only, which is exact and keeps the logits of
150,000 words small.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.energon import SavableDataset, WorkerConfig
from torch.nn import functional as F

from task_encoders.energon_samples import PackedBatch
from task_encoders.families import FAMILIES, model_options
from task_encoders.loading.packed_dataset import get_packed_train_dataset
from task_encoders.model_inputs import to_transformers_kwargs
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.samples import IGNORE_INDEX
from task_encoders.settings import PackingSettings
from task_encoders.text.qwen_vocabulary import MEDIA_TOKEN_IDS

VISION_START, IMAGE_TOKEN, VIDEO_TOKEN = (
    MEDIA_TOKEN_IDS[f"{name}_token_id"] for name in ("vision_start", "image", "video")
)


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
        text_config={**preset.text, **init},
        vision_config={**preset.vision, **init},
        **preset.whole,
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


def packed_train_dataset(
    path: Path,
    task: str,
    seq_length: int,
    *,
    repeat: bool = True,
    **model_settings: Any,
) -> SavableDataset[PackedBatch]:
    """Open the written folder through Energon, with the model settings it was measured with."""
    settings = PackingSettings(packed=True, vqa=task == "vqa", bmr=task == "bmr")
    task_encoder = PackedTaskEncoder(seq_length=seq_length, settings=settings, **model_settings)
    worker_config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    return get_packed_train_dataset(path, task_encoder, worker_config=worker_config, repeat=repeat)


@torch.no_grad()
def compare_packed_with_unpacked(model: Any, batches: Iterable[PackedBatch]) -> LossDifference:
    """Compare the per-token losses of packed rows with those of their sub-samples alone.

    Alone, a sub-sample goes through the model as usual: no packing, positions found
    by the model itself. The control runs the packed row as one sequence.
    """
    model.eval()
    found = []
    for batch in batches:
        kwargs = to_transformers_kwargs(batch)
        alone = torch.cat([token_losses(model, **inputs) for inputs in sub_sample_inputs(batch)])
        packed = token_losses(model, **kwargs)
        kwargs["position_ids"][0] = torch.arange(batch.tokens.shape[1])
        control = token_losses(model, **kwargs)
        differences = (float((losses - alone).abs().max()) for losses in (packed, control))
        found.append((*differences, len(alone)))
    largest, control_largest, counts = zip(*found, strict=True)
    return LossDifference(max(largest), max(control_largest), sum(counts))


def sub_sample_inputs(batch: PackedBatch) -> Iterator[dict[str, Any]]:
    """Yield each segment of a packed batch as the inputs of an unpacked forward."""
    kinds = {
        IMAGE_TOKEN: ("image_grid_thw", "pixel_values", batch.imgs),
        VIDEO_TOKEN: ("video_grid_thw", "pixel_values_videos", batch.pixel_values_videos),
    }
    used = dict.fromkeys(kinds, (0, 0))
    bounds = batch.cu_lengths[0].tolist()
    for start, end in itertools.pairwise(bounds):
        tokens = batch.tokens[:, start:end]
        inputs = {
            "input_ids": tokens,
            "labels": batch.labels[:, start:end],
            "mm_token_type_ids": (tokens == IMAGE_TOKEN).int() + 2 * (tokens == VIDEO_TOKEN).int(),
            "use_cache": False,
        }
        followers = tokens[0, 1:][tokens[0, :-1] == VISION_START]
        for token, (grid_name, patches_name, all_patches) in kinds.items():
            media, patches = used[token]
            count = int((followers == token).sum())
            grids = getattr(batch, grid_name)[media : media + count].long()
            if len(grids):
                num_patches = int(grids.prod(dim=1).sum())
                inputs[grid_name] = grids
                inputs[patches_name] = all_patches[patches : patches + num_patches]
                used[token] = media + len(grids), patches + num_patches
        yield inputs


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
