"""state.json of a training run's checkpoint: written and resumed from by `launch.train` and
`launch.train_transformers`, and read by plans for `source.skip: {trained: RUN}`. Other trainers'
states name no packs.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from offline_packing.errors import DamagedError, StageError
from offline_packing.storage.files import read_json
from task_encoders.field_types import IF_ON, Count, NonNegative, first_problem
from task_encoders.loading.schedule import LoaderState, Ranks
from task_encoders.packs.manifest import FileName
from task_encoders.storage.paths import path_of

logger = logging.getLogger(__name__)

#: Stages that a run has begun: plain values of `TrainedStage`.
Trained = Sequence[Mapping[str, Any]]

VERSION: Final = 8
#: The file of a checkpoint that is written last.
STATE: Final = "state.json"


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TrainedStage(_Model):
    """Packs of a stage, the arguments of `schedule_of`, and how far the run came in them."""

    path: str
    order: Literal["written", "balanced"]
    seed: NonNegative
    repeat: bool
    micro_batch_size: Count
    #: content_hash of each output, by its path
    datasets: dict[str, str] = Field(min_length=1)
    loader: LoaderState


class RunRecord(BaseModel):
    """Settings of a run, by dotted name."""

    model_config = ConfigDict(frozen=True, extra="allow")
    __pydantic_extra__: dict[str, JsonValue]

    #: of each stage
    packs: tuple[dict[Literal["path", "content_hash"], str], ...] = Field(alias="data.packs")
    packs_per_step: tuple[Count, ...]


class TrainingState(_Model):
    """Content of a checkpoint's state.json."""

    version: Literal[8]
    run: RunRecord
    #: see `launch.loop.plan.Progress`
    iteration: NonNegative
    begins: tuple[NonNegative, ...] = Field(min_length=1)
    trained: Annotated[tuple[TrainedStage, ...], IF_ON] = ()
    #: the hash of each other file of the checkpoint
    files: dict[FileName, str] = Field(min_length=1)
    #: among whom the packs are dealt
    data_parallel: Ranks
    #: ranks that share each pack
    context_parallel: Ranks

    @model_validator(mode="after")
    def _check_begins(self) -> Self:
        steps, stages = [*self.begins, self.iteration], len(self.run.packs)
        is_whole = all({"path", "content_hash"} == one.keys() for one in self.run.packs)
        if not is_whole or not len(self.begins) <= stages == len(self.run.packs_per_step):
            raise ValueError(f"begins {self.begins} do not fit data.packs {self.run.packs}")
        if sorted(steps) != steps:
            raise ValueError(f"begins {self.begins} do not ascend to iteration {self.iteration}")
        return self


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the finished checkpoints in `checkpoints/`, newest first; damaged ones among them."""
    found = [path for path in folder.glob("iter_*") if re.fullmatch(r"iter_\d{8,}", path.name)]
    return sorted((p for p in found if p.is_dir()), key=lambda p: int(p.name[5:]), reverse=True)


def read_state(checkpoint: Path) -> TrainingState:
    """Return the state of a checkpoint. Raises DamagedError, without a remedy; and StageError: it
    is of another version."""
    try:
        content = read_json(checkpoint / STATE)
        if content is None:
            raise DamagedError(f"{STATE} is missing")
        version = content.get("version")
        if not isinstance(version, int) or version == VERSION:
            return TrainingState.model_validate(content)
    except ValidationError as error:
        raise DamagedError(f"{STATE} is damaged: {first_problem(error)}") from error
    except OSError as error:
        raise DamagedError(f"{STATE} cannot be read: {error.strerror}") from error
    except DamagedError as error:
        why = f"{STATE} is damaged: {error.__cause__}" if error.__cause__ else str(error)
        raise DamagedError(why) from error
    raise StageError(
        f"checkpoint {checkpoint} has version {version}, and {VERSION} is read here: go on with "
        "the release that wrote it, or give another output.path"
    )


def read_trained(path: str) -> Trained:
    """Read the stages of the run with this output.path. Raises StageError if no checkpoint names
    any."""
    damaged = {}
    for checkpoint in list_checkpoints(path_of(path) / "checkpoints"):
        try:
            state = read_state(checkpoint)
        except DamagedError as error:
            damaged[checkpoint] = str(error)
            continue
        for newer, why in damaged.items():
            line = "source.skip: checkpoint %s is damaged: %s; an earlier checkpoint is read, %s"
            logger.warning(line, newer, why, checkpoint.name)
        if state.trained:
            trained: Trained = state.model_dump(mode="json")["trained"]
            return trained
        break
    else:
        if damaged:
            listed = ", ".join(f"{newer.name} ({why})" for newer, why in damaged.items())
            raise StageError(
                f"source.skip: {path} holds no whole checkpoint: {listed}; restore these files, or "
                "name another run"
            )
    raise StageError(
        f"source.skip: {path} has no checkpoint that names packs: only launch.train and "
        "launch.train_transformers write such, and not where they pack while training"
    )
