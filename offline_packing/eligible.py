"""Which rows of an index are planned: not those whose key came before, not those that an earlier
generation packed, not those that the layout cannot hold."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from offline_packing.config import SourceConfig
from offline_packing.files import read_json
from offline_packing.index import Index, IndexInfo, key_hash, read_set_aside
from offline_packing.shard_rows import rows_of_shards
from offline_packing.stage import Stage

Rows = npt.NDArray[np.int64]


def name_rows(samples: Index, rows: Rows) -> pa.Table:
    """source_id and key of some rows, in the given order."""
    return next(rows_of_shards(samples, ("source_id", "key"), [rows], Path()))


def find_duplicates(hashes: npt.NDArray[np.uint64], name: Callable[[Rows], pa.Table]) -> Rows:
    """Rows whose key an earlier row of the same source has, ascending.

    Equal hashes are found by sorting; the few rows that have one are compared by their keys.

    Args:
        hashes: (num_samples,) key_hash of the index.
        name: gives source_id and key of some rows, see `name_rows`.
    """
    order = np.argsort(hashes, kind="stable")
    equal = hashes[order[1:]] == hashes[order[:-1]]
    suspects = np.union1d(order[1:][equal], order[:-1][equal])
    seen: set[tuple[int, str]] = set()
    repeated: list[int] = []
    for row, named in zip(suspects.tolist(), name(suspects).to_pylist(), strict=True):
        identity = (named["source_id"], named["key"])
        if identity in seen:
            repeated.append(row)
        seen.add(identity)
    return np.array(repeated, dtype=np.int64)


def find_unfit(samples: Index) -> Rows:
    """Rows without exactly one image and one turn, or with a video, ascending."""
    fit = (samples.array("num_images") == 1) & (samples.array("num_turns") == 1)
    return np.flatnonzero(~fit | (samples.array("num_videos") > 0))


def find_repeated(stage: Stage, samples: Index) -> Rows:
    """Rows of samples that an earlier generation of this output had already, ascending: samples
    with the same key from the same path."""
    repeated = np.zeros(samples.info.num_samples, dtype=bool)
    if stage.generation == 0:
        return np.flatnonzero(repeated)
    source_ids = samples.array("source_id")
    hashes = samples.array("key_hash")
    for earlier, sources in _earlier_generations(stage):
        known_ids, known_hashes = earlier.array("source_id"), earlier.array("key_hash")
        for old_id, new_id in _same_paths(sources, stage.config.source):
            rows = np.flatnonzero(source_ids == new_id)
            own = hashes[rows]
            if old_id != new_id:  # the hash covers the number of the source
                keys = name_rows(samples, rows)["key"].to_pylist()
                own = np.array([key_hash(old_id, key) for key in keys], dtype=np.uint64)
            repeated[rows] |= np.isin(own, known_hashes[known_ids == old_id])
    return np.flatnonzero(repeated)


def count_repeated_set_aside(stage: Stage, samples: Index) -> dict[str, int]:
    """How many samples, by reason, were set aside now and by an earlier generation."""
    seen: set[tuple[str, str]] = set()
    for number in range(stage.generation):
        workspace = stage.workspace.of_generation(number)
        info = IndexInfo.load(workspace.index_info)
        if info is not None:
            rows = read_set_aside(workspace.set_aside, len(info.part_rows))
            seen.update((row["source"], row["key"]) for row in rows)
    if not seen:
        return {}
    rows = read_set_aside(stage.workspace.set_aside, len(samples.info.part_rows))
    return dict(Counter(row["reason"] for row in rows if (row["source"], row["key"]) in seen))


def _earlier_generations(stage: Stage) -> list[tuple[Index, list[SourceConfig]]]:
    """Index and sources of each earlier generation."""
    manifest: Mapping[str, Any] = read_json(stage.workspace.manifest)
    origins = [manifest, *manifest["appended"]][: stage.generation]
    found = []
    for number, origin in enumerate(origins):
        workspace = stage.workspace.of_generation(number)
        info = IndexInfo.load(workspace.index_info)
        assert info is not None, f"generation {number} is in the manifest"
        sources = [SourceConfig(**source) for source in origin["config"]["source"]]
        found.append((Index(workspace.index, info), sources))
    return found


def _same_paths(old: Sequence[SourceConfig], new: Sequence[SourceConfig]) -> list[tuple[int, int]]:
    """Numbers of the sources with the same path."""
    return [
        (i, j)
        for i, before in enumerate(old)
        for j, after in enumerate(new)
        if _location(before.path) == _location(after.path)
    ]


def _location(path: str) -> str:
    return path if "://" in path else str(Path(path).resolve())
