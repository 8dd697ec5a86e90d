"""append: new data become further shards of a complete dataset; the old shards stay as they are.

The configuration names the new data, or the old sources that have grown: of these only new files,
and new lines at the end of JSONL files, are measured. What follows is measure, plan and write with
artifacts of their own in _packing/append-0001/; the manifest and the metadata come last and cover
old and new.
"""

import logging
import shutil
from dataclasses import replace
from typing import Final

from offline_packing.errors import StageError
from offline_packing.measure.measure import measure
from offline_packing.measure.repeats import estimate_records
from offline_packing.measure.scan_sources import scan_sources
from offline_packing.plan.plan import plan
from offline_packing.runs.generations import adopt_sources, earlier_generations
from offline_packing.runs.manifest import Manifest, require_manifest
from offline_packing.runs.run import Stage, open_encoder
from offline_packing.write.write import write

logger = logging.getLogger(__name__)

_DRY_RUN_SAMPLES: Final = 4096


def append(stage: Stage) -> Manifest:
    """Add the configuration's data to its output; returns the manifest of the whole.

    Killed and run again, it goes on. Where there is no new sample, nothing changes.

    Raises:
        StageError: nothing complete to append to, it was made for another kind of training, a
            source is to be used otherwise than before, or a file that is packed was changed.
    """
    manifest = require_manifest(stage)
    own = next_stage(stage, manifest)
    info = measure(own)
    if info.num_samples + info.num_set_aside == 0:
        logger.info("append: no new samples")
        shutil.rmtree(own.workspace.stages, ignore_errors=True)  # of files without a sample
        return manifest
    plan(own)
    return write(own)


def preview_append(stage: Stage) -> str:
    """What `append` would measure; nothing is written. Raises StageError as `append`."""
    lines = []
    for one in scan_sources(next_stage(stage, require_manifest(stage)), _DRY_RUN_SAMPLES):
        count, is_exact = estimate_records(one.source, one.scan.parts)
        about = "" if is_exact else "about "
        lines.append(f"would measure {about}{count:,} new records of {one.source.path}\n")
    return "".join(lines)


def next_stage(stage: Stage, manifest: Manifest) -> Stage:
    """The stage that appends a stage's sources to a complete dataset."""
    _check_compatible(stage, manifest)
    own = replace(stage, generation=len(manifest["appended"]) + 1)
    return replace(own, config=adopt_sources(stage.config, earlier_generations(own)))


def _check_compatible(stage: Stage, manifest: Manifest) -> None:
    """Raise StageError where old and new packs could not be one dataset."""
    config = stage.config
    old = manifest["config"]
    # Of the family counts what lengths depend on: packs of Qwen2-VL are packs of Qwen2.5-VL.
    model = config.model.model_dump(mode="json", exclude={"family"})
    family = open_encoder(config.model).fingerprint["family"]
    wanted = {
        "task": (manifest["task"], config.task),
        "output.layout": (manifest["layout"], config.output.layout),
        "pack.seq_length": (manifest["seq_length"], config.pack.seq_length),
        "pack.pad_multiple": (manifest["pad_multiple"], config.pack.pad_multiple),
        "output.key_prefix": (old["output"]["key_prefix"], config.output.key_prefix),
        "model.family": (manifest["fingerprint"]["model.family"], family),
        **{f"model.{name}": (old["model"].get(name), value) for name, value in model.items()},
    }
    differing = {name: pair for name, pair in wanted.items() if pair[0] != pair[1]}
    if differing:
        values = "; ".join(f"{n} was {was!r}, is {now!r}" for n, (was, now) in differing.items())
        raise StageError(
            f"the dataset in {stage.workspace.root} was made otherwise: {values}; append with the "
            "same, or choose another output.path"
        )
