"""Packs for other training frameworks, the samples in them, and one step of our own trainer; and
losses of packs, to be compared with those of their samples alone.

A comparison sees a broken boundary, or a neighbour's picture, only in packs of several samples with
pictures of their own: others are refused. Controls show that it sees them."""

import functools
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText

from launch.data.packed_data import read_packed_data
from launch.loop.metrics import read_metrics
from launch.loop.parallel import initialize_parallel
from launch.loop.setup import build_trainer
from offline_packing.demo.generate import generate_demo_dataset
from offline_packing.demo.run import MODEL, SEQ_LENGTH, SOURCES
from task_encoders.energon_samples import PackedBatch
from task_encoders.families import FAMILIES, build_sample_encoder
from task_encoders.loading.packed_folder import PackedFolder, RawPack
from task_encoders.model_inputs import flash_attention_kwargs, to_transformers_kwargs, token_types
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.packs.pack import restore_pack
from task_encoders.sample_encoder import EncodedSample
from task_encoders.samples import IGNORE_INDEX, SourceSample
from task_encoders.settings import PackingSettings
from tests.helpers.datasets import mixed_pairs, packed_run
from tests.helpers.packed_runs import make_config
from tests.helpers.rank_processes import run_ranks
from tests.helpers.tiny_checkpoints import packed_batch
from tests.helpers.tiny_families import encoder_options, image_masks, save_tokenizer, tiny_model
from tests.helpers.videos import short_dialogues

DEMO_OUTPUT = Path(__file__).parents[2] / "demo_output"
#: A caption after its media, without the headers of a dialogue.
CAPTION_TEMPLATE = (
    "{% for part in messages[0].content %}{% if part.type == 'text' %}{{ part.text }}{% else %}"
    "<|vision_start|><|{{ part.type }}_pad|><|vision_end|>{% endif %}{% endfor %}<|im_end|>"
)


def demo_folders(scratch: Path, num_samples: int = 400) -> dict[str, Path]:
    """Packed folders by task, of `make demo` where it was run."""
    found = {task: DEMO_OUTPUT / task for task in SOURCES}
    if all((folder / "manifest.json").is_file() for folder in found.values()):
        return found
    generate_demo_dataset(scratch / "data", num_samples=num_samples, progress=False)
    pack, output = {"seq_length": SEQ_LENGTH}, {"split": {"train": 0.9, "val": 0.1}}
    for task, forms in SOURCES.items():
        source = [
            {"format": form, "path": str(scratch / "data" / path), "task": task}
            for form, path in forms
        ]
        packed_run(source, scratch / task, model=dict(MODEL), pack=pack, output=output)
    return {task: scratch / task for task in SOURCES}


def open_packs(path: Path, split: str = "train", **options: Any) -> PackedFolder:
    """The packs of a split, encoded as they were measured; options are the task encoder's."""
    data = read_packed_data(path)
    task = json.loads((path / "manifest.json").read_bytes())["task"]
    settings = PackingSettings(packed=True, vqa=task == "vqa", bmr=task == "bmr")
    encoder = PackedTaskEncoder(
        seq_length=data.seq_length, model=data.model, settings=settings, **options
    )
    return PackedFolder(path, encoder, split=split)


def stored_samples(pack: RawPack) -> Iterator[tuple[SourceSample, list[bytes]]]:
    """The samples of a pack as they were before packing, with their media."""
    for sample in restore_pack(pack.record, pack.key).sub_samples:
        assert isinstance(sample, SourceSample)
        yield sample, [pack.media[name] for name in sample.media]


def small_checkpoint(family: str, folder: Path) -> Path:
    """A tiny model with weights that all count, with its tokenizer. `family`: with "_moe" after it,
    a mixture of experts."""
    name = family.removesuffix("_moe")
    with TemporaryDirectory() as scratch:  # transformers makes another one beside some models
        save_tokenizer(name, Path(scratch))
        token_ids = build_sample_encoder(name, processor=scratch).media_token_ids
    tiny_model(name, token_ids, experts=name != family).save_pretrained(folder)
    save_tokenizer(name, folder)
    return folder


def small_packs(family: str, checkpoint: Path, root: Path, samples: int = 48) -> Path:
    """Packs of several dialogues with no picture, one, or two, for that checkpoint."""
    return pack_dialogues(short_dialogues(root / "source", samples), family, checkpoint, root)


def pack_dialogues(
    pairs: Path, family: str, checkpoint: Path, root: Path, resize: str = "pil", **pack: Any
) -> Path:
    """Packs of a folder's dialogues, for that checkpoint; `family` as of `small_checkpoint`."""
    family = family.removesuffix("_moe")
    model = {"family": family, "processor": str(checkpoint), "max_pixels": None}
    model |= encoder_options(family)
    if "resize" in FAMILIES[family].Options.model_fields:
        model |= {"resize": resize}
    source = {"format": "pairs", "path": str(pairs), "task": "bmr"}
    packed_run(source, root / "packed", model=model, pack={"seq_length": 512, **pack})
    return root / "packed"


def check_order(
    packed: Path,
    scratch: Path,
    numbers_read: Callable[..., list[int]],
    *args: Any,
    drop_last: bool = False,
) -> str:
    """Rank r of W trains packs r, r + W, ... in an epoch, as `numbers_read(packed, *args)` says on
    each of 1, 2 and 4 ranks. Where the last round is not full, the first few are repeated, or it is
    dropped. Returns a sentence that says so."""
    size = len(open_packs(packed))
    for world_size in (1, 2, 4):
        read = run_ranks(world_size, scratch / f"ranks{world_size}", numbers_read, packed, *args)
        rounds = size // world_size if drop_last else -(-size // world_size)
        expected = [[(r + i * world_size) % size for i in range(rounds)] for r in range(world_size)]
        assert read == expected
    return "order of packs kept on 1, 2 and 4 ranks"


def check_uniform_steps(
    family: str, checkpoint: Path, scratch: Path, images_read: Callable[[Path], list[bool]]
) -> str:
    """Packs of `pack.order.uniform` are of one kind at each step of 2 and 4 ranks, and nothing is
    warned of; other packs mix, and the first rank warns of it once. Returns a sentence.
    `images_read(packed)`: whether each row of this rank has images, in an epoch."""
    pairs, counts = mixed_pairs(scratch / "source", 90), []
    for uniform in (True, False):
        order = {"num_ranks": 4, "num_workers": 2, "uniform": uniform}
        root = scratch / f"uniform_{uniform}"
        packed = pack_dialogues(pairs, family, checkpoint, root, seq_length=200, order=order)
        columns = open_packs(packed).columns()
        assert columns is not None
        for world_size in (2, 4):
            read = run_ranks(
                world_size, root / f"ranks{world_size}", _with_warnings, packed, images_read
            )
            steps = np.array([has_images for has_images, _ in read]).T
            mixed = int((steps != steps[:, :1]).any(axis=1).sum())
            warned = [sum("meet at a step" in line for line in lines) for _, lines in read]
            assert (mixed > 0) != uniform
            assert warned == [int(not uniform), *[0] * (world_size - 1)]
            if uniform:
                assert steps.size == len(columns.media)
                assert 0 < steps.sum() == (columns.media > 0).sum() < steps.size
            counts.append(f"{mixed} of {len(steps)} on {world_size} ranks")
    uniform, others = (", ".join(own) for own in (counts[:2], counts[2:]))
    return f"mixed steps of uniform packs: {uniform} (without: {others})"


def _with_warnings(
    packed: Path, images_read: Callable[[Path], list[bool]]
) -> tuple[list[bool], list[str]]:
    """Whether each row of a rank has images, and the warnings of packs that mix."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("launch.trainers.shared").addHandler(handler)
    return images_read(packed), lines


def two_losses(
    model: torch.nn.Module,
    batches: Iterable[Any],
    loss_of: Callable[[Any], torch.Tensor],
    eps: float = 1e-8,
) -> list[float]:
    """Loss of the first batch, and of the second after a step with the optimizer of `our_losses`,
    or with another `eps`; for trainers whose own loop needs a GPU."""
    options = {"betas": (0.9, 0.95), "weight_decay": 0.0, "eps": eps}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, **options)
    losses = []
    for batch in islice(batches, 2):
        loss = loss_of(batch)
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def our_losses(packed: Path, checkpoint: Path, output: Path) -> list[float]:
    """Loss of `launch.train` on the first pack, and after a step on the second. (Later ones say
    less: trainers differ in what AdamW does to a vision tower that saw no image.)"""
    family = read_packed_data(packed).model.family
    config = make_config(
        packed,
        output,
        model={"checkpoint": str(checkpoint), "family": family, "text": {}, "vision": {}},
        batch={"global_batch_packs": 1},
        train={"iterations": 2},
        schedule={"learning_rate": 1e-3, "warmup": 0, "decay": "constant"},
        optimizer={"weight_decay": 0.0},
    )
    trainer = build_trainer(config, initialize_parallel(1))
    trainer.run()
    return [line["loss"] for line in read_metrics(output / "metrics.jsonl") if "loss" in line]


def assert_same(ours: Mapping[str, Any], theirs: Mapping[str, Any], where: str) -> None:
    """Equal values under each name of `theirs`, of any integer type."""
    for name, value in theirs.items():
        expected, found = torch.as_tensor(value), torch.as_tensor(ours[name])
        assert found.shape == expected.shape, f"{where}: {name} {found.shape} {expected.shape}"
        assert bool((found == expected).all()), f"{where}: {name} differs"


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


@functools.lru_cache(maxsize=2)  # `check_losses` reads two packs again for each mistake
def encoded_alone(packs: PackedFolder, number: int) -> list[EncodedSample]:
    """Encode the samples of a pack, each from its own texts and files."""
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


def losses_of(model: Any, inputs: Inputs) -> torch.Tensor:
    """Return the loss of each labelled token of a row, or of a sample, in order."""
    given = {name: value for name, value in inputs.items() if name != "labels"}
    labels = inputs["labels"][0, 1:]
    losses = F.cross_entropy(model(**given).logits[0, :-1], labels, reduction="none")
    return losses[labels != IGNORE_INDEX]


def token_losses_alone(model: Any, packs: PackedFolder, number: int) -> torch.Tensor:
    """Loss of each labelled token of a pack's samples, one sample at a time."""
    return torch.cat([losses_of(model, inputs) for inputs in samples_alone(packs, number)])


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
