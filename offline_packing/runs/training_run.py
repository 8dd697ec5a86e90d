"""What a training run trained so far, as its newest checkpoint says: `source.skip: {trained: RUN}`.

`launch.train` and `launch.train_transformers` write there, for each stage that the run ever began,
the path and the manifests' hashes of its packs, how they were scheduled, and the state of that
schedule. Other trainers' states name no packs.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from offline_packing.errors import DamagedError, StageError
from offline_packing.storage.files import read_json
from task_encoders.storage.paths import path_of

logger = logging.getLogger(__name__)

#: Of each stage of a run, see `launch.loop.checkpoint.Progress`.
Trained = Sequence[Mapping[str, Any]]


def read_trained(path: str) -> Trained:
    """The stages that the run with this output.path has begun. Raises StageError if it has no
    checkpoint, or one that names no packs."""
    folder = path_of(path) / "checkpoints"
    states = [one for one in folder.glob("iter_*/state.json") if not one.parent.suffix]
    for state in sorted(states, reverse=True):
        try:
            content = read_json(state)
        except DamagedError as error:
            logger.warning("source.skip: %s; an earlier checkpoint is read", error)
            continue
        if content and "trained" in content:
            trained: Trained = content["trained"]
            return trained
        raise StageError(
            f"source.skip: {state} names no packs: that run packed while it trained, or another "
            "release wrote it"
        )
    raise StageError(
        f"source.skip: {path} has no checkpoint of launch.train or launch.train_transformers; "
        "other trainers' states do not name the packs they trained"
    )
