"""Resuming in transformers' Trainer, which takes the names of weights in a checkpoint for those in
the model. Those of Qwen2-VL and Qwen2.5-VL differ: it would go on with the weights it began with.
"""

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel


def by_saved_names(load: Callable[..., None]) -> Callable[..., None]:
    """`Trainer._load_from_checkpoint` for models whose weights have other names when saved."""

    def mended(trainer: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        target = trainer.model if model is None else model
        if trainer.is_fsdp_enabled or not isinstance(target, PreTrainedModel):
            load(trainer, resume_from_checkpoint, model)
        else:
            saved = type(target).from_pretrained(resume_from_checkpoint, dtype=target.dtype)
            target.load_state_dict(saved.state_dict())

    return mended
