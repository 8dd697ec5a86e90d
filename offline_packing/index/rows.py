"""Samples of the index in the order of the packs, whatever the size of the index.

A shard's samples are all over the index. If they do not fit in memory, they are sorted in two
steps: one pass over the index writes them to scratch files, one per group of shards; then each
group is read back and put in order.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from offline_packing.index.table import INDEX_SCHEMA, Index, open_table
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.storage.files import is_remote
from task_encoders.families.base.cost import ModelCost
from task_encoders.packs.manifest import PackColumns

#: The most samples in memory at a time: some 50 MB of index.
SAMPLES_IN_MEMORY: Final = 1 << 17
#: The most groups; each has an open scratch file.
_MAX_GROUPS: Final = 256
#: The prefix's column for each column of a sample's size.
_OF_PREFIX: Final = {f"num_{name}": f"prefix_{name}" for name in ("tokens", "images", "videos")}
#: Columns that decide which media of a sample are in its prefix.
LEADING: Final = ("num_images", "prefix_images", "prefix_videos")

#: Row numbers of the index, over all parts.
SampleIds = npt.NDArray[np.integer]


def samples_of_shards(
    samples: Index,
    columns: Sequence[str],
    ids_of_shards: Sequence[SampleIds],
    scratch: Path,
    *,
    samples_in_memory: int = SAMPLES_IN_MEMORY,
) -> Iterator[pa.Table]:
    """Yield columns of the samples of each shard, in the given order. Files in the folder `scratch`
    have no name and vanish with this process; where it is read-only or in object storage, the
    system's temporary folder is used."""
    none = INDEX_SCHEMA.empty_table().select(list(columns))
    groups = _group(ids_of_shards, samples_in_memory)
    sorted_ids = []
    for ids in map(np.concatenate, groups):
        is_small = ids.max(initial=0) < np.iinfo(np.int32).max  # four bytes each are enough
        sorted_ids.append(np.sort(ids.astype(np.int32, copy=False) if is_small else ids))
    picked = _pick(samples, none, sorted_ids, samples_in_memory)
    if len(groups) == 1:
        tables = iter([pa.concat_tables([none, *(table for _, table in picked)])])
    else:
        tables = _sort_in_files(picked, none.schema, len(groups), scratch)
    for table, ids, group in zip(tables, sorted_ids, groups, strict=True):
        table = table.combine_chunks()
        for own in group:
            yield table.take(pa.array(np.searchsorted(ids, own)))


def name_samples(samples: Index, ids: SampleIds) -> pa.Table:
    """Return source_id and key of some samples, in the given order."""
    return next(samples_of_shards(samples, ("source_id", "key"), [ids], Path()))


def is_leading(rows: pa.Table, owner: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
    """Return (num_media,) whether each medium is in its sample's prefix. `rows` have the columns
    LEADING; `owner` (num_media,) is each medium's row, ascending."""
    images, leading, videos = (rows[name].to_numpy()[owner] for name in LEADING)
    counts = np.bincount(owner, minlength=len(rows))
    place = np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]
    return np.where(place < images, place < leading, place - images < videos)


class Prefixes(Index):
    """View of an index in which each row describes the sample's shareable prefix, in the columns of
    tokens, loss and media; other columns are unchanged. A further branch of a tree adds the
    quantity of its sample less that of its prefix."""

    def __init__(self, samples: Index) -> None:
        self.__dict__.update(vars(samples))

    def part(self, number: int, *columns: str) -> pa.Table:
        of_media = {"grid_thw", "num_vision_patches"} & {*columns}
        wanted = {_OF_PREFIX.get(name, name) for name in columns}
        if of_media:
            wanted |= {"grid_thw", *LEADING}
        whole = super().part(number, *wanted)
        values = {name: whole[_OF_PREFIX.get(name, name)] for name in columns}
        if "num_loss_tokens" in values:
            values["num_loss_tokens"] = pa.array(np.zeros(len(whole), np.int32))
        if of_media:
            lists = whole["grid_thw"].combine_chunks()
            owner = np.repeat(np.arange(len(whole)), lists.value_lengths().to_numpy() // 3)
            leads = is_leading(whole, owner)
            grids = lists.flatten().to_numpy().reshape(-1, 3)[leads]
            kept = np.bincount(owner[leads], minlength=len(whole))
            patches = np.bincount(owner[leads], grids.prod(axis=1), minlength=len(whole))
            ends = pa.array(np.concatenate([[0], 3 * np.cumsum(kept)]), pa.int32())
            made = {
                "grid_thw": pa.ListArray.from_arrays(ends, pa.array(grids.ravel())),
                "num_vision_patches": pa.array(patches.astype(np.int32)),
            }
            values |= {name: made[name] for name in of_media}
        return pa.table(values)


def of_uses(
    samples: Index, plan: PackPlan, values: Callable[[Index], npt.NDArray[Any]]
) -> npt.NDArray[Any]:
    """Return what each of a plan's `sample_ids` adds to its pack, (…, num_packed), of a quantity
    that `values` computes of all samples of an index, (…, num_samples)."""
    own = values(samples)[..., plan.sample_ids]
    if plan.branches is not None:
        own = own - values(Prefixes(samples))[..., plan.sample_ids] * plan.branches
    return own


def sample_flops(samples: Index, cost: ModelCost) -> npt.NDArray[np.float32]:
    """Compute the forward operations of each sample, (2, num_samples): of the vision tower and of
    the language model. Patches attend within an image, or a step of a video."""
    flops, start = np.empty((2, samples.info.num_samples), np.float32), 0
    for table in samples.parts("grid_thw"):
        grids = table["grid_thw"].combine_chunks()
        owner = np.repeat(np.arange(len(grids)), grids.value_lengths().to_numpy() // 3)
        steps, height, width = grids.flatten().to_numpy().reshape(-1, 3).T.astype(np.float32)
        of_media = steps * cost.tower_flops(height * width)
        own = slice(start, start := start + len(grids))
        flops[0, own] = np.bincount(owner, of_media, len(grids))
    flops[1] = cost.language_flops(samples.array("num_tokens").astype(np.float32))
    return flops


def name_copies(table: pa.Table, copies: SampleIds) -> pa.Table:
    """Number the keys of copies: 'a/17', 'a/17#2', 'a/17#3'. `copies` (num_samples,) is 0 for the
    first use."""
    numbers = pa.array(copies + 1).cast(pa.large_string())
    named = pc.binary_join_element_wise(table["key"], numbers, pa.scalar("#", numbers.type))
    keys = pc.if_else(pa.array(copies > 0), named, table["key"])
    place = table.schema.get_field_index("key")
    return table.set_column(place, table.schema.field(place), keys)


def _group(ids_of_shards: Sequence[SampleIds], samples_in_memory: int) -> list[list[SampleIds]]:
    """Group consecutive shards that fit in memory together; a larger one is alone."""
    limit = max(samples_in_memory, -(-2 * sum(map(len, ids_of_shards)) // _MAX_GROUPS))
    groups: list[list[SampleIds]] = []
    held = 0
    for ids in ids_of_shards:
        held += len(ids)
        if not groups or held > limit:
            groups.append([])
            held = len(ids)
        groups[-1].append(ids)
    return groups


def _pick(
    samples: Index, none: pa.Table, sorted_ids: Sequence[SampleIds], samples_in_memory: int
) -> Iterator[tuple[int, pa.Table]]:
    """Yield (group, some of its samples), ascending, of neighboring parts that fit in memory
    together; parts without any of the ids are not read. `none` is an empty table of the columns."""
    first, end, held = 0, 0, list[pa.Table]()

    def give() -> Iterator[tuple[int, pa.Table]]:
        table = pa.concat_tables([none, *held]).combine_chunks()
        for group, ids in enumerate(sorted_ids):
            start, stop = _places(ids, first, first + len(table))
            if stop > start:
                yield group, table.take(pa.array(ids[start:stop] - first))
        held.clear()

    for number, rows in enumerate(samples.info.part_rows):
        bounds = [_places(ids, end, end + rows) for ids in sorted_ids]
        is_wanted = any(start < stop for start, stop in bounds)
        if held and (not is_wanted or sum(map(len, held)) >= samples_in_memory):
            yield from give()
        if not held:
            first = end
        if is_wanted:
            held.append(samples.part(number, *none.column_names))
        end += rows
    if held:
        yield from give()


def _places(ids: SampleIds, begin: int, end: int) -> tuple[int, int]:
    """Return the slice of sorted ids in begin..end - 1. Bounds of another type would have all ids
    copied to it."""
    most = np.iinfo(ids.dtype).max
    start, stop = np.searchsorted(ids, np.array([min(begin, most), min(end, most)], ids.dtype))
    return int(start), int(stop)


def _sort_in_files(
    picked: Iterator[tuple[int, pa.Table]], schema: pa.Schema, num_groups: int, scratch: Path
) -> Iterator[pa.Table]:
    """Collect each group's samples in a scratch file, an Arrow stream; yield them by group."""
    where = scratch if not is_remote(scratch) and os.access(scratch, os.W_OK) else None
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile(dir=where)) for _ in range(num_groups)]
        writers = [pa.ipc.new_stream(file, schema, options=options) for file in files]
        for group, table in picked:
            writers[group].write_table(table)
        for writer in writers:
            writer.close()
        for file in files:
            file.seek(0)
            yield pa.ipc.open_stream(file).read_all()
            file.truncate(0)


def sums_by_source(
    samples: Index, uses: npt.NDArray[np.integer], num_sources: int, columns: Sequence[str]
) -> dict[str, list[int]]:
    """Sum by source: the samples that are `used`, their `uses` (num_samples,) and, over all uses,
    `bytes` (of record and media) and columns of integers."""
    names = ("used", "uses", "bytes", *columns)
    sums = {name: np.zeros(num_sources, np.int64) for name in names}
    first = 0
    for number, part in enumerate(samples.parts("source_id", *columns)):
        own = uses[first : first + len(part)].astype(np.int64)
        first += len(part)
        with open_table(samples.paths[number]) as file:  # sizes alone, of the record and the media
            sizes = file.read(columns=["json.size", "media.list.element.size"])
        media = sizes["media"].combine_chunks()
        ends = np.concatenate([[0], np.cumsum(media.flatten().field("size").to_numpy())])
        in_media = np.diff(ends[np.cumsum(media.value_lengths().to_numpy())], prepend=0)
        in_record = sizes["json"].combine_chunks().field("size").to_numpy()
        values = {"used": own > 0, "uses": own, "bytes": own * (in_media + in_record)}
        values |= {name: own * part[name].to_numpy() for name in columns}
        for name, column in values.items():
            np.add.at(sums[name], part["source_id"].to_numpy(), column)
    return {name: array.tolist() for name, array in sums.items()}


def pack_table(samples: Index, packs: PackPlan, cost: ModelCost) -> PackColumns:
    """Return the columns of a plan with ids of the index, which has at least one pack."""
    flops = of_uses(samples, packs, lambda index: sample_flops(index, cost))
    media = media_of_samples(samples.array)
    ids, starts = packs.sample_ids, packs.pack_offsets[:-1]
    tower, language = (np.add.reduceat(some, starts, dtype=np.float64) for some in flops)
    return PackColumns(np.bitwise_or.reduceat(media[ids], starts), tower, language)


def media_of_samples(column: Callable[[str], npt.NDArray[Any]]) -> npt.NDArray[np.uint8]:
    """Return (num_samples,) kinds of media as in `PackColumns.media`; `column` reads the index."""
    return (column("num_images") > 0).astype(np.uint8) + 2 * (column("num_videos") > 0)
