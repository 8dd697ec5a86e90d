"""blend: several outputs as one dataset, in the form that Energon reads (MetadatasetV2).

    splits:
      train:
        blend:
        - path: /data/out/first
          weight: 1200        # its packs in this split, and in one epoch

Packs are drawn from the outputs in proportion to their weights. With the number of its packs as
each output's weight, each pack comes once per epoch, on average; since packs are full, the outputs
are also drawn in proportion to their tokens.
"""

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import yaml

from offline_packing.errors import DamagedError, StageError
from offline_packing.online.ranks.pack_costs import artifacts_of
from offline_packing.runs.manifest import require_manifest
from offline_packing.runs.warnings import Hashes, count_shared, hashes_of
from offline_packing.storage.receipts import changed_fields
from task_encoders.packs.manifest import Manifest
from task_encoders.settings import describe_change
from task_encoders.storage.energon_paths import energon_url

logger = logging.getLogger(__name__)

#: Fields of a manifest that must be equal in all outputs: packs of one batch have one length.
_COMMON: Final = ("layout", "seq_length", "pad_multiple")
#: Function that reads a column of hashes of some samples, part by part.
_Hashes = Callable[[str], Iterator[Hashes]]


def blend(folders: Sequence[Path], *, each_once: bool = False) -> str:
    """Render the YAML of a metadataset of these outputs, with absolute paths.

    Args:
        each_once: each pack comes exactly once per epoch (blend_epochized), not on average (blend).

    Raises:
        StageError: an output is not complete, or their models or lengths of sequences differ.
    """
    roots = [folder.resolve() for folder in folders]
    repeated = next((root for root in roots if roots.count(root) > 1), None)
    if repeated is not None:
        raise StageError(f"{repeated} is named twice; name each output once")
    outputs = {root: require_manifest(root) for root in roots}
    layout = outputs[roots[0]].layout
    if layout != "energon":
        raise StageError(f"{roots[0]} has output.layout={layout}, and Energon blends energon only")
    settings = {}
    for root, manifest in outputs.items():
        fields = manifest.fingerprint.items()
        model = {name: value for name, value in fields if name.startswith("model.")}
        settings[root] = {name: getattr(manifest, name) for name in _COMMON} | model
    root, first = next(iter(settings.items()))
    for other, own in settings.items():
        for name in changed_fields(first, own):
            models = (outputs[one].config.get("model", {}) for one in (root, other))
            was, has = describe_change(name, (first.get(name), own.get(name)), *models)
            raise StageError(
                f"{root} has {was}, {other} {has}; a batch holds packs of both: pack one of them "
                "again with the settings of the other"
            )
    _warn_of_shared_samples(outputs)
    splits = {}
    for split in dict.fromkeys(split for one in outputs.values() for split in one.counts.packs):
        weights = {root: one.total("packs", split) for root, one in outputs.items()}
        blended = [
            {"path": energon_url(root), **({"repetitions": 1} if each_once else {"weight": n})}
            for root, n in weights.items()
            if n
        ]
        if blended:
            splits[split] = {"blend_epochized" if each_once else "blend": blended}
    head = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": splits}
    about = "# Weights are numbers of packs: each pack comes once per epoch, on average.\n"
    if each_once:
        about = "# Each pack comes as often per epoch as repetitions say.\n"
    return about + yaml.safe_dump(head, sort_keys=False)


def _warn_of_shared_samples(outputs: Mapping[Path, Manifest]) -> None:
    """Warn of samples that are in two outputs, and of images and videos that one output trains and
    another validates on. An output without its index and plan is not compared."""
    packed = {root: _packed_samples(root, manifest) for root, manifest in outputs.items()}
    for (other, others), (one, splits) in itertools.combinations(packed.items(), 2):
        parts = ((read("sample_hash") for read in own.values()) for own in (splits, others))
        count, held = count_shared(*map(itertools.chain.from_iterable, parts))
        if count:
            logger.warning(
                "%s: %d of %d samples are also in %s, so that they are trained twice, and samples "
                "of one val split may be trained from the other output; leave out one of the two, "
                "or pack it again with source.skip or pack.where",
                *(one, count, held, other),
            )
    for (one, splits), (other, others) in itertools.permutations(packed.items(), 2):
        for split in sorted(splits.keys() - {"train"}):
            trained = others["train"]("media_hash") if "train" in others else ()
            count, held = count_shared(splits[split]("media_hash"), trained)
            if count:
                settings = [outputs[root].config["output"] for root in (one, other)]
                first, second = ((own.get("split"), own.get("split_seed", 0)) for own in settings)
                remedy = "pack both with one output.split and output.split_seed"
                if first == second:  # they agree on media that samples show alone
                    remedy = (
                        f"they belong to samples of several; pack {one} with output.split={{train: "
                        "1.0}, and validate on others, or give one configuration all sources"
                    )
                logger.warning(
                    "%s: %d of %d images and videos in split %s are in the train split of %s; %s",
                    *(one, count, held, split, other, remedy),
                )


def _packed_samples(root: Path, manifest: Manifest) -> dict[str, _Hashes]:
    """Return, by split, a function that reads a column of hashes of its samples, part by part."""
    try:
        samples, plan = artifacts_of(root, manifest)
    except DamagedError:
        raise
    except StageError:  # it was copied without them
        return {}
    chosen = {split: np.zeros(samples.info.num_samples, bool) for split in manifest.counts.packs}
    first = 0
    for shard in manifest.shards:  # in the order of the plan
        bounds = plan.pack_offsets[[first, first := first + shard.packs]]
        chosen[shard.split][plan.sample_ids[slice(*bounds)]] = True
    return {split: partial(hashes_of, samples, chosen=own) for split, own in chosen.items()}
