"""The end of a run: checks made before it begins, a stop that loses no step, and the export."""

import logging
import signal
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Final

from torch import distributed

from launch.config import LaunchConfig
from launch.data.packed_data import check_validation
from launch.model.config import ModelConfig, TransformersModelConfig
from offline_packing.errors import StageError
from offline_packing.storage.files import read_json, to_json, write_atomically
from task_encoders.families.builtin_processor import has_builtin_processor

logger = logging.getLogger(__name__)

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
#: File in an exported folder with its number of steps.
_TRAINED: Final = "trained.json"
#: Adapters take about ten times the rate of whole matrices (thinkingmachines.ai/blog/lora).
_LEAST_LORA_RATE: Final = 5e-5


def check_ends(config: LaunchConfig) -> None:
    """Check that validation and export have what they need. Raises StageError if not."""
    if config.validation.every:
        check_validation(config.data.path)
    elif config.validation.limit is not None:
        logger.warning(
            "validation.limit=%d without validation.every has no effect; set both",
            config.validation.limit,
        )
    model = config.model
    _check_adapters(model, config.schedule.learning_rate)
    if not model.checkpoint:
        logger.warning(
            "random weights, in the sizes of model.preset=%s; set model.checkpoint to train a "
            "model that exists",
            model.preset,
        )
    is_built_here = not isinstance(model, TransformersModelConfig)  # others copy the packs'
    if (
        config.checkpoint.export
        and is_built_here
        and not model.checkpoint
        and not has_builtin_processor(model.family)
    ):
        logger.warning(
            "hf/ will have no tokenizer and no image processor: there is no built-in processor of "
            "%s; copy them from a checkpoint, or train one with model.checkpoint",
            model.family,
        )


def _check_adapters(model: ModelConfig, rate: float) -> None:
    lora = model.lora if isinstance(model, TransformersModelConfig) else None
    if lora is not None and rate * lora.alpha / lora.rank < _LEAST_LORA_RATE:
        logger.warning(
            "schedule.learning_rate=%g times model.lora.alpha / rank %g hardly moves adapters, "
            "which begin at 0; they usually take 1e-4 or more",
            rate,
            lora.alpha / lora.rank,
        )


def check_token_ids(model: ModelConfig, encoded_with: Mapping[str, int]) -> None:
    """Check that a model's token ids of media are those of the packs, and within its vocabulary.
    Raises StageError."""
    if model.checkpoint is None:
        if (size := model.text.get("vocab_size")) is not None:
            _check_vocabulary("model.text", size, encoded_with)
        return
    config = model.build_transformers_config()
    for name, token_id in encoded_with.items():
        theirs = getattr(config, name, token_id)
        if theirs != token_id:
            raise StageError(
                f"{model.checkpoint}/config.json has {name} {theirs}, the packs were encoded with "
                f"{token_id}; name the checkpoint they were packed for, or pack again with "
                f"model.processor={model.checkpoint}"
            )
    text = config.get_text_config()
    _check_vocabulary(f"{model.checkpoint}/config.json", text.vocab_size, encoded_with)


def _check_vocabulary(place: str, size: int, encoded_with: Mapping[str, int]) -> None:
    name, highest = max(encoded_with.items(), key=lambda item: item[1])
    if highest >= size:
        raise StageError(
            f"{place} has vocab_size {size:,}, and the packs hold {name} {highest:,}; give a model "
            "with their vocabulary, or pack again with its processor"
        )


class StopRequest:
    """Context manager that records SIGTERM or Ctrl-C, for the work inside to stop."""

    def __init__(self) -> None:
        #: the signal; 0: none
        self.received = 0

    def __enter__(self) -> "StopRequest":
        def on_signal(number: int, _: FrameType | None) -> None:
            self.received = number

        self._previous: dict[int, Any] = {s: signal.signal(s, on_signal) for s in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def export(model: Any, output: Path, steps: int) -> None:
    """Write the trained model to `hf/` in Hugging Face's format. A collective.

    The model of an earlier, shorter run is kept as `hf_` and its number of steps.
    """
    folder = output / "hf"
    earlier = read_json(folder / _TRAINED, "remove it") or {}
    if earlier.get("steps") == steps:
        logger.info("%s holds the trained model already", folder)
        return
    distributed.barrier()  # all have read
    if distributed.get_rank() == 0 and folder.exists():
        kept = output / f"hf_{earlier.get('steps', 'before')}"
        folder.rename(kept)
        logger.info("kept the model of an earlier run as %s", kept)
    model.save_hf_checkpoint(folder)
    if distributed.get_rank() == 0:
        write_atomically(folder / _TRAINED, to_json({"steps": steps}))
    logger.info("wrote the trained model to %s", folder)
