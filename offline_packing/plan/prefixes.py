"""Prefix trees: samples that begin alike form a tree, any other is one by itself, and the planner
packs trees.

    samples of a prefix of 900 tokens    [1000, 950, 980], with a fourth [120] of another beginning
    trees                                [1000 + 50 + 80], [120]

A tree has the tokens, media and operations of its first sample, and of every further sample those
beyond the prefix. So limits, orders and balance hold for trees as for samples.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from offline_packing.index.measured import join_hashes
from offline_packing.index.records import Hashes, places_of_equal
from offline_packing.index.rows import (
    SAMPLES_IN_MEMORY,
    SampleIds,
    media_of_samples,
    samples_of_shards,
)
from offline_packing.index.table import Index
from offline_packing.plan.uses import label_components
from offline_packing.planner.exchange import rounds_of_copies
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.planner.samples import Column, Table
from offline_packing.planner.strategies.kernels import Kernel
from offline_packing.planner.strategies.strategy import Packs, group_into_packs
from offline_packing.runs.run import Run, open_sources
from offline_packing.sources import Locator, Source
from offline_packing.sources.roots.roots import MediaRoot
from task_encoders.threads import in_threads

#: Files read at a time.
_THREADS: Final = 8
#: Samples of a group that are cut into chunks at a time: this multiple of `max_branches`, and at
#: most _LONGEST_STRETCH; so the time does not grow with the square of a group.
_STRETCH: Final = 8
_LONGEST_STRETCH: Final = 1024
#: Kinds of media whose bytes measuring did not hold.
_PLACES: Final = ("file", "bytes")

Numbers = npt.NDArray[np.int64]


def group_samples(run: Run, samples: Index) -> Numbers:
    """Return the group of each sample, (num_samples,): all samples of a group have the same prefix
    and the same kinds of media; with weights or a mixture, they are also of one source. -1: no
    other sample has the prefix. Raises StageError if a file cannot be read."""
    columns = samples.table("prefix_hash", "prefix_media", "num_images", "num_videos")
    hashes = columns["prefix_hash"].to_numpy()
    places = places_of_equal(hashes)
    places = places[hashes[places] != 0]
    hashes, media = hashes[places], columns["prefix_media"].to_numpy()[places]
    numbers, firsts = _number(media, hashes)
    # Of each prefix and its media, by their places, the first sample.
    of_firsts, same = hashes[firsts], media[firsts]
    _, of_hash, counts = np.unique(of_firsts, return_inverse=True, return_counts=True)
    unclear = counts[of_hash] > 1
    same[unclear] = _identities(run, samples, places[firsts[unclear]], same[unclear])
    groups = np.full(samples.info.num_samples, -1)
    groups[places] = _number(same, of_firsts)[0][numbers] * 4
    groups[places] += media_of_samples(lambda name: columns[name].to_numpy())[places]
    if run.config.weights is not None:
        groups[places] = _number(samples.array("source_id")[places], groups[places])[0]
    return groups


def _number(*keys: npt.NDArray[Any]) -> tuple[Numbers, Numbers]:
    """Number the different tuples of keys from 0, (num_tuples,) arrays. Returns the number of each
    tuple, and the place of the first tuple with each number."""
    order = np.lexsort(keys)
    is_new = np.arange(len(order)) == 0
    for key in keys:
        is_new[1:] |= key[order[1:]] != key[order[:-1]]
    numbers = np.empty(len(order), np.int64)
    numbers[order] = np.cumsum(is_new) - 1
    return numbers, order[is_new]


def _identities(run: Run, samples: Index, ids: SampleIds, by_place: Hashes) -> Hashes:
    """Hash all bytes of the leading media of samples, (num_ids,). `by_place` is kept where
    measuring hashed the bytes already, and for remote files."""
    sources, found = open_sources(run.config), by_place.copy()
    columns = ("source_id", "media", "num_images", "prefix_images", "prefix_videos")
    shards = np.split(ids, range(SAMPLES_IN_MEMORY, len(ids), SAMPLES_IN_MEMORY))
    tables = samples_of_shards(samples, columns, shards, run.workspace.packing)
    first = 0
    with run.bar("plan: media of equal prefixes", len(ids), "sample") as bar, run.unpacked_files():
        for table in tables if len(ids) else ():
            read = in_threads(
                lambda row: _hash_media(sources[row["source_id"]], row),
                table.to_pylist(),
                _THREADS,
                2 * _THREADS,
            )
            for number, digest in enumerate(read, first):
                if digest is not None:
                    found[number] = digest
                bar.update()
            first += len(table)
    return found


def _hash_media(source: Source, row: Mapping[str, Any]) -> int | None:
    """Hash all bytes of a sample's leading media. Returns None if measuring held some of the bytes,
    or some file is remote."""
    images, media = row["num_images"], row["media"]
    leading = media[: row["prefix_images"]] + media[images : images + row["prefix_videos"]]
    places = [Locator(*(one[name] for name in Locator._fields)) for one in leading]
    if any(
        at.kind not in _PLACES or not isinstance(source.media_root(at), MediaRoot) for at in places
    ):
        return None
    return join_hashes([xxhash.xxh3_64_intdigest(source.read_media(at)) for at in places])


@dataclass(frozen=True)
class Trees:
    """Uses of samples in trees, in the order of each tree's first use."""

    #: pack i is tree i: numbers of uses
    uses: Packs
    #: the columns of the trees
    table: Table

    def expand(self, plan: PackPlan) -> PackPlan:
        """Return the plan of the uses, from the plan of the trees."""
        aside, packed = map(self._uses_of, (plan.set_aside_ids, plan.sample_ids))
        order = np.argsort(aside.sample_ids)
        reasons = np.repeat(plan.set_aside_reasons, np.diff(aside.pack_offsets))
        num_admitted = len(self.uses.sample_ids) - len(order)
        return replace(
            plan,
            sample_ids=packed.sample_ids,
            pack_offsets=packed.pack_offsets[plan.pack_offsets],
            set_aside_ids=aside.sample_ids[order],
            set_aside_reasons=reasons[order],
            info=replace(plan.info, num_copies=len(packed.sample_ids) - num_admitted),
            branches=_is_branch(packed),
        )

    def amounts(self, hashes: Hashes) -> tuple[Numbers, Hashes]:
        """Return (num_uses,) the tokens that each use adds to rows, a tree's all at its first use;
        and the least hash in its tree and in the trees that share records with it, by which all
        their samples are used equally often."""
        uses, offsets = self.uses
        tokens, least_of = np.zeros(len(uses), np.int64), np.empty_like(hashes)
        tokens[uses[offsets[:-1]]] = self.table.num_tokens.values
        labels = self.table.columns["copy_of"].values[self.uses.pack_of_slot()]
        least = np.full(int(labels.max(initial=-1)) + 1, np.iinfo(np.uint64).max)
        np.minimum.at(least, labels, hashes[uses])
        least_of[uses] = least[labels]
        return tokens, least_of

    def _uses_of(self, trees: npt.NDArray[np.integer]) -> Packs:
        """Return the uses of some trees, tree after tree; outside of a plan, kernels compile."""
        starts, sizes = self.uses.pack_offsets[trees], np.diff(self.uses.pack_offsets)[trees]
        ends = np.concatenate([[0], np.cumsum(sizes)])
        places = np.arange(ends[-1]) + np.repeat(starts - ends[:-1], sizes)
        return Packs(self.uses.sample_ids[places], ends)


def _is_branch(trees: Packs) -> npt.NDArray[np.uint8]:
    """Return (num_uses,) 1 for every use but the first of its tree."""
    branches = np.ones(len(trees.sample_ids), np.uint8)
    branches[trees.pack_offsets[:-1]] = 0
    return branches


def form_trees(
    ids: SampleIds, groups: npt.NDArray[np.integer], table: Table, longest: int, max_branches: int
) -> Trees:
    """Form trees of samples that share a prefix.

    The samples of a group are sorted, those that add most first, and each joins the first chunk
    with room: of at most `max_branches` samples, and within every limit of a pack. So most trees
    fill a pack, and the last of a group is small. A chunk holds first parts of records only, or
    second ones only, and so on. The k-th uses of a chunk's samples form a tree.

    Args:
        ids: (num_uses,) samples, all first uses in order, then all second ones, and so on.
        groups: (num_uses,) from 0; -1: it stands alone.
        table: of the uses. A joined column has the record of each, of which a tree holds no two.
            Raises ValueError for a column that does not say what a tree has of it.
        longest: tokens of a tree, at most.
        max_branches: samples of a tree, at most.
    """
    limits = [longest, *(limit for _, limit in table.budgets.values())]
    joined = (one.values for one in table.columns.values() if one.of_tree == "joined")
    records, rounds = next(joined, ids), rounds_of_copies(ids)
    sizes = np.stack([one.values for one in table.sized()], axis=1).astype(np.int64)
    some = np.flatnonzero((groups >= 0) & (rounds == 0))
    some = some[(sizes[some] <= limits).all(axis=1)]
    # Parts of a record that has parts in several groups stand alone: each would tie all trees of
    # its group to all of another.
    group_of, place_of, most_of = np.zeros((3, int(records.max(initial=-1)) + 1), np.int64)
    group_of[records[some]] = groups[some]
    ties = records[some[group_of[records[some]] != groups[some]]]
    some = some[~np.isin(records[some], ties)]
    whole, groups, records = sizes[some], groups[some], records[some]
    added = whole - np.stack([_of_prefix(one)[some] for one in table.sized()], axis=1)
    # First parts of records, then second ones, each sorted by their records' longest parts, so that
    # few chunks share records.
    turns = rounds_of_copies(records)
    place_of[records[turns == 0]] = rounds_of_copies(groups[turns == 0])
    np.maximum.at(most_of, records, added[:, 0])
    place, most = place_of[records], most_of[records]
    keys = groups, place // min(_STRETCH * max_branches, _LONGEST_STRETCH), turns
    order, is_new = np.arange(len(some)), np.zeros(len(some), np.bool_)
    for key in (most.max(initial=0) - most, *reversed(keys)):
        order = group_into_packs(order, key[order]).sample_ids
    for key in keys:
        is_new |= np.diff(key[order], prepend=-1) != 0
    chunks = _cut(is_new, whole[order], added[order], np.array(limits), max_branches)
    of_sample = np.full(int(ids.max(initial=-1)) + 1, -1, np.int32)
    of_sample[ids[some[order]]] = chunks
    trees = _number_trees(of_sample[ids], rounds, int(chunks.max(initial=-1)) + 1)
    uses = group_into_packs(np.arange(len(ids)), trees)
    change = partial(_of_trees, uses, trees)
    budgets = {name: (change(name, own), most) for name, (own, most) in table.budgets.items()}
    columns = {name: change(name, own) for name, own in table.columns.items()}
    return Trees(uses, Table(change("num_tokens", table.num_tokens), budgets, columns))


def _of_trees(trees: Packs, tree_of: Numbers, name: str, column: Column) -> Column:
    """Return a column of trees from that of uses; `tree_of` (num_uses,) has the tree of each."""
    values, rule, (uses, offsets) = column.values, column.of_tree, trees
    if rule == "sum":
        each = values[uses] - _of_prefix(column)[uses] * _is_branch(trees)
        dtype = np.int64 if np.issubdtype(each.dtype, np.integer) else np.float64
        return Column(np.add.reduceat(each, offsets[:-1], dtype=dtype))
    if rule == "first":
        return Column(values[uses[offsets[:-1]]])
    if rule == "joined":
        return Column(label_components(tree_of, values))
    raise ValueError(f"column {name} does not say what a tree has of it: sum, first or joined")


def _of_prefix(column: Column) -> npt.NDArray[Any]:
    assert column.of_prefix is not None
    return column.of_prefix


@Kernel
def _cut(
    is_new: np.ndarray, whole: np.ndarray, added: np.ndarray, limits: np.ndarray, max_branches: int
) -> np.ndarray:
    """Return the chunk of each sample, int32 (num_samples,), from 0; see `form_trees`.

    Args:
        is_new: bool (num_samples,), true where a sample joins no chunk of the samples before it.
        whole, added: int64 (num_samples, num_limits), sizes that a sample adds as the first of a
            chunk, and as a later one.
        limits: int64 (num_limits,), within which `whole` is.
    """
    chunks = np.empty(len(is_new), np.int32)
    held = np.zeros((len(is_new), len(limits)), np.int64)
    counts = np.zeros(len(is_new), np.int64)
    first, end = 0, 0
    for sample in range(len(is_new)):
        if is_new[sample]:
            first = end
        chunk = first
        while chunk < end and not (
            counts[chunk] < max_branches and (held[chunk] + added[sample] <= limits).all()
        ):
            chunk += 1
        held[chunk] += whole[sample] if chunk == end else added[sample]
        end = max(end, chunk + 1)
        counts[chunk] += 1
        chunks[sample] = chunk
    return chunks


@Kernel
def _number_trees(chunks: np.ndarray, rounds: np.ndarray, num_chunks: int) -> np.ndarray:
    """Number the tree of each use, int64 (num_uses,), by their first uses: the uses of one chunk
    in one round, which follow each other; of no chunk (-1): a tree each."""
    number_of = np.empty(num_chunks, np.int64)
    round_of = np.full(num_chunks, -1, np.int32)
    trees = np.empty(len(chunks), np.int64)
    num_trees = 0
    for use in range(len(chunks)):
        chunk = chunks[use]
        if chunk >= 0 and round_of[chunk] == rounds[use]:
            trees[use] = number_of[chunk]
            continue
        if chunk >= 0:
            number_of[chunk], round_of[chunk] = num_trees, rounds[use]
        trees[use] = num_trees
        num_trees += 1
    return trees
