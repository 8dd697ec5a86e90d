"""blend: several outputs as one dataset, in the form that Energon reads (MetadatasetV2).

    splits:
      train:
        blend:
        - path: /data/out/first
          weight: 1200        # its packs in this split, and in one epoch

A weight is the share of packs that are drawn from an output. With the number of its packs as
weight, each pack of any output comes once per epoch, on average; since packs are full, that
is also in proportion to tokens.
"""

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import yaml

from offline_packing.errors import StageError
from offline_packing.index.table import Index, IndexInfo
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.runs.figures import Hashes, count_held, hashes_of
from offline_packing.runs.manifest import hash_plan, require_manifest
from offline_packing.runs.run import Workspace
from offline_packing.storage.files import read_json
from task_encoders.packs.manifest import Manifest
from task_encoders.packs.pack_format import METADATASET
from task_encoders.storage.energon_paths import energon_url

logger = logging.getLogger(__name__)

#: Fields of a manifest that all outputs of a blend share: packs of one batch have one length.
_COMMON: Final = ("layout", "seq_length", "pad_multiple")


def blend(folders: Sequence[Path], *, each_once: bool = False) -> str:
    """The YAML of a metadataset of these outputs; its paths are absolute.

    Args:
        each_once: each pack comes exactly once per epoch (blend_epochized), not on average (blend).

    Raises:
        StageError: an output is not complete, or they were packed for another model or another
            length of sequences.
    """
    roots = [folder.resolve() for folder in folders]
    repeated = next((root for root in roots if roots.count(root) > 1), None)
    if repeated is not None:
        raise StageError(f"{repeated} is named twice; name each output once")
    outputs = {root: require_manifest(root) for root in roots}
    layout = outputs[roots[0]].layout
    if layout not in ("energon", "references"):
        raise StageError(
            f"{roots[0]} has output.layout={layout}, which Energon does not "
            "blend; pack it with output.layout=energon"
        )
    _check(outputs)
    _warn_of_same_data(outputs)
    _warn_of_shared_media(outputs)
    splits = {}
    for split in dict.fromkeys(split for one in outputs.values() for split in one.counts.packs):
        weights = {root: one.of_an_epoch("packs", split) for root, one in outputs.items()}
        blended = [
            {"path": _place(root, layout), **({"repetitions": 1} if each_once else {"weight": n})}
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


def _place(root: Path, layout: str) -> str:
    """Path at which Energon finds an output."""
    return energon_url(root / METADATASET if layout == "references" else root)


def _warn_of_same_data(outputs: Mapping[Path, Manifest]) -> None:
    """Warn of two outputs that were packed from the same files without source.skip between them."""
    first: dict[tuple[object, ...], Path] = {}
    for root, manifest in outputs.items():
        for number, source in enumerate(manifest.config["source"]):
            own = f"source.{number}."
            read = {k.removeprefix(own): v for k, v in manifest.fingerprint.items() if own in k}
            same = tuple(sorted((k, v) for k, v in read.items() if k not in ("key_prefix", "task")))
            other = first.setdefault(same, root)
            if other != root and not source.get("skip"):
                logger.warning(
                    "%s and %s were both packed from %s: its samples come twice, and one's val "
                    "split may be trained in the other; blend one of them, or pack new samples "
                    "only, by source.skip",
                    other,
                    root,
                    source["path"],
                )


def _warn_of_shared_media(outputs: Mapping[Path, Manifest]) -> None:
    """Warn of images and videos that one output is validated on, and another trains. An output
    without the index and plan of its packs is not compared."""
    hashes = {root: _media_hashes(root, manifest) for root, manifest in outputs.items()}
    for (one, splits), (other, others) in itertools.permutations(hashes.items(), 2):
        for split in sorted(splits.keys() - {"train"}):
            held = np.unique(np.concatenate(list(splits[split]())))
            if count := count_held(held, others.get("train", tuple)()):
                settings = [outputs[root].config["output"] for root in (one, other)]
                first, second = ((own.get("split"), own.get("split_seed", 0)) for own in settings)
                remedy = "pack both with one output.split and output.split_seed"
                if first == second:  # they agree on media that samples show alone
                    remedy = (
                        f"they belong to samples of several; pack {one} with output.split={{train: "
                        "1.0}, and validate on others, or give one configuration all sources"
                    )
                logger.warning(
                    "%s: %d of %d images and videos in split %s stand in the train split of %s; %s",
                    *(one, count, len(held), split, other, remedy),
                )


def _media_hashes(root: Path, manifest: Manifest) -> dict[str, Callable[[], Iterator[Hashes]]]:
    """Per split, a function that reads the hashes of its media part by part."""
    workspace = Workspace(root)
    info, stage = IndexInfo.load(workspace.index_info), read_json(workspace.plan_info)
    if info is None or stage is None or hash_plan(stage) != manifest.plan:
        return {}
    found: dict[str, Callable[[], Iterator[Hashes]]] = {}
    samples, plan, first = Index(workspace.index, info), PackPlan.load(workspace.plan), 0
    for split, count in manifest.counts.packs.items():
        bounds = plan.pack_offsets[[first, first := first + count]]
        chosen = np.zeros(info.num_samples, bool)
        chosen[plan.sample_ids[slice(*bounds)]] = True
        found[split] = partial(hashes_of, samples, "media_hash", chosen)
    return found


def _check(outputs: Mapping[Path, Manifest]) -> None:
    settings = {}
    for root, manifest in outputs.items():
        if manifest.context_parallel:
            raise StageError(
                f"{root}: packs go over 1, 2, 4 … ranks, in slots that a blend would tear apart; "
                "give one configuration all sources, and pack them in one output"
            )
        fields = manifest.fingerprint.items()
        model = {name: value for name, value in fields if name.startswith("model.")}
        settings[root] = {name: getattr(manifest, name) for name in _COMMON} | model
    root, first = next(iter(settings.items()))
    for other, own in settings.items():
        for name in sorted({*first, *own}):
            if first.get(name) != own.get(name):
                raise StageError(
                    f"{root} has {name}={first.get(name)!r}, {other} {own.get(name)!r}; a batch "
                    "holds packs of both: pack one of them again with the settings of the other"
                )
