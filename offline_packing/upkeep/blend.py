"""blend: several outputs as one dataset, in the form that Energon reads (MetadatasetV2).

    splits:
      train:
        blend:
        - path: /data/out/first
          weight: 1200        # its packs in this split

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

#: Fields of a manifest that all outputs of a blend share: packs of one batch have one length.
_COMMON: Final = ("layout", "seq_length", "pad_multiple")


def blend(folders: Sequence[Path]) -> str:
    """The YAML of a metadataset of these outputs; its paths are absolute.

    Raises:
        StageError: an output is not complete, two have the same pack keys, or they were packed for
            another model or another length of sequences.
    """
    roots = [folder.resolve() for folder in folders]
    if len(set(roots)) < len(roots):
        raise StageError(f"{_repeated(roots)} is named twice; name each output once")
    manifests = [_read_manifest(root) for root in roots]
    _check_layout(roots[0], manifests[0])
    _check_same(roots, manifests)
    _check_keys_apart(roots, manifests)
    names = dict.fromkeys(split for one in manifests for split in one["counts"]["packs"])
    packs = {split: [one["counts"]["packs"].get(split, 0) for one in manifests] for split in names}
    splits = {
        split: {
            "blend": [
                {"path": str(root), "weight": count}
                for root, count in zip(roots, counts, strict=True)
                if count
            ]
        }
        for split, counts in packs.items()
        if any(counts)
    }
    head = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": splits}
    about = "# Weights are numbers of packs: each pack comes once per epoch, on average.\n"
    return about + yaml.safe_dump(head, sort_keys=False)


def _read_manifest(root: Path) -> Mapping[str, Any]:
    manifest = read_json(root / "manifest.json")
    if not isinstance(manifest, dict) or not {"counts", "config", "fingerprint"} <= set(manifest):
        raise StageError(
            f"{root} is not a complete output: it has no manifest.json; run write first"
        )
    return manifest


def _check_layout(root: Path, manifest: Mapping[str, Any]) -> None:
    if manifest["layout"] != "energon":
        raise StageError(
            f"{root} has output.layout={manifest['layout']}, which Energon does not blend; pack it "
            "with output.layout=energon"
        )


def _settings(manifest: Mapping[str, Any]) -> dict[str, Any]:
    fingerprint = manifest["fingerprint"].items()
    model = {name: value for name, value in fingerprint if name.startswith("model.")}
    return {**{name: manifest[name] for name in _COMMON}, **model}


def _check_same(roots: Sequence[Path], manifests: Sequence[Mapping[str, Any]]) -> None:
    first = _settings(manifests[0])
    for root, manifest in zip(roots, manifests, strict=True):
        own = _settings(manifest)
        for name in sorted({*first, *own}):
            if first.get(name) != own.get(name):
                raise StageError(
                    f"{roots[0]} has {name}={first.get(name)!r}, {root} {own.get(name)!r}; a batch "
                    "holds packs of both: pack one of them again with the settings of the other"
                )


def _check_keys_apart(roots: Sequence[Path], manifests: Sequence[Mapping[str, Any]]) -> None:
    """Keys are output.key_prefix and a number from 0 on."""
    found: dict[str, Path] = {}
    for root, manifest in zip(roots, manifests, strict=True):
        prefix = manifest["config"]["output"]["key_prefix"]
        other = found.setdefault(prefix, root)
        if other != root:
            raise StageError(
                f"{other} and {root} share pack keys ({prefix}ps_00000000, …); write one of "
                "them again with another output.key_prefix, such as b"
            )


def _repeated(roots: Sequence[Path]) -> Path:
    return next(root for i, root in enumerate(roots) if root in roots[:i])
