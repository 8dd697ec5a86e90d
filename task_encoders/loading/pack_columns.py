"""Columns of a folder's packs that its manifest records: media, and operations of the model; and
the order of packs in which steps are of one kind."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from task_encoders.loading.folder_shards import Numbers, ShardRange, spread
from task_encoders.packs.manifest import Manifest, PackColumns, read_manifest
from task_encoders.packs.pack_format import PREFIX


def read_columns(shards: Sequence[ShardRange], order: Numbers) -> PackColumns | None:
    """Columns of the shards' packs, in the given order. None: a manifest is missing. Raises
    ManifestError."""
    parts: dict[Any, tuple[npt.NDArray[np.uint8], npt.NDArray[np.float64]]] = {}
    for root in {shard.root for shard in shards}:
        manifest = read_manifest(root)
        if manifest is None:
            return None
        lines = {line.name: [line] for line in manifest.shards}
        for line in manifest.shards:  # one file of references, or of token ids, holds a split's
            indexed = PREFIX if line.split == "train" else f"{PREFIX}_{line.split}"
            for name in (f"{line.split}.jsonl", indexed):
                lines.setdefault(name, []).append(line)
        for name, own in lines.items():
            media = np.concatenate([line.media_of_packs() for line in own])
            parts[root / name] = media, np.concatenate([line.flops_of_packs() for line in own])
    if not shards:
        return None
    media = np.concatenate([parts[s.path][0][s.start : s.end] for s in shards])
    flops = np.concatenate([parts[s.path][1][s.start : s.end] for s in shards])
    return PackColumns(media[order], flops[order, 0], flops[order, 1])


def order_of_steps(shards: Sequence[ShardRange], order: Numbers, split: str) -> tuple[Numbers, int]:
    """The packs of an epoch, those of each step side by side, and the ranks that the steps are for,
    where all datasets were packed with `pack.order.uniform` for as many; else the order and 0.

    Any divisor of these ranks that reads the packs in turn has packs of one kind at each step.
    """
    roots = list(dict.fromkeys(shard.root for shard in shards))
    manifests = [read_manifest(root) for root in roots]
    ranks = {manifest.uniform_ranks if manifest else 0 for manifest in manifests}
    if len(ranks) != 1 or not (num_ranks := ranks.pop()):
        return order, 0
    tables, draws, first = [], [], 0
    for root, manifest in zip(roots, manifests, strict=True):
        assert manifest is not None
        size = sum(shard.num_packs for shard in shards if shard.root == root)
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


def dealt_in_rows(num_packs: int, num_ranks: int, packs_per_row: int) -> list[int]:
    """Numbers of packs in an order in which rows of several, dealt to the ranks in turn, hold packs
    of the same steps: 8 packs, 2 ranks, 2 packs per row: 0 2 | 1 3 | 4 6 | 5 7."""
    numbers = np.arange(num_packs)
    whole = num_packs // (num_ranks * packs_per_row) * num_ranks * packs_per_row
    rows = numbers[:whole].reshape(-1, packs_per_row, num_ranks).transpose(0, 2, 1)
    return [*rows.ravel().tolist(), *numbers[whole:].tolist()]


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
