"""Assembles a training run: groups, data, model, optimizer, trainer."""

import logging
import os
from pathlib import Path

import torch
from megatron.core import parallel_state
from torch import distributed

from launch.config import LaunchConfig
from launch.data.micro_batches import EnergonMicroBatches, build_task_encoder
from launch.data.online_data import read_data
from launch.data.packed_data import PackedData, check_validation
from launch.loop.checkpoint import CheckpointFolder
from launch.loop.optimizer import ShardedAdamW
from launch.loop.parallel import initialize_parallel, shutdown_parallel
from launch.loop.plan import TrainPlan, plan_training
from launch.loop.trainer import Trainer
from launch.model.qwen_vl import PackedQwen2VL, build_model, save_hf_checkpoint
from offline_packing.errors import StageError
from task_encoders.settings import BMR, PACKED, VQA

logger = logging.getLogger(__name__)


def run(config: LaunchConfig) -> bool:
    """Train as the configuration says, and write the trained model in Hugging Face's format.

    Returns:
        Whether the run is finished; False after SIGTERM.

    Raises:
        StageError: the data cannot be used, or there is already a run that must not be resumed.
    """
    checkpoints = config.output.path / "checkpoints"
    if not config.checkpoint.resume and any(checkpoints.glob("iter_*")):
        raise StageError(
            f"{checkpoints} holds another run; set checkpoint.resume=true to continue it, or "
            "give another output.path"
        )
    device = initialize_parallel(config.parallel.tensor, seed=config.train.seed)
    check_alike(config)
    trainer, model = build_trainer(config, device)
    if config.checkpoint.resume:
        trainer.resume()
    finished = trainer.run()
    if finished and config.checkpoint.export:
        folder = config.output.path / "hf"
        save_hf_checkpoint(model, folder)
        logger.info("wrote the trained model to %s", folder)
    shutdown_parallel()
    return finished


def build_trainer(config: LaunchConfig, device: torch.device) -> tuple[Trainer, PackedQwen2VL]:
    """The trainer of this rank, and its model. Needs `initialize_parallel`."""
    data = read_data(config.data)
    if config.validation.every:
        check_validation(Path(config.data.path))
    plan = plan_training(config, data, parallel_state.get_data_parallel_world_size())
    # The environment is checked here, before a checkpoint of many gigabytes is read.
    task_encoder = build_task_encoder(config.data, data, config.model.family)
    train_data = EnergonMicroBatches(config.data, task_encoder, device, seed=config.train.seed)
    validation_data = None
    if config.validation.every and not data.num_val_packs:
        logger.warning("no validation: %s has no packs in its val split", config.data.path)
    elif config.validation.every:
        validation_data = EnergonMicroBatches(
            config.data, task_encoder, device, split="val", limit=config.validation.limit
        )
    model = build_model(config.model, device=device, seed=config.train.seed)
    trainer = Trainer(
        config,
        plan,
        model=model,
        optimizer=build_optimizer(config, model),
        train_data=train_data,
        validation_data=validation_data,
        checkpoints=build_checkpoints(config, data, plan),
        seq_length=data.seq_length,
        device=device,
    )
    return trainer, model


def check_alike(config: LaunchConfig) -> None:
    """Check that all ranks were started with the same settings. A collective.

    Raises:
        StageError: a variable or a field differs, for example if one node got another command.
    """
    own = {name: os.environ.get(name) for name in (PACKED, VQA, BMR)}
    for section, content in config.model_dump(mode="json").items():
        for field, value in content.items():  # a set's order differs between processes
            own[f"{section}.{field}"] = str(
                sorted(value, key=str) if isinstance(value, list) else value
            )
    # nodes may mount them elsewhere
    for path in ("data.path", "data.data_prefix", "output.path", "model.checkpoint"):
        del own[path]
    everyone: list[dict[str, str | None]] = [own] * distributed.get_world_size()
    distributed.all_gather_object(everyone, own)
    for rank, theirs in enumerate(everyone):
        for name, value in everyone[0].items():
            if theirs[name] != value:
                raise StageError(
                    f"{name} is {value!r} on rank 0 and {theirs[name]!r} on rank {rank}; start all "
                    "nodes with the same command and environment"
                )


def build_optimizer(config: LaunchConfig, model: torch.nn.Module) -> ShardedAdamW:
    """The optimizer over this rank's groups."""
    options = config.optimizer
    return ShardedAdamW(
        model,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        weight_decay=options.weight_decay,
        data_parallel_group=parallel_state.get_data_parallel_group(),
        tensor_parallel_group=parallel_state.get_tensor_model_parallel_group(),
    )


def build_checkpoints(config: LaunchConfig, data: PackedData, plan: TrainPlan) -> CheckpointFolder:
    """The run's checkpoints. What decides the order of packs must not change on resuming."""
    return CheckpointFolder(
        config.output.path / "checkpoints",
        {
            "content_hash of the packs": data.content_hash,
            "data.num_workers": config.data.num_workers,
            "data.micro_batch_size": config.data.micro_batch_size,
            "data.repeat": config.data.repeat,
            # None: as in checkpoints from before there was a choice
            "data.order": None if config.data.order == "written" else config.data.order,
            "data.online": str(config.data.online) if config.data.online else None,
            "data.dyn_bsz": config.data.dyn_bsz_buffer_size if config.data.dyn_bsz else None,
            "packs per step": plan.packs_per_step,
            "parallel.tensor": config.parallel.tensor,
            "data parallel ranks": parallel_state.get_data_parallel_world_size(),
        },
        keep=config.checkpoint.keep,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        writes_model=parallel_state.get_data_parallel_rank() == 0,
    )
