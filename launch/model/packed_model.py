"""The protocol of a model that `launch` trains, and code that both models share: token losses in
chunks, and the files of a checkpoint."""

import contextlib
import functools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch.utils.checkpoint import checkpoint

from task_encoders.energon_samples import PackedBatch
from task_encoders.families.base.cost import ModelCost
from task_encoders.samples import IGNORE_INDEX

#: Labels whose logits exist at once: in float32, 152,000 words for 2,048 labels are 1.2 GB.
LOSS_CHUNK: Final = 2048

#: Files of a checkpoint besides its weights and config, which are copied unchanged.
COMPANION_FILES: Final = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tekken.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "vocab.json",
)


class PackedModel(Protocol):
    """A module that reads packed rows: `PackedMegatronModel`, or `PackedTransformersModel`."""

    #: folder that the weights and their tokenizer came from
    checkpoint: Path | None
    cost: ModelCost

    @property
    def hf_config(self) -> Any:
        """transformers' config of the whole model."""

    def forward(
        self, row: PackedBatch, segments: PackedSeqParams, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the losses of one packed row of S tokens, pixels as values.

        Args:
            segments: the row's segments, see `prefix_trees.segment_params`.
            labels: (1, S) int64, shifted: the token that follows, or IGNORE_INDEX.

        Returns:
            With labels the loss of every token, (1, S) float32, 0 if ignored or another rank's;
            without labels the logits, (1, S, vocab_size).
        """

    def layers(self) -> list[torch.nn.Module]:
        """List the layers whose weights the optimizer gathers one by one."""

    def kernels(self) -> str:
        """Name the kernels of attention, and the fusions, for logs."""

    def save_hf_checkpoint(self, folder: Path) -> None:
        """Write a folder that transformers' `from_pretrained` loads. Every rank must call this."""


def token_losses(
    labels: torch.Tensor,
    head: torch.Tensor,
    losses_at: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Compute the loss of every token in chunks: (1, S) float32, 0 for ignored labels.

    Args:
        labels: (S,) int64, shifted.
        head: the matrix of the head. Its gradients of all chunks add up in float32.
        losses_at: computes the losses (n,) at positions (n,) of the row by a head; called on one
            chunk of the labelled positions after another, and again in the backward pass.
    """
    positions = (labels != IGNORE_INDEX).nonzero()[:, 0]
    chunks = positions.split(LOSS_CHUNK)  # a single empty chunk if nothing is labelled
    if len(chunks) == 1:
        losses = losses_at(positions, head)
    else:
        options: Any = {"use_reentrant": False, "preserve_rng_state": False}
        own_head = functools.partial(_HeadOfChunk.apply, head, len(chunks), [])
        losses = torch.cat([checkpoint(losses_at, one, own_head(), **options) for one in chunks])
    row = torch.zeros(1, len(labels), dtype=torch.float32, device=labels.device)
    return row.index_copy(1, positions, losses.float()[None])


class _HeadOfChunk(torch.autograd.Function):
    """The head as one of several chunks uses it: the chunks' gradients add up in float32.

    Autograd itself would add them in the head's dtype: in bfloat16, 256 + 1 is 256. The last chunk
    that runs backward returns the sum, the others return no gradient. Autograd runs the newest node
    first, so a head that is made right before its chunk's losses adds the chunk's gradient before
    the next chunk computes its own: besides the sum, only one of them is in memory.
    """

    @staticmethod
    def forward(
        ctx: Any, head: torch.Tensor, chunks: int, sums: list[torch.Tensor]
    ) -> torch.Tensor:
        """Return the head. `sums`: one entry per gradient so far, all the same running sum."""
        ctx.chunks, ctx.sums = chunks, sums
        return head.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,), sums = gradients, ctx.sums
        sums.append(sums[-1].add_(gradient) if sums else gradient.to(torch.float32, copy=True))
        if len(sums) < ctx.chunks:
            return None, None, None
        total = sums[-1].to(gradient.dtype)
        sums.clear()
        return total, None, None


def recompute_layers(model: Any) -> None:
    """Let the layers of one of transformers' models keep their input only. Unlike transformers,
    leave embeddings without gradients where all before them is frozen: a frozen tower would run
    backward, and under context parallelism a rank without frames would not."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if hasattr(model, "_require_grads_hook"):
        model.disable_input_require_grads()


@contextlib.contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to write in, renamed to `folder` when the block ends without an error."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    yield temporary
    for path in temporary.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


def write_companions(folder: Path, hf_config: Any, like: Path | None) -> None:
    """Write tokenizer, image processor and generation settings, if any, to a folder: those of the
    folder `like`, or the built-in ones."""
    if like is not None and like.is_dir():
        for name in COMPANION_FILES:
            if (like / name).is_file():
                shutil.copyfile(like / name, folder / name)
        return
    from task_encoders.families.builtin_processor import builtin_processor, has_builtin_processor

    if not has_builtin_processor(hf_config.model_type):
        return
    processor = builtin_processor(hf_config.model_type)
    if hf_config.text_config.vocab_size >= len(processor.tokenizer):
        processor.tokenizer.save_pretrained(folder)
        processor.image_processor.save_pretrained(folder)
