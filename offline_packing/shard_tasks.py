"""Which packs go in which shard, and the task that holds all a worker needs for one shard."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from offline_packing.config import ModelConfig, OutputConfig
from offline_packing.files import read_range
from offline_packing.index import Index
from offline_packing.pack_plan import PackPlan
from offline_packing.sources import Locator, Source
from offline_packing.sources.records import to_sample
from offline_packing.stage import Stage, open_sources
from offline_packing.tar_shards import member_size, tar_size
from task_encoders.pack_format import pack_key
from task_encoders.samples import SourceSample

#: Columns of the index that a task carries.
_COLUMNS = ("key", "source_id", "num_tokens", "json", "media")

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Shard:
    """Packs first_pack to first_pack + num_packs of the plan, in `{name}.tar`."""

    name: str
    split: str
    first_pack: int
    num_packs: int


@dataclass(frozen=True)
class ShardTask:
    """One shard: rows of its samples in the order of the packs, and how many each pack has."""

    shard: Shard
    folder: Path
    fragment_path: Path
    rows: pa.Table
    pack_sizes: tuple[int, ...]
    sources: tuple[Source, ...]
    task: str
    key_prefix: str
    seq_length: int
    model: ModelConfig

    @property
    def tar_path(self) -> Path:
        """Where the shard goes."""
        return self.folder / f"{self.shard.name}.tar"

    def packs(self) -> Iterator[tuple[str, list[Row]]]:
        """Key and rows of each pack."""
        start = 0
        for i, size in enumerate(self.pack_sizes):
            rows = self.rows.slice(start, size).to_pylist()
            yield pack_key(self.shard.first_pack + i, self.key_prefix), rows
            start += size

    def read_sample(self, row: Row) -> SourceSample:
        """Read and parse a sample's record again.

        Raises:
            StageError: the record is not what was measured any more.
            SampleError: it is not usable any more.
        """
        content = self.sources[row["source_id"]].read(Locator(**row["json"]))
        names = [image["container"] for image in row["media"]]
        return to_sample(content, row["key"], self.task, names[:1] or None)

    def read_images(self, row: Row) -> list[bytes]:
        """The files of a sample's images as they are now. Raises StageError where one changed."""
        media = self.sources[row["source_id"]].media
        return [
            read_range(
                media.path(image["container"]),
                image["offset"],
                image["size"],
                whole=image["kind"] == "file",
            )
            for image in row["media"]
        ]


def split_packs(num_packs: int, shares: Mapping[str, float]) -> dict[str, range]:
    """Packs of each split, in order of the plan; at least one each, the first splits first."""
    ends = np.rint(np.cumsum(list(shares.values())) * num_packs).astype(int)
    later = len(shares) - 1 - np.arange(len(shares))
    splits: dict[str, range] = {}
    start = 0
    for name, end, reserved in zip(shares, ends.tolist(), later.tolist(), strict=True):
        if reserved == 0:
            end = num_packs
        end = max(min(end, num_packs - reserved), min(start + 1, num_packs))
        splits[name] = range(start, end)
        start = end
    return splits


def lay_out_shards(output: OutputConfig, pack_bytes: npt.NDArray[np.int64]) -> list[Shard]:
    """Cut the packs into shards; no shard holds packs of two splits. A pack that is larger than
    max_shard_bytes by itself gets a shard of its own.

    Args:
        pack_bytes: (num_packs,) bytes that each pack takes in a tar, or more.
    """
    shards: list[Shard] = []
    for split, packs in split_packs(len(pack_bytes), output.split).items():
        sizes = pack_bytes[packs.start : packs.stop].tolist()
        cuts = [packs.start]
        held = 0
        for pack, size in zip(packs, sizes, strict=True):
            full = tar_size(held + size) > (output.max_shard_bytes or math.inf)
            if pack > cuts[-1] and (full or pack - cuts[-1] == output.packs_per_shard):
                cuts.append(pack)
                held = 0
            held += size
        ends = [*cuts[1:], packs.stop]
        shards += [
            Shard(f"{split}-{i:06d}", split, start, end - start)
            for i, (start, end) in enumerate(zip(cuts, ends, strict=True))
            if end > start
        ]
    return shards


def plan_shards(stage: Stage, samples: Index, plan: PackPlan) -> list[Shard]:
    """The shards of a plan."""
    if stage.config.output.max_shard_bytes is None:
        return lay_out_shards(stage.config.output, np.zeros(plan.num_packs, dtype=np.int64))
    return lay_out_shards(stage.config.output, estimate_pack_bytes(samples, plan))


def estimate_pack_bytes(samples: Index, plan: PackPlan) -> npt.NDArray[np.int64]:
    """(num_packs,) bytes of each pack in a tar. Exact for media; the pack's JSON is taken to be no
    larger than its records, whose text it holds, and 96 bytes per sample and image beside it."""
    table = samples.table("key", "json", "media")
    media = table["media"].combine_chunks()
    counts = np.diff(media.offsets.to_numpy())
    sizes = media.flatten().field("size").to_numpy()
    in_tar = 512 + -(-sizes // 512) * 512 + 96
    ends = np.concatenate([[0], np.cumsum(in_tar)])
    last = np.cumsum(counts)
    record = table["json"].combine_chunks().field("size").to_numpy()
    keys = table["key"].combine_chunks().to_numpy(zero_copy_only=False)
    key_bytes = np.fromiter((len(key.encode()) for key in keys), dtype=np.int64, count=len(keys))
    per_sample = ends[last] - ends[last - counts] + record + key_bytes + 96
    chosen = per_sample[plan.sample_ids]
    return np.add.reduceat(chosen, plan.pack_offsets[:-1]) + member_size(0) + 512


def iterate_tasks(
    stage: Stage, samples: Index, plan: PackPlan, shards: Sequence[Shard]
) -> Iterator[ShardTask]:
    """The task of each shard, made when it is asked for."""
    table = samples.table(*_COLUMNS)
    sources = tuple(open_sources(stage.config))
    offsets = plan.pack_offsets
    for shard in shards:
        packs = slice(shard.first_pack, shard.first_pack + shard.num_packs + 1)
        ids = plan.sample_ids[offsets[packs][0] : offsets[packs][-1]]
        yield ShardTask(
            shard=shard,
            folder=stage.workspace.root,
            fragment_path=stage.workspace.write / f"{shard.name}.json",
            rows=table.take(np.asarray(ids)),
            pack_sizes=tuple(b - a for a, b in itertools.pairwise(offsets[packs].tolist())),
            sources=sources,
            task=stage.config.task,
            key_prefix=stage.config.output.key_prefix,
            seq_length=stage.config.pack.seq_length,
            model=stage.config.model,
        )
