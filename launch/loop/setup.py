"""Assembly of a training run: checks, groups, data, model, optimizer, trainer; and its export."""

import fcntl
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import torch
from megatron.core import parallel_state
from torch import distributed

from launch.config import LaunchConfig
from launch.data.broadcast import EvenRows
from launch.data.micro_batches import MicroBatches, build_task_encoder
from launch.data.online_data import read_data
from launch.data.packed_data import PackedData, absolute, check_room, largest_of, warn_of_trained
from launch.loop.checkpoint import CheckpointFolder
from launch.loop.optimizer import ShardedAdamW
from launch.loop.parallel import initialize_parallel, on_all_ranks, shutdown_parallel
from launch.loop.plan import plan_training
from launch.loop.trainer import Stage, Trainer
from launch.model.config import ModelConfig, TransformersModelConfig
from launch.model.megatron.model import build_model
from launch.model.packed_model import PackedModel
from launch.model.segments import check_layers, check_positions
from offline_packing.errors import ConfigError, StageError
from offline_packing.runs.training_run import STATE
from offline_packing.storage.files import hash_file, hold_lock, read_json, to_json, write_atomically
from task_encoders.families import FAMILIES
from task_encoders.families.builtin_processor import has_builtin_processor
from task_encoders.model_inputs import required_pad_multiple
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.settings import BMR, PACKED, VQA

logger = logging.getLogger(__name__)

#: File in an exported folder with its number of steps, and the hash of its checkpoint.
_TRAINED: Final = "trained.json"
#: Adapters take about ten times the rate of whole matrices (thinkingmachines.ai/blog/lora).
_LEAST_LORA_RATE: Final = 5e-5


def run(config: LaunchConfig, accept_mismatch: Collection[str] = ()) -> int:
    """Train as the configuration says, and write the trained model in Hugging Face's format.
    `accept_mismatch`: fields that may differ from the checkpoint to resume from. Returns the exit
    status: 0, or 128 and the number of the signal that stopped the run. Raises StageError if the
    data cannot be used, or another run is at work or must not be resumed."""
    checkpoints = config.output.path / "checkpoints"
    if not config.checkpoint.resume and any(checkpoints.glob("iter_*")):
        raise StageError(
            f"{checkpoints} holds another run; set checkpoint.resume=true to continue it, or "
            "give another output.path"
        )
    is_first = os.environ.get("RANK", "0") == "0"
    lock = hold_lock(checkpoints / "lock", str(config.output.path), lock=fcntl.lockf)
    with lock if is_first else nullcontext():
        ranks = config.parallel
        device = initialize_parallel(ranks.tensor, ranks.context, seed=config.train.seed)
        trainer = build_trainer(config, device, accept_mismatch)
        if config.checkpoint.resume:
            trainer.resume()
        finished = trainer.run()
        if finished and config.checkpoint.export:
            export(trainer, config.output.path)
        shutdown_parallel()
        return 0 if finished else 128 + trainer.stopped_by


def build_trainer(
    config: LaunchConfig, device: torch.device, accept_mismatch: Collection[str] = ()
) -> Trainer:
    """Build the trainer of this rank. Needs `initialize_parallel`."""
    data = [read_data(stage.data) for stage in config.stages]
    check_alike(config, data, accept_mismatch)
    largest = largest_of(config.data.paths, data)
    for stage, own in zip(config.stages, data, strict=True):
        check_trees(stage, own)
    check_ends(config)
    plan = plan_training(config, data, parallel_state.get_data_parallel_world_size())
    checkpoints = CheckpointFolder(config, data, plan, accept_mismatch)
    if checkpoints.newest() is None and accept_mismatch:
        raise ConfigError(
            f"--accept-mismatch {', '.join(accept_mismatch)}: {checkpoints.folder} holds no "
            "checkpoint to resume from; correct output.path, or leave the option out"
        )
    # The environment is checked here, before a checkpoint of many gigabytes is read.
    stages, encoder = build_stages(config, data, device)
    check_token_ids(config.model, encoder.encoder.media_token_ids)
    model = build_run_model(config, largest, encoder, device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    logger.info("on %s: %s", name, model.kernels())
    if isinstance(config.model, TransformersModelConfig) and distributed.get_world_size() > 1:
        even = EvenRows(FAMILIES[config.model.family], model.hf_config, device)
        for one in stages:
            for batches in filter(None, (one.train, one.validation)):
                batches.even = even
    return Trainer(
        config,
        plan,
        model=model,
        optimizer=build_optimizer(config, model, device),
        stages=stages,
        checkpoints=checkpoints,
        device=device,
    )


def build_stages(
    config: LaunchConfig, data: Sequence[PackedData], device: torch.device
) -> tuple[list[Stage], PackedTaskEncoder]:
    """Open the packs of each stage for this rank, and return them with the last task encoder."""
    stages = []
    context, seed = config.parallel.context, config.train.seed
    multiple = required_pad_multiple(context_parallel=context)
    tasks = {task for own in data for task in own.tasks}
    for stage, own in zip(config.stages, data, strict=True):
        (path,) = stage.data.paths
        packs: Any = None
        if stage.data.online is None:
            check_room(path, context)
            packs = stage.data.model_dump(include={"order", "micro_batch_size", "repeat"})
            packs |= {"path": absolute(path), "seed": seed, "datasets": own.datasets}
        encoder = build_task_encoder(
            stage.data, own, config.model.family, pad_multiple=multiple, trees=own.has_trees
        )
        encoder.is_blend = len(tasks) > 1  # one environment cannot name them
        validation = None
        if config.validation.every:
            warn_of_trained(path)
            limit = config.validation.limit
            validation = MicroBatches(stage.data, encoder, device, split="val", limit=limit)
        train = MicroBatches(stage.data, encoder, device, seed=seed)
        stages.append(Stage(packs, train, validation, own.seq_length))
    return stages, encoder


def build_run_model(
    config: LaunchConfig, data: PackedData, task_encoder: PackedTaskEncoder, device: torch.device
) -> PackedModel:
    """Build the model of a run for the packs that it trains. Raises ValueError if packs are longer
    than the model has positions."""
    options: dict[str, Any] = {"device": device, "seed": config.train.seed}
    if not isinstance(config.model, TransformersModelConfig):
        return build_model(config.model, **options, shares_rows=config.parallel.context > 1)
    from launch.model.transformers_model import build_transformers_model

    if config.model.checkpoint is not None:
        check_positions(config.model.build_transformers_config(), data.seq_length)
    return build_transformers_model(
        config.model,
        **options,
        trees=data.has_trees,
        tokenizer=Path(data.model.processor),
        vision=data.model.model_dump(include={"image_size", "patch_size"}),
        token_ids=task_encoder.encoder.media_token_ids,
    )


def check_trees(config: LaunchConfig, data: PackedData) -> None:
    """Check a run against packs of samples that share prefixes. Raises StageError, or ValueError if
    the model cannot compute them."""
    if not data.has_trees:
        return
    fields: dict[str, Any] = {"parallel.context": 1, "data.cross_sample_attention": False}
    if isinstance(config.model, TransformersModelConfig):
        fields["model.attention"] = "auto"  # theirs know no trees
    for name, needed in fields.items():
        value = attrgetter(name)(config)
        if value != needed:
            raise StageError(
                f"{name}={value}: samples of {config.data.path} share prefixes; set {needed}, or "
                "pack without pack.share_prefixes"
            )
    sizes = config.model.build_transformers_config()
    check_layers(sizes)
    check_positions(sizes, data.seq_length, trees=True)


def check_ends(config: LaunchConfig) -> None:
    """Warn of settings without effect, and of what the trained model will lack."""
    if config.validation.limit is not None and not config.validation.every:
        logger.warning(
            "validation.limit=%d without validation.every has no effect; set both",
            config.validation.limit,
        )
    model = config.model
    rate = config.schedule.learning_rate
    lora = model.lora if isinstance(model, TransformersModelConfig) else None
    if lora is not None and rate * lora.alpha / lora.rank < _LEAST_LORA_RATE:
        logger.warning(
            "schedule.learning_rate=%g times model.lora.alpha / rank %g hardly moves adapters, "
            "which begin at 0; they usually take 1e-4 or more",
            rate,
            lora.alpha / lora.rank,
        )
    if model.checkpoint:
        return
    logger.warning(
        "training begins with random weights, in the sizes of model.preset=%s; set "
        "model.checkpoint to begin with those of a checkpoint",
        model.preset,
    )
    is_built_here = not isinstance(model, TransformersModelConfig)  # others copy the packs'
    if config.checkpoint.export and is_built_here and not has_builtin_processor(model.family):
        logger.warning(
            "hf/ will contain no tokenizer and no image processor, as none is built in for %s; "
            "copy them from a checkpoint, or set model.checkpoint",
            model.family,
        )


def check_token_ids(model: ModelConfig, encoded_with: Mapping[str, int]) -> None:
    """Check that a model's token ids of media equal the packs', and are within its vocabulary.
    Raises StageError."""
    place, size = "model.text", model.text.get("vocab_size")
    if model.checkpoint is not None:
        config = model.build_transformers_config()
        for name, token_id in encoded_with.items():
            theirs = getattr(config, name, token_id)
            if theirs != token_id:
                raise StageError(
                    f"{model.checkpoint}/config.json has {name} {theirs}, the packs were encoded "
                    f"with {token_id}; name the checkpoint they were packed for, or pack again "
                    f"with model.processor={model.checkpoint}"
                )
        place, size = f"{model.checkpoint}/config.json", config.get_text_config().vocab_size
    name, highest = max(encoded_with.items(), key=lambda item: item[1])
    if size is not None and highest >= size:
        raise StageError(
            f"{place} has vocab_size {size:,}, and the packs hold {name} {highest:,}; give a model "
            "with their vocabulary, or pack again with its processor"
        )


def check_alike(
    config: LaunchConfig, data: Sequence[PackedData], accept_mismatch: Collection[str] = ()
) -> None:
    """Check that all ranks were started with the same settings and data. A collective. Raises
    StageError if a variable or a field differs, for example if one node got another command, or
    its copy of the packs is older."""
    own = {name: os.environ.get(name) for name in (PACKED, VQA, BMR)}
    own["--accept-mismatch"] = ", ".join(sorted(accept_mismatch))
    own["stages of data.path"] = str(len(config.data.paths))
    own["the content of data.path"] = ", ".join(one.content_hash for one in data)
    elsewhere = ("data.path", "output.path", "model.checkpoint")  # where other nodes mount them
    own |= {name: str(value) for name, value in config.settings.items() if name not in elsewhere}
    first, *others = on_all_ranks(own)
    for rank, theirs in enumerate(others, 1):
        for name, value in first.items():
            if theirs[name] != value:
                raise StageError(
                    f"{name} is {value!r} on rank 0 and {theirs[name]!r} on rank {rank}; start all "
                    "nodes with the same command, environment and data"
                )


def build_optimizer(config: LaunchConfig, model: Any, device: torch.device) -> ShardedAdamW:
    """Build the optimizer over this rank's groups. It shards the model."""
    dtype: torch.dtype | None = config.model.resolve_dtype(device)
    is_sharded = getattr(config.model, "fsdp", False)
    if isinstance(config.model, TransformersModelConfig) and not is_sharded:
        dtype = None  # autocast computes with float32 weights
    return ShardedAdamW(
        model, config.optimizer, model.layers(), dtype, device=device, stays_gathered=not is_sharded
    )


def export(trainer: Trainer, output: Path) -> None:
    """Write the trained model to `hf/` in Hugging Face's format. A collective. The model of an
    earlier checkpoint is kept as `hf_` and its number of steps."""
    folder, trained = output / "hf", dict[str, Any]()
    earlier = read_json(folder / _TRAINED, "remove it") or {}
    checkpoint = trainer.checkpoints.newest()
    if distributed.get_rank() == 0:
        assert checkpoint is not None, "a run ends with a checkpoint"
        trained = {"steps": trainer.iteration, "checkpoint": hash_file(checkpoint / STATE)}
    if on_all_ranks(earlier == trained)[0]:
        logger.info("%s holds the trained model already", folder)
        return
    if distributed.get_rank() == 0 and folder.exists():
        kept = output / f"hf_{earlier.get('steps', 'before')}"
        while kept.exists():
            kept = kept.with_name(f"{kept.name}_before")
        folder.rename(kept)
        logger.info("kept the model of an earlier run as %s", kept)
    trainer.model.save_hf_checkpoint(folder)
    if distributed.get_rank() == 0:
        write_atomically(folder / _TRAINED, to_json(trained))
    logger.info("wrote the trained model to %s", folder)
