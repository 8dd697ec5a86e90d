"""Packs in trainers made from transformers' Trainer: order, resuming, loss; and transformers' whole
processors, whose video part needs torchvision, as packs were measured."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
import transformers
from torch.nn import functional as F
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForImageTextToText,
    AutoTokenizer,
    TrainingArguments,
)
from transformers.video_utils import VideoMetadata

from launch.model.packed_attention import packed_attention
from launch.trainers.transformers_trainer import PackedTrainer, collate_packed
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.model_inputs import flash_attention_kwargs
from tests.helpers.peers import losses_of, open_packs, pack_dialogues, small_checkpoint
from tests.helpers.tiny_families import STILL
from tests.helpers.tiny_tokenizers import save_processor
from tests.helpers.videos import short_dialogues

#: (output folder, model, folder of packs, arguments) to a trainer
MakeTrainer = Callable[..., Any]
#: Packs and loss of each step, and the weights at the end.
Run = tuple[list[int], list[float], Sequence[torch.Tensor]]

#: Arguments with which AdamW does what that of `launch` does.
OPTIMIZER: dict[str, Any] = {
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "adam_beta2": 0.95,
    "max_grad_norm": 1.0,
}
QUIET: dict[str, Any] = {
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "logging_steps": 1,
    "per_device_train_batch_size": 1,
}


def packed_trainer(
    output: Path, model: Any, packs: PackedFolder, checkpoint: Path | None = None, **options: Any
) -> PackedTrainer:
    """transformers' Trainer on packs."""
    args = TrainingArguments(output_dir=str(output), **{**QUIET, **options})
    return PackedTrainer(args=args, model=model, train_dataset=packs, eval_dataset=packs)


def number_of(input_ids: torch.Tensor, packs: PackedFolder) -> int:
    """The number of a row's pack."""
    found = [
        i for i in range(len(packs)) if torch.equal(packs.row(i).row.tokens, input_ids.flatten())
    ]
    assert len(found) == 1
    return found[0]


def numbers_read(make: MakeTrainer, packed: Path, checkpoint: Path, output: Path) -> list[int]:
    """Numbers of the packs that this rank trains on in an epoch."""
    packs = open_packs(packed)
    model = AutoModelForImageTextToText.from_pretrained(checkpoint)
    trainer = make(output, model, packs, checkpoint)
    return [number_of(row["input_ids"], packs) for row in trainer.get_train_dataloader()]


def recorded_run(
    make: MakeTrainer, checkpoint: Path, packed: Path, output: Path, resume: Path | None = None
) -> Run:
    """Packs and loss of each of six steps, and the weights at the end."""
    packs = open_packs(packed)
    model = AutoModelForImageTextToText.from_pretrained(checkpoint)
    options = {"resume_from_checkpoint": str(resume)} if resume else {}
    options |= {"max_steps": 6, "save_steps": 3, **OPTIMIZER}
    trainer = make(output, model, packs, checkpoint, **options)
    seen: list[int] = []
    trainer.model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(number_of(kwargs["input_ids"], packs)), with_kwargs=True
    )
    trainer.train(resume_from_checkpoint=options.get("resume_from_checkpoint"))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return seen, losses, [weight.detach().clone() for weight in trainer.model.parameters()]


def check_resuming(
    root: Path, run: Callable[..., Run], *args: Any
) -> tuple[list[int], list[float]]:
    """Packs, losses and weights of `run(*args, output, resume)` after a checkpoint in the middle of
    an epoch are those of the run that went on. Returns the packs and losses of all steps."""
    packs, losses, weights = run(*args, root / "whole")
    assert packs == list(range(6))
    rest = run(*args, root / "resumed", root / "whole" / "checkpoint-3")
    assert rest[0] == packs[3:]
    assert rest[1] == losses  # the log of the first three is in the checkpoint
    assert all(map(torch.equal, rest[2], weights))
    return packs, losses


def row_of_trees(packs: PackedFolder) -> dict[str, Any]:
    """Collate all packs into a row, of three trees of several branches or more."""
    collated = collate_packed([{"packs": packs, "number": i} for i in range(len(packs))])
    parents = collated["batch"].parents.flatten().tolist()
    assert sum(parents.count(trunk) > 1 for trunk in {*parents} - {-1}) >= 3
    return collated


def check_branches(
    trainer: Any, packs: PackedFolder, alone: torch.Tensor, *, rtol: float = 0.0
) -> str:
    """Each branch of the packs, in a row of all, has the losses of its sample alone, and so has a
    training step, which leaves its gradients. Returns a sentence."""
    collated = row_of_trees(packs)
    found = losses_of(trainer.model, trainer._prepare_inputs(collated))
    torch.testing.assert_close(found, alone, atol=1e-5, rtol=rtol)
    trainer.model.zero_grad()
    loss = trainer.training_step(trainer.model, collated, torch.tensor(len(alone)))
    assert abs(loss.item() - alone.mean().item()) <= 1e-5
    count = int((collated["batch"].parents >= 0).sum())
    return f"{count} branches have the losses of their samples alone, in a step, too"


def several_packs(
    family: str, root: Path, samples: int = 24, seq_length: int = 1024, **pack: Any
) -> tuple[Path, Path]:
    """A tiny checkpoint, and packs for it of several samples each, with videos where the family
    takes them."""
    checkpoint = small_checkpoint(family, root / "checkpoint")
    pairs = short_dialogues(root / "source", samples, videos=family not in STILL)
    pack["seq_length"] = seq_length
    return checkpoint, pack_dialogues(pairs, family, checkpoint, root, **pack)


def use_segment_attention(model: Any) -> None:
    """Rows of trainers that need flash attention, on a CPU: every token attends to its segment."""
    AttentionInterface.register("segments", _segment_attention)
    model.set_attn_implementation({"text_config": "segments", "vision_config": "sdpa"})


def _segment_attention(module: Any, *args: Any, is_causal: Any = None, **kwargs: Any) -> Any:
    causal = module.is_causal if is_causal is None else is_causal
    if "cu_seq_lens_q" not in kwargs:  # flash attention, too, then looks where positions restart
        positions = kwargs["position_ids"].flatten()
        starts = (positions == 0).nonzero()[:, 0]
        kwargs |= flash_attention_kwargs(F.pad(starts, (0, 1), value=len(positions)))
    return packed_attention(module, *args, is_causal=causal, **kwargs)


def with_processor(checkpoint: Path, **limits: int) -> Path:
    """Add the whole processor of its tokenizer to a checkpoint; returns the checkpoint."""
    model_type = AutoConfig.from_pretrained(checkpoint).model_type
    names = {"start_image": "<img>", "end_image": "</img>", "context_image": "<IMG_CONTEXT>"}
    names = {f"{name}_token": token for name, token in names.items()} | {"video_token": "<video>"}
    options = {"extra_special_tokens": names} if model_type == "internvl" else {}
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, **options)
    save_processor(checkpoint, tokenizer, tokenizer.chat_template, model_type, **limits)
    return checkpoint


def video_files(videos: Sequence[bytes], folder: Path) -> list[str]:
    """Paths of videos, for readers that take no bytes."""
    paths = [folder / str(number) for number in range(len(videos))]
    for path, data in zip(paths, videos, strict=True):
        path.write_bytes(data)
    return [str(path) for path in paths]


def decoded_video(path: str) -> tuple[np.ndarray, float]:
    """Frames (T, H, W, 3), upright, and their rate."""
    with av.open(path) as file:
        rate = file.streams.video[0].average_rate
        assert rate is not None
        frames = [
            np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90)
            for frame in file.decode(video=0)
        ]
    return np.stack(frames), float(rate)


class _FromPyAV:
    """Decodes with PyAV: the default needs FFmpeg's libraries; transformers' own reader for PyAV
    neither turns videos upright nor finds frames in WebM."""

    def fetch_videos(self, videos: Any, sample_indices_fn: Callable[..., Any]) -> Any:
        if isinstance(videos, list):
            found = [self.fetch_videos(video, sample_indices_fn) for video in videos]
            return list(zip(*found, strict=True))
        frames, rate = decoded_video(videos)
        metadata = VideoMetadata(len(frames), fps=rate, duration=len(frames) / rate)
        metadata.frames_indices = sample_indices_fn(metadata=metadata)
        return frames[[int(number) for number in metadata.frames_indices]], metadata


def processor_of(family: str, encoder: Any, tokenizer: Any) -> Any:
    """The processor of one of Qwen's families with the sizes and frames of an encoder that resizes
    with torch."""
    assert encoder.options.resize == "torch"
    name = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[family]
    of_videos = "Qwen3VL" if family == "qwen3_vl" else "Qwen2VL"
    videos = getattr(transformers, f"{of_videos}VideoProcessor")
    reading: Any = type("Reading", (_FromPyAV, videos), {})
    shared = {
        "patch_size": encoder.vision.patch_size,
        "image_mean": list(encoder.vision.mean),
        "image_std": list(encoder.vision.std),
    }
    own = encoder.options.model_dump()
    image_size, video_size = (
        {"shortest_edge": own[f"{kind}min_pixels"], "longest_edge": own[f"{kind}max_pixels"]}
        for kind in ("", "video_")
    )
    frames = {f"{end}_frames": own[f"video_{end}_frames"] for end in ("min", "max")}
    options = {"size": video_size, "fps": own["video_fps"], **frames, **shared}
    return getattr(transformers, f"{name}Processor")(
        image_processor=transformers.Qwen2VLImageProcessor(size=image_size, **shared),
        tokenizer=tokenizer,
        video_processor=reading(do_sample_frames=True, **options),
        chat_template=tokenizer.chat_template,
    )
