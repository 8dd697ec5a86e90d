"""A training run in transformers' Trainer or TRL's SFTTrainer, from the configuration of our own
loop. Fields that they lack are refused."""

import logging
import os
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from torch import distributed
from transformers import AutoTokenizer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from launch.config import LaunchConfig, MetricsConfig
from launch.data.micro_batches import build_task_encoder
from launch.data.open_packs import open_packs
from launch.data.packed_data import PackedData, read_packed_data
from launch.loop.ends import StopRequest, check_ends, check_token_ids
from launch.loop.plan import TrainPlan, plan_training
from launch.loop.run_record import check_same_run, run_record
from launch.loop.setup import build_run_model
from launch.trainers.transformers_trainer import PackedTrainer
from offline_packing.errors import StageError
from offline_packing.storage.files import read_json, to_json, write_atomically
from task_encoders.text.qwen_vocabulary import BUILTIN

logger = logging.getLogger(__name__)

#: Options that only our own loop has.
_MISSING: Final = {
    "train.normalization": "token",
    "data.order": "interleaved",
    "data.online": None,
    "data.dyn_bsz": False,
    "data.pad_to_length": False,
    "data.task_encoder": None,
    "model.fsdp": False,
    "validation.limit": None,
}

#: The variables in which transformers' callbacks look for the projects of trackers.
_PROJECTS: Final = {"wandb": "WANDB_PROJECT", "swanlab": "SWANLAB_PROJECT"}


class _Stop(TrainerCallback):
    """Save and end after the step in which a rank was asked to stop."""

    def __init__(self, request: StopRequest) -> None:
        self.request = request

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """See TrainerCallback."""
        if distributed.is_initialized():
            signal = torch.tensor(self.request.received, device=args.device)
            distributed.all_reduce(signal, op=distributed.ReduceOp.MAX)
            self.request.received = int(signal)
        if self.request.received and not control.should_training_stop:
            control.should_save = control.should_training_stop = True


def run_in(trainer: str, config: LaunchConfig, accept_mismatch: Collection[str] = ()) -> int:
    """Train in `transformers` or `trl`, and write the trained model to `hf/`.

    Returns:
        The exit status, as of `launch.loop.setup.run`.

    Raises:
        ValueError: the trainer lacks a field that is set.
        StageError: there is already a run that must not be resumed.
    """
    _check(trainer, config)
    data = read_packed_data(config.data.path)
    make_arguments, make_trainer = _classes(trainer, config, data)
    name_projects(config.metrics)
    args = make_arguments(**_arguments(config))  # joins the process group
    plan = plan_training(config, data, args.world_size)
    args.max_steps, args.warmup_steps = plan.iterations, plan.warmup_iterations
    args.gradient_accumulation_steps = plan.accumulation
    folder = Path(args.output_dir)
    resumed = get_last_checkpoint(folder) if folder.is_dir() else None
    _check_record(config, data, plan, resumed, accept_mismatch, is_main=args.process_index == 0)
    task_encoder = build_task_encoder(config.data, data, config.model.family)
    check_token_ids(config.model, task_encoder.encoder.media_token_ids)
    model = build_run_model(config, data, task_encoder, args.device)
    validates = bool(config.validation.every)
    running = make_trainer(
        args=args,
        model=model.model,
        train_dataset=open_packs(config.data.path, task_encoder),
        eval_dataset=open_packs(config.data.path, task_encoder, "val") if validates else None,
    )
    with StopRequest() as stop:
        running.add_callback(_Stop(stop))
        running.train(resume_from_checkpoint=resumed)
    if running.state.global_step < plan.iterations and stop.received:
        logger.info("stopped after %d steps; run again to continue", running.state.global_step)
        return 128 + stop.received
    if config.checkpoint.export:
        model.save_hf_checkpoint(config.output.path / "hf")
    return 0


def _check(trainer: str, config: LaunchConfig) -> None:
    check_ends(config)
    for name, value in _MISSING.items():
        section, field = name.split(".")
        if getattr(getattr(config, section), field) != value:
            raise ValueError(f"--trainer {trainer} has no {name}; leave both out, or one of them")
    if trainer == "trl" and find_spec("trl") is None:
        raise ValueError("--trainer trl needs the trl package: pip install trl")


def _classes(trainer: str, config: LaunchConfig, data: PackedData) -> tuple[Any, Any]:
    """Classes of the arguments and of the trainer."""
    if trainer == "transformers":
        return TrainingArguments, PackedTrainer
    from functools import partial

    from trl import SFTConfig

    from launch.trainers.trl_trainer import PackedSFTTrainer

    processor = str(config.model.checkpoint or data.model.processor)
    if processor == BUILTIN:
        from task_encoders.families.builtin_processor import builtin_processor

        tokenizer = builtin_processor(config.model.family).tokenizer
    else:
        tokenizer = AutoTokenizer.from_pretrained(processor)
    return SFTConfig, partial(PackedSFTTrainer, processing_class=tokenizer)


def name_projects(metrics: MetricsConfig) -> None:
    """Put the projects of trackers where transformers reads them: in the environment."""
    for tracker, variable in _PROJECTS.items():
        if project := getattr(metrics, tracker):
            os.environ[variable] = project


def _arguments(config: LaunchConfig) -> dict[str, Any]:
    """The configuration in the words of TrainingArguments; steps follow from the ranks."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    schedule, optimizer, metrics = config.schedule, config.optimizer, config.metrics
    kinds = {
        "cosine": "cosine_with_min_lr",
        "linear": "linear",
        "constant": "constant_with_warmup",
    }
    if schedule.decay == "linear" and schedule.min_learning_rate:
        raise ValueError("transformers' linear schedule ends at 0; set min_learning_rate to 0")
    trackers = [name for name in ("tensorboard", "wandb", "swanlab") if getattr(metrics, name)]
    is_cosine = schedule.decay == "cosine"
    return {
        "output_dir": str(config.output.path / "checkpoints"),
        "learning_rate": schedule.learning_rate,
        "lr_scheduler_type": kinds[schedule.decay],
        "lr_scheduler_kwargs": {"min_lr": schedule.min_learning_rate} if is_cosine else {},
        "adam_beta1": optimizer.beta1,
        "adam_beta2": optimizer.beta2,
        "adam_epsilon": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_grad_norm or 0.0,
        "per_device_train_batch_size": config.data.micro_batch_size,
        "per_device_eval_batch_size": config.data.micro_batch_size,
        "dataloader_num_workers": config.data.num_workers,
        "seed": config.train.seed,
        "bf16": config.model.resolve_dtype(device) == torch.bfloat16,
        "use_cpu": not on_gpu,
        "logging_steps": metrics.log_every,
        "logging_first_step": True,
        "report_to": trackers or "none",
        "save_strategy": "steps",
        "save_steps": config.checkpoint.every or 10**9,  # and at the end
        "save_total_limit": config.checkpoint.keep,
        "eval_strategy": "steps" if config.validation.every else "no",
        "eval_steps": config.validation.every or None,
    }


def _check_record(
    config: LaunchConfig,
    data: PackedData,
    plan: TrainPlan,
    resumed: str | None,
    accept: Collection[str],
    *,
    is_main: bool,
) -> None:
    """Compare the run with the one that left the checkpoint, or record it."""
    path = config.output.path / "checkpoints" / "run.json"
    record = run_record(config, data, plan)
    if resumed is None:
        if is_main:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, to_json(record))
        return
    if not config.checkpoint.resume:
        raise StageError(
            f"{resumed} is of another run; set checkpoint.resume=true to continue it, or give "
            "another output.path"
        )
    for line in check_same_run(read_json(path) or {}, record, accept, resumed):
        logger.info("accepted: %s", line)
