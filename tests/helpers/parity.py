"""Losses of packs, to be compared with those of their samples alone.

A comparison sees a broken boundary, or a neighbour's picture, only in packs of several samples with
pictures of their own: others are refused. Controls show that it sees them."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText

from task_encoders.energon_samples import PackedBatch
from task_encoders.families import FAMILIES
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.model_inputs import flash_attention_kwargs, to_transformers_kwargs, token_types
from task_encoders.sample_encoder import EncodedSample
from task_encoders.samples import IGNORE_INDEX
from tests.helpers.peers import open_packs, our_losses, stored_samples, two_losses
from tests.helpers.tiny_checkpoints import packed_batch
from tests.helpers.tiny_families import image_masks

#: Arguments of transformers' models for a sample.
Inputs = dict[str, Any]
#: A pack and its number to its samples.
Reader = Callable[[PackedFolder, int], list[Inputs]]


def refuse_packs_of_few(packs: PackedFolder, numbers: Iterable[int]) -> None:
    """Each of these packs holds three samples or more, and one of them two with media that
    differ."""
    distinct = 0
    for number in numbers:
        media = [files for _, files in stored_samples(packs[number])]
        where = f"{packs.path}: pack {number} is too easy to get right: it"
        assert len(media) >= 3, f"{where} holds {len(media)} samples, not 3; make them shorter"
        distinct = max(distinct, len({tuple(files) for files in media if files}))
    assert distinct >= 2, f"{packs.path}: no pack of {numbers} holds two samples with media"


def encoded_alone(packs: PackedFolder, number: int) -> list[EncodedSample]:
    """The samples of a pack, each encoded from its own texts and files."""
    encoder = packs.task_encoder.encoder  # type: ignore[union-attr]
    samples = []
    for sample, files in stored_samples(packs[number]):
        count = len(sample.images)
        samples.append(encoder.encode(sample, files[:count], files[count:]))
    return samples


def inputs_of(packs: PackedFolder, batch: PackedBatch) -> Inputs:
    """A row of one sample, without anything of packing: the model finds masks itself, and positions
    but for Qwen2.5-VL's videos, placed by seconds that rows do not have."""
    encoder = packs.task_encoder.encoder  # type: ignore[union-attr]
    kwargs = to_transformers_kwargs(batch)
    of_packing = {*flash_attention_kwargs(batch.cu_lengths), "position_ids"}
    if encoder.options.family == "qwen2_5_vl" and len(batch.video_grid_thw):
        of_packing -= {"position_ids"}
    kwargs = {name: value for name, value in kwargs.items() if name not in of_packing}
    types = token_types(kwargs["input_ids"], encoder.media_token_ids)
    return {**kwargs, "mm_token_type_ids": types}


def samples_alone(packs: PackedFolder, number: int) -> list[Inputs]:
    """Each sample of a pack."""
    return [inputs_of(packs, packed_batch([s])) for s in encoded_alone(packs, number)]


def token_losses_alone(model: Any, packs: PackedFolder, number: int) -> torch.Tensor:
    """Loss of each labelled token of a pack's samples, one sample at a time."""
    losses = []
    for inputs in samples_alone(packs, number):
        labels = inputs.pop("labels")[0, 1:]
        logits = model(**inputs).logits[0, :-1]
        losses.append(F.cross_entropy(logits, labels, reduction="none")[labels != IGNORE_INDEX])
    return torch.cat(losses)


def one_sample(packs: PackedFolder, number: int) -> list[Inputs]:
    """A pack without its boundaries."""
    row = packed_batch(encoded_alone(packs, number), cross_sample_attention=True)
    return [inputs_of(packs, row)]


def attention_cut_alone(packs: PackedFolder, number: int) -> list[Inputs]:
    """A pack with boundaries for attention, which restarting positions tell, and without boundaries
    for recurrent layers."""
    batch = packed_batch(encoded_alone(packs, number))
    row, boundaries = to_transformers_kwargs(batch), flash_attention_kwargs(batch.cu_lengths)
    return [{name: value for name, value in row.items() if name not in boundaries}]


def labels_shifted(packs: PackedFolder, number: int) -> list[Inputs]:
    """The samples, each token trained to be what the one before should be."""
    samples = samples_alone(packs, number)
    for sample in samples:
        sample["labels"] = sample["labels"].roll(1, 1)
        sample["labels"][:, 0] = IGNORE_INDEX
    return samples


def media_of_neighbours(packs: PackedFolder, number: int) -> list[Inputs]:
    """The samples with pixels of one another: as many as each had, of the next one that has."""
    samples = encoded_alone(packs, number)
    for name in ("image_pixels", "video_pixels"):
        sizes = [len(getattr(sample, name)) for sample in samples]
        pixels = np.concatenate([getattr(sample, name) for sample in samples])
        moved = np.roll(pixels, -next(filter(None, sizes), 0), axis=0)
        parts = np.split(moved, np.cumsum(sizes)[:-1])
        samples = [replace(s, **{name: part}) for s, part in zip(samples, parts, strict=True)]
    return [inputs_of(packs, packed_batch([sample])) for sample in samples]


#: Mistakes that a comparison has to see.
CONTROLS: tuple[Reader, ...] = (one_sample, labels_shifted, media_of_neighbours)


def loss_per_label(model: Any, samples: Iterable[Inputs], pixels: torch.dtype) -> torch.Tensor:
    """Loss per label of samples, each alone in transformers' model; with pixels rounded."""
    total, count = torch.zeros(()), 0
    for sample in samples:
        labels = int((sample["labels"][:, 1:] != IGNORE_INDEX).sum())
        if not labels:
            continue
        for name in sample.keys() & {"pixel_values", "pixel_values_videos"}:
            sample[name] = sample[name].to(pixels).float()
        if model.config.model_type == "gemma4_unified":
            tokens, types = sample["input_ids"], sample["mm_token_type_ids"]
            sample["attention_mask"] = image_masks(model, tokens, types)
        total = total + model(**sample).loss * labels
        count += labels
    return total / count


def check_losses(
    packed: Path,
    checkpoint: Path,
    losses: list[float],
    ours: Path | None = None,
    pixels: torch.dtype = torch.float32,
    eps: float = 1e-8,
) -> str:
    """The losses of a trainer on the first two packs, before and after a step, are those of their
    samples, each encoded and trained alone in transformers' model, to 1e-4; the mistakes of
    `CONTROLS` are far from them. With `ours`, a folder, those of `launch.train` are the same, too.
    `eps`: of AdamW. Returns a sentence with the largest difference."""
    packs = open_packs(packed)
    refuse_packs_of_few(packs, (0, 1))

    def trained(read: Reader) -> list[float]:
        model = AutoModelForImageTextToText.from_pretrained(checkpoint)
        samples = (read(packs, number) for number in (0, 1))
        return two_losses(model, samples, lambda found: loss_per_label(model, found, pixels), eps)

    recurrent = FAMILIES[packs.task_encoder.encoder.options.family].is_recurrent  # type: ignore[union-attr]
    for mistake in CONTROLS + (attention_cut_alone,) * recurrent:
        control = trained(mistake)
        away = max(abs(a - b) for a, b in zip(control, losses, strict=False))
        assert away > 1e-3, f"{mistake.__name__} goes unnoticed: {control} for {losses}"
    expected = [trained(samples_alone)]
    if ours is not None:
        expected.append(our_losses(packed, checkpoint, ours))
    difference = max(largest_difference(one, losses) for one in expected)
    like = "of the samples alone" + " and as launch.train's" * (ours is not None)
    return f"loss before and after a step as {like} (to {difference:.0e})"


def largest_difference(expected: list[float], losses: list[float]) -> float:
    """Between the losses of two trainers before and after a step, at most 1e-4."""
    assert len(expected) == 2
    difference = max(abs(a - b) for a, b in zip(expected, losses, strict=False))
    assert difference <= 1e-4, (expected, losses)
    assert abs(expected[0] - expected[1]) > 1e-3  # the step did something
    return difference
