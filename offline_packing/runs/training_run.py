"""Packs that a training run has trained, from its newest checkpoint: `source.skip: {trained: RUN}`.

Checkpoints of `launch.train` and `launch.train_transformers` name the packs of each stage, and how
far they came in them (`launch.loop.checkpoint.Progress`). Other trainers' states name no packs.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from offline_packing.errors import DamagedError, StageError
from offline_packing.storage.files import read_json
from task_encoders.storage.paths import path_of

logger = logging.getLogger(__name__)

#: The stages that a run has begun.
Trained = Sequence[Mapping[str, Any]]


def read_trained(path: str) -> Trained:
    """The stages of the run with this output.path. Raises StageError if no checkpoint names any."""
    states = (path_of(path) / "checkpoints").glob("iter_*/state.json")
    for state in sorted((one for one in states if not one.parent.suffix), reverse=True):
        try:
            content = read_json(state) or {}
        except DamagedError as error:
            logger.warning("source.skip: %s; an earlier checkpoint is read", error)
            continue
        if "trained" not in content:
            break
        trained: Trained = content["trained"]
        return trained
    raise StageError(
        f"source.skip: {path} has no checkpoint that names packs: only launch.train and "
        "launch.train_transformers write such, and not where they pack while training"
    )
