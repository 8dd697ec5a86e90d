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

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from offline_packing.errors import StageError
from offline_packing.storage.files import read_json
from task_encoders.packs.pack_format import METADATASET

#: Fields of a manifest that all outputs of a blend share: packs of one batch have one length.
_COMMON: Final = ("layout", "seq_length", "pad_multiple")


def blend(folders: Sequence[Path], *, epochs: bool = False) -> str:
    """The YAML of a metadataset of these outputs; its paths are absolute.

    Args:
        epochs: each pack comes exactly once per epoch (blend_epochized), not on average (blend).

    Raises:
        StageError: an output is not complete, or they were packed for another model or another
            length of sequences.
    """
    roots = [folder.resolve() for folder in folders]
    repeated = next((root for root in roots if roots.count(root) > 1), None)
    if repeated is not None:
        raise StageError(f"{repeated} is named twice; name each output once")
    outputs = {root: _read_manifest(root) for root in roots}
    layout = outputs[roots[0]]["layout"]
    if layout not in ("energon", "references"):
        raise StageError(
            f"{roots[0]} has output.layout={layout}, which Energon does not "
            "blend; pack it with output.layout=energon"
        )
    _check_same(outputs)
    packs = {root: _packs_of_an_epoch(manifest) for root, manifest in outputs.items()}
    splits = {}
    for split in dict.fromkeys(split for counts in packs.values() for split in counts):
        weights = {root: counts.get(split, 0) for root, counts in packs.items()}
        inside = METADATASET if layout == "references" else ""
        blended = [
            {"path": str(root / inside), **({"repetitions": 1} if epochs else {"weight": n})}
            for root, n in weights.items()
            if n
        ]
        if blended:
            splits[split] = {"blend_epochized" if epochs else "blend": blended}
    head = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": splits}
    about = "# Weights are numbers of packs: each pack comes once per epoch, on average.\n"
    if epochs:
        about = "# Each pack comes as often per epoch as repetitions say.\n"
    return about + yaml.safe_dump(head, sort_keys=False)


def _packs_of_an_epoch(manifest: Mapping[str, Any]) -> dict[str, int]:
    """By split; the mean, rounded up, where each epoch has packs of its own."""
    epochs = manifest.get("epochs", {})
    counts = manifest["counts"]["packs"]
    return {split: -(-count // len(epochs.get(split, [0]))) for split, count in counts.items()}


def _read_manifest(root: Path) -> Mapping[str, Any]:
    manifest: Mapping[str, Any] | None = read_json(root / "manifest.json")
    if manifest is None or not {"counts", "config", "fingerprint"} <= set(manifest):
        raise StageError(f"{root} is not complete: it has no manifest.json; run write first")
    return manifest


def _check_same(outputs: Mapping[Path, Mapping[str, Any]]) -> None:
    settings = {}
    for root, manifest in outputs.items():
        fields = manifest["fingerprint"].items()
        model = {name: value for name, value in fields if name.startswith("model.")}
        settings[root] = {name: manifest[name] for name in _COMMON} | model
    root, first = next(iter(settings.items()))
    for other, own in settings.items():
        for name in sorted({*first, *own}):
            if first.get(name) != own.get(name):
                raise StageError(
                    f"{root} has {name}={first.get(name)!r}, {other} {own.get(name)!r}; a batch "
                    "holds packs of both: pack one of them again with the settings of the other"
                )
