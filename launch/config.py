"""The configuration of a training run: one YAML file, with overrides `a.b=value`.

Every model is frozen and refuses unknown keys. Relative paths are relative to the current folder.
Settings that packs determine (seq_length, pixel limits, tokenizer) are read from their manifest.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from launch.model.config import ModelConfig, Section
from offline_packing.storage.yaml_file import read_config
from task_encoders.families import AnyModelOptions, model_options
from task_encoders.field_types import (
    BudgetName,
    Count,
    LocalOrRemotePaths,
    NonNegative,
    Number,
    not_bool,
)

#: Weights are near .02; a greater rate, probably a typing error, would undo them in one step.
MAX_RATE: Final = 0.1


class OnlineConfig(Section):
    """Packing of unpacked data while training, by the loader's processes."""

    #: tokens of a pack
    seq_length: Count
    #: samples that a process takes in before it plans again
    buffer: Count = 1000
    #: as pack.strategy
    strategy: str = "auto"
    #: as pack.budgets
    budgets: dict[BudgetName, Count] = Field({})
    #: as the model section of a packing run
    model: AnyModelOptions = model_options()


class DataConfig(Section):
    """The packs, and how they are read."""

    #: a folder of packs, here or s3://…, or a metadataset YAML that blends several; a list of
    #: these: stages that are trained one after another
    path: LocalOrRemotePaths
    #: packs per row (Megatron's MBS)
    micro_batch_size: Count = 1
    #: loader processes per data parallel rank; 0 reads in the trainer's process
    num_workers: NonNegative = 2
    #: false: the run ends after one pass over the packs
    repeat: bool = True
    #: written: rank r of W reads packs r, r + W, …; balanced: by cost
    order: Literal["written", "balanced"] = "written"
    #: folder of the processor, if it was moved since the data were measured
    processor: str | None = None
    #: threads in which a loader process encodes; each holds up to two decoded images
    encode_threads: Count = 1
    #: samples of a pack attend to each other, unlike in unpacked training
    cross_sample_attention: bool = False
    #: module:Class, your own task encoder, with the arguments of PackedTaskEncoder
    task_encoder: str | None = None
    #: path holds unpacked data for Energon, to be packed by the loader's processes
    online: OnlineConfig | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        """The path of each stage."""
        return (self.path,) if isinstance(self.path, str) else self.path


class BatchConfig(Section):
    """Amount of data per step. Set one of the two."""

    #: samples per step, as without packing (GBS); divided by the samples per pack
    global_batch_size: Count | None = None
    #: packs per step
    global_batch_packs: Count | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> "BatchConfig":
        samples, packs = self.global_batch_size, self.global_batch_packs
        if samples is not None and packs is not None:
            raise ValueError(
                f"global_batch_size {samples} (samples) and global_batch_packs {packs} are both "
                "set; leave out one of them"
            )
        if samples is None and packs is None:
            raise ValueError("set one of global_batch_size (samples) and global_batch_packs")
        return self


class TrainConfig(Section):
    """Length of the run, and its loss."""

    #: passes over the packs of each stage
    epochs: Annotated[float, BeforeValidator(not_bool), Field(gt=0)] = 1
    #: steps, instead of epochs
    iterations: Count | None = None
    #: unit of equal weight in a step: a token (times its answer's weight) or a sample; sqrt: a
    #: sample weighs the square root of its labelled tokens, as in InternVL
    normalization: Literal["token", "sample", "sqrt"] = "token"
    #: seed of random weights and of orders of the data
    seed: NonNegative = 0


class OptimizerConfig(Section):
    """AdamW."""

    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    #: above 1e-3, more than most gradients, the steps would all but vanish
    eps: Annotated[float, Field(gt=0, le=1e-3)] = 1e-8
    #: decay of matrices; other weights have none
    weight_decay: Number = 0.01
    #: limit of the gradient's norm over all ranks; null: no clipping
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0


class ScheduleConfig(Section):
    """The learning rate."""

    #: greatest rate: AdamW moves every weight by about this much in a step
    learning_rate: Annotated[float, BeforeValidator(not_bool), Field(gt=0, le=MAX_RATE)] = 1e-5
    min_learning_rate: Number = 0.0
    #: share of the iterations in which the rate rises
    warmup: Annotated[float, BeforeValidator(not_bool), Field(ge=0, lt=1)] = 0.03
    decay: Literal["cosine", "linear", "constant"] = "cosine"

    @model_validator(mode="after")
    def _check_rates(self) -> "ScheduleConfig":
        if self.decay == "constant" and self.min_learning_rate:
            raise ValueError(
                f"min_learning_rate {self.min_learning_rate:g} is never reached with "
                "decay=constant; choose cosine or linear, or leave it out"
            )
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"min_learning_rate {self.min_learning_rate:g} > learning_rate "
                f"{self.learning_rate:g}; lower it"
            )
        return self


class ParallelConfig(Section):
    """Parallelism of the ranks. The remaining factor of the ranks is data parallel."""

    #: ranks that share a layer (TP)
    tensor: Count = 1
    #: ranks that share a row (CP); packs need pack.context_parallel
    context: Count = 1


class CheckpointConfig(Section):
    """Times of checkpoints, and the number that are kept."""

    #: steps between checkpoints; 0: only at the end, and on SIGTERM
    every: NonNegative = 500
    #: number of newest checkpoints that are kept
    keep: Count = 2
    #: continue from the newest checkpoint in output.path
    resume: bool = True
    #: write hf/ at the end, for transformers; an earlier one is kept as hf_STEPS
    export: bool = True


class ValidationConfig(Section):
    """Loss on the val split."""

    #: steps between validations on the val split, and one at the end; 0: never
    every: NonNegative = 0
    #: micro batches per rank; null: the whole split
    limit: Count | None = None


class MetricsConfig(Section):
    """Metrics and their trackers."""

    #: steps between lines; the first and the last are always logged
    log_every: Count = 10
    #: needs the tensorboard package
    tensorboard: bool = False
    #: project in Weights & Biases; needs the wandb package
    wandb: str | None = None
    #: project in SwanLab; needs the swanlab package (from 0.10, whose protobuf is below 7)
    swanlab: str | None = None


class OutputConfig(Section):
    """Folder of the results: metrics.jsonl, checkpoints/, hf/, and files of trackers."""

    #: the folder for checkpoints, metrics and exports
    path: Path


class LaunchConfig(Section):
    """Everything one training run is made from."""

    model: ModelConfig = ModelConfig()
    data: DataConfig
    batch: BatchConfig
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    validation: ValidationConfig = ValidationConfig()
    metrics: MetricsConfig = MetricsConfig()
    output: OutputConfig

    @model_validator(mode="after")
    def _check_together(self) -> "LaunchConfig":
        if self.data.online and len(self.data.paths) > 1:
            raise ValueError(
                "data.online packs during training and has no stages; set data.path to one folder"
            )
        if self.data.online and (self.data.order != "written" or self.validation.every):
            raise ValueError(
                "data.online makes packs during training, which can be neither ordered nor "
                "validated; set data.order=written and validation.every=0"
            )
        if self.output.path.resolve() in [Path(path).resolve() for path in self.data.paths]:
            raise ValueError(
                f"output.path {str(self.output.path)!r} is data.path, the folder of the packs; "
                "choose another output.path"
            )
        is_short = not self.data.repeat and self.train.epochs > 1
        if len(self.data.paths) > 1 and (self.train.iterations or is_short):
            raise ValueError(
                "data.path lists stages of train.epochs passes each; remove train.iterations, and "
                "set data.repeat=true for more than one pass"
            )
        if self.data.cross_sample_attention and self.train.normalization != "token":
            raise ValueError(
                f"train.normalization={self.train.normalization} needs the boundaries that "
                "data.cross_sample_attention removes; set train.normalization=token"
            )
        return self

    @property
    def stages(self) -> tuple[Self, ...]:
        """The run's settings for each stage, with one path."""
        data = [self.data.model_copy(update={"path": path}) for path in self.data.paths]
        return tuple(self.model_copy(update={"data": own}) for own in data)

    @property
    def settings(self) -> dict[str, Any]:
        """Plain values of all fields by dotted name, the same in all processes: sets are sorted."""
        return {
            f"{section}.{name}": sorted(value) if name == "freeze" else value
            for section, content in self.model_dump(mode="json").items()
            for name, value in content.items()
        }


def load_config(
    path: str | Path, overrides: Sequence[str] = (), kind: type[LaunchConfig] = LaunchConfig
) -> LaunchConfig:
    """Read a YAML file, apply the overrides, and validate. A batch size among the overrides, in
    samples or in packs, replaces the file's. Raises ConfigError if the file cannot be read or
    parsed, or a field is unknown or has a bad value."""
    given = {name: text for name, _, text in (one.partition("=") for one in overrides)}
    sizes = [f"batch.{name}" for name in BatchConfig.model_fields]
    is_given = any(given.get(name, "null") != "null" for name in sizes)
    replaced = [f"{name}=null" for name in sizes if is_given and name not in given]
    return read_config(kind, path, [*replaced, *overrides])
