"""Columns of a folder's packs that its manifest records: media, and operations of the model."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from task_encoders.loading.folder_shards import Numbers, ShardRange, spread
from task_encoders.packs.manifest import Manifest, PackColumns, read_manifest


def read_columns(shards: Sequence[ShardRange]) -> PackColumns | None:
    """Columns of the shards' packs, in their order. None: a manifest is missing, or is of a version
    that did not record them. Raises ManifestError."""
    parts: dict[Any, tuple[npt.NDArray[np.uint8], npt.NDArray[np.float64]]] = {}
    for root in {shard.path.parent for shard in shards}:
        manifest = read_manifest(root)
        if manifest is None or not all(line.media for line in manifest.shards):
            return None
        lines = {line.name: [line] for line in manifest.shards}
        for line in manifest.shards:  # one file of references holds those of a split
            lines.setdefault(f"{line.split}.jsonl", []).append(line)
        for name, own in lines.items():
            media = np.concatenate([line.media_of_packs() for line in own])
            parts[root / name] = media, np.concatenate([line.flops_of_packs() for line in own])
    if not shards:
        return None
    media = np.concatenate([parts[s.path][0][s.start : s.end] for s in shards])
    flops = np.concatenate([parts[s.path][1][s.start : s.end] for s in shards])
    return PackColumns(media, flops[:, 0], flops[:, 1])


def order_of_steps(shards: Sequence[ShardRange], order: Numbers, split: str) -> tuple[Numbers, int]:
    """The packs of an epoch, those of each step side by side, and the ranks that the steps are for,
    where all datasets were packed with `pack.order.uniform` for as many; else the order and 0.

    Any divisor of these ranks that reads the packs in turn has packs of one kind at each step.
    """
    roots = list(dict.fromkeys(shard.path.parent for shard in shards))
    manifests = [read_manifest(root) for root in roots]
    ranks = {manifest.uniform_ranks if manifest else 0 for manifest in manifests}
    if len(ranks) != 1 or not (num_ranks := ranks.pop()):
        return order, 0
    tables, draws, first = [], [], 0
    for root, manifest in zip(roots, manifests, strict=True):
        assert manifest is not None
        size = sum(shard.num_packs for shard in shards if shard.path.parent == root)
        table = _steps(manifest, split, size)
        if table is None:
            return order, 0
        tables.append(first + table)
        draws.append(int(((order >= first) & (order < first + size)).sum()) // num_ranks)
        first += size
    steps = np.concatenate(tables)
    sizes = [len(table) for table in tables]
    places = spread(sizes, draws) if split == "train" else np.arange(len(steps))
    return steps[places].ravel(), num_ranks


def _steps(manifest: Manifest, split: str, num_packs: int) -> Numbers | None:
    """Packs of each step, (num_steps, num_ranks) places in the written order; None where they are
    not all the packs of the split.

    Energon gives each worker of each rank a block of packs, and each rank one of each worker in
    turn: with 2 ranks of 2 workers and 8 packs, the steps are 0 4 | 2 6 | 1 5 | 3 7.
    """
    order = manifest.config["pack"]["order"]
    ranks, workers = order["num_ranks"], max(1, order["num_workers"])
    sizes = manifest.epochs.get(split) or (manifest.counts.packs.get(split, 0),)
    if sum(sizes) != num_packs or any(size % (ranks * workers) for size in sizes):
        return None
    tables, first = [np.empty((0, ranks), np.int64)], 0
    for size in sizes:
        blocks = first + np.arange(size).reshape(ranks, workers, -1)
        tables.append(blocks.transpose(2, 1, 0).reshape(-1, ranks))
        first += size
    return np.concatenate(tables)
