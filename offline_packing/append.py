"""append: new data become further shards of a complete dataset; the old shards stay as they are.

The configuration names the new data, or the old source that has grown: a sample whose key an
earlier run found under the same path is left out. What follows is measure, plan and write with
artifacts of their own in _packing/append-0001/; the manifest and the metadata come last and cover
old and new.
"""

import logging
import shutil
from dataclasses import replace

from offline_packing.errors import StageError
from offline_packing.files import read_json
from offline_packing.manifest import Manifest, require_manifest
from offline_packing.measure import measure
from offline_packing.plan_stage import plan
from offline_packing.stage import Stage
from offline_packing.write import write

logger = logging.getLogger(__name__)


def append(stage: Stage) -> Manifest:
    """Add the configuration's data to its output; returns the manifest of the whole.

    Killed and run again, it goes on. Where there is no new sample, nothing changes.

    Raises:
        StageError: nothing complete to append to, or it was made for another kind of training.
    """
    manifest = require_manifest(stage)
    _check_compatible(stage, manifest)
    own = replace(stage, generation=len(manifest["appended"]) + 1)
    measure(own)
    plan(own)
    planned = read_json(own.workspace.plan / "plan.json")
    if planned["statistics"]["num_packs"] == 0:
        logger.info("append: no new samples")
        shutil.rmtree(own.workspace.stages)
        return manifest
    return write(own)


def _check_compatible(stage: Stage, manifest: Manifest) -> None:
    """Raise StageError where old and new packs could not be one dataset."""
    config = stage.config
    old = manifest["config"]
    model = config.model.model_dump(mode="json")
    wanted = {
        "task": (manifest["task"], config.task),
        "output.layout": (manifest["layout"], config.output.layout),
        "pack.seq_length": (manifest["seq_length"], config.pack.seq_length),
        "pack.pad_multiple": (manifest["pad_multiple"], config.pack.pad_multiple),
        "output.key_prefix": (old["output"]["key_prefix"], config.output.key_prefix),
        **{f"model.{name}": (old["model"].get(name), value) for name, value in model.items()},
    }
    differing = {name: pair for name, pair in wanted.items() if pair[0] != pair[1]}
    if differing:
        values = "; ".join(f"{n} was {was!r}, is {now!r}" for n, (was, now) in differing.items())
        raise StageError(
            f"the dataset in {stage.workspace.root} was made otherwise: {values}; append with the "
            "same, or choose another output.path"
        )
