"""Small packed folders, and training runs of a tiny model over them."""

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from megatron.core import parallel_state

from launch.config import LaunchConfig
from launch.data.online_data import read_data
from launch.loop.checkpoint import CheckpointFolder
from launch.loop.metrics import read_metrics
from launch.loop.parallel import initialize_parallel
from launch.loop.plan import plan_training
from launch.loop.setup import build_model, build_optimizer, build_stages
from launch.loop.trainer import Trainer
from task_encoders.energon_samples import PackedBatch
from task_encoders.samples import IGNORE_INDEX
from task_encoders.text.qwen_vocabulary import MEDIA_TOKEN_IDS
from tests.helpers.datasets import mixed_pairs, packed_run

SEQ_LENGTH = 256
#: 10 % of the packs in a val split.
OUTPUT = {"packs_per_shard": 8, "split": {"train": 0.9, "val": 0.1}}

#: Words of the tiny model. With the real 151,936 a step takes a second; `RecordedBatches` folds
#: them into these.
VOCAB_SIZE = 1024
IMAGE_TOKEN = VOCAB_SIZE - 1

TINY_MODEL: dict[str, Any] = {
    "text": {
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": None,
        "eos_token_id": None,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    },
    "vision": {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2},
}

#: Heads of 64: smaller ones are not what the kernels are made for.
GPU_MODEL: dict[str, Any] = {
    "text": {
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [8, 12, 12],
        },
    },
    "vision": {"depth": 2, "embed_dim": 128, "hidden_size": 256, "num_heads": 2},
}

#: Environment variables for `bmr_folder`.
BMR_ENVIRONMENT = {"OFFLINE_PACKED_DATA": "1", "OFFLINE_PACKING_BMR": "1"}


def bmr_folder(root: Path, samples: int = 60, **pack: Any) -> Path:
    """Packed dialogues with no picture, one, or two; 10 % of the packs in a val split. `pack`:
    options of packing."""
    source = {"format": "pairs", "path": str(mixed_pairs(root / "source", samples)), "task": "bmr"}
    packed_run(source, root / "packed", pack={"seq_length": SEQ_LENGTH, **pack}, output=OUTPUT)
    return root / "packed"


def make_config(folder: Path, output: Path, /, **sections: dict[str, Any]) -> LaunchConfig:
    """A run that reads in this process and takes three packs a step."""
    defaults: dict[str, dict[str, Any]] = {
        "model": TINY_MODEL,
        "data": {"path": str(folder), "num_workers": 0},
        "batch": {"global_batch_packs": 3},
        "train": {"iterations": 8},
        "schedule": {"learning_rate": 3e-3, "warmup": 0.25},
        "output": {"path": str(output)},
    }
    merged = {name: content | sections.pop(name, {}) for name, content in defaults.items()}
    return LaunchConfig.model_validate({**merged, **sections})


class RecordedBatches:
    """Micro batches in words of the tiny model that remember which packs they gave.

    `keys`: theirs, added to. `fail_at`: raise instead of giving the pack of this number.
    """

    def __init__(self, batches: Any, keys: list[str], fail_at: int | None = None) -> None:
        self._batches = batches
        self._fail_at = fail_at
        self.keys = keys

    def next(self) -> PackedBatch | None:
        if len(self.keys) == self._fail_at:
            raise KilledError
        row = self._batches.next()
        if row is None:
            return None
        self.keys += row.__key__
        is_image = row.tokens == MEDIA_TOKEN_IDS["image_token_id"]
        tokens = (row.tokens % IMAGE_TOKEN).masked_fill(is_image, IMAGE_TOKEN)
        labels = torch.where(row.labels == IGNORE_INDEX, row.labels, tokens)
        return dataclasses.replace(row, tokens=tokens, labels=labels)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


class KilledError(BaseException):
    """Stands for the end of the process: nothing catches it, nothing is saved."""


def make_trainer(
    config: LaunchConfig, *, fail_at: int | None = None, accept: Collection[str] = ()
) -> tuple[Trainer, RecordedBatches, torch.nn.Module]:
    """A trainer as `launch.loop.setup` makes it, whose packs are recorded: of all stages with those
    of the first."""
    ranks = config.parallel
    device = initialize_parallel(ranks.tensor, ranks.context, seed=config.train.seed)
    data = [read_data(stage.data) for stage in config.stages]
    plan = plan_training(config, data, parallel_state.get_data_parallel_world_size())
    keys: list[str] = []
    stages, _ = build_stages(config, data, device)
    recorded = [
        dataclasses.replace(
            stage,
            train=RecordedBatches(stage.train, keys, fail_at),
            validation=stage.validation and RecordedBatches(stage.validation, []),
        )
        for stage in stages
    ]
    model = build_model(config.model, device=device, seed=config.train.seed)
    model.hf_config.image_token_id = IMAGE_TOKEN
    trainer = Trainer(
        config,
        plan,
        model=model,
        optimizer=build_optimizer(config, model, device),
        stages=recorded,
        checkpoints=CheckpointFolder(config, data, plan, accept),
        device=device,
    )
    return trainer, recorded[0].train, model


class Trained(NamedTuple):
    """A run of this process, and the keys of the packs that it was given."""

    output: Path
    trainer: Trainer
    keys: list[str]
    model: torch.nn.Module
    #: steps that earlier runs had done
    begun: int


def trained(config: LaunchConfig, *accept: str, fail_at: int | None = None) -> Trained:
    """Begin or resume a run and train it to its end, or kill it when it asks for the pack of this
    number."""
    trainer, recorded, model = make_trainer(config, fail_at=fail_at, accept=accept)
    trainer.resume()
    begun = trainer.iteration
    if fail_at is None:
        assert trainer.run()
    else:
        with pytest.raises(KilledError):
            trainer.run()
    return Trained(config.output.path, trainer, recorded.keys, model, begun)


def step_lines(output: Path) -> list[dict[str, Any]]:
    """The lines of training steps in a run's metrics."""
    return [line for line in read_metrics(output / "metrics.jsonl") if "loss" in line]


def losses(output: Path) -> list[float]:
    """The loss of every step of a run; checks that each step stands there once."""
    lines = step_lines(output)
    assert [line["iteration"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]
