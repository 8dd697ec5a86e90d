"""Splits that share no picture, document or conversation: samples are dealt out by groups.

output.split_by: media    samples that show the same image or video are one group, and so are all
                         that such samples lead to; texts without media, if they are equal
output.split_by: group   samples with the same value in the field source.fields.group

The parts of a conversation that was cut are in one group, whatever it is by.
"""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from offline_packing.config.packing import PackingConfig
from offline_packing.errors import StageError
from offline_packing.index.records import record_hashes
from offline_packing.index.rows import SampleIds
from offline_packing.index.table import Index
from offline_packing.runs.artifacts import split_by

#: A group with a larger share of the smallest split is dealt out before the others are drawn.
_LARGE: Final = 0.5

Groups = npt.NDArray[np.int64]


def find_groups(config: PackingConfig, samples: Index, kept: SampleIds) -> Groups | None:
    """(num_kept,) the number of each sample's group, from 0; None: samples are split one by one.
    Where there are fewer groups than splits, that is the default, or by conversation; raises
    StageError if `output.split_by` asks for groups."""
    by, splits = split_by(config, samples.info), config.output.split
    if by == "sample":
        return None
    groups = _GROUPS[by](samples, kept)
    count = int(groups.max(initial=-1)) + 1
    if 0 < count < len(splits) <= len(kept):
        if config.output.split_by in (None, "sample"):
            groups = groups_by_conversation(samples, kept)
            is_cut = samples.info.split and int(groups.max()) + 1 >= len(splits)
            return groups if is_cut else None
        what = "the same group" if by == "group" else "images or videos that lead to each other"
        raise StageError(
            f"output.split names {len(splits)} splits, and the samples are {count:,} of {what}; "
            "set output.split_by=sample, which puts them on several sides, or leave out a split"
        )
    return groups


def groups_by_media(samples: Index, kept: SampleIds) -> Groups:
    """(num_kept,) the number of each sample's group."""
    owners, hashes = _media_of(samples, kept)
    order = np.argsort(hashes, kind="stable")
    is_shared = np.diff(hashes[order], prepend=0) == 0
    is_shared[:1] = False
    is_shared[:-1] |= is_shared[1:]
    order = order[is_shared]
    _, media = np.unique(hashes[order], return_inverse=True)
    return connected(len(kept), owners[order], media)


def groups_by_field(samples: Index, kept: SampleIds) -> Groups:
    """(num_kept,) the same; a sample without the field is a group of its own."""
    hashes = samples.array("group_hash")[kept]
    alone = np.flatnonzero(hashes == 0)
    _, groups = np.unique(hashes, return_inverse=True)
    groups = groups.astype(np.int64)
    groups[alone] = len(hashes) + groups_by_conversation(samples, kept[alone])
    return np.unique(groups, return_inverse=True)[1]


def groups_by_conversation(samples: Index, kept: SampleIds) -> Groups:
    """(num_kept,) the same; a sample that is not a part of a conversation is a group of its own."""
    # Parts stand in the index one after the other.
    return np.cumsum(np.diff(record_hashes(samples)[kept], prepend=np.uint64(0)) != 0) - 1


_GROUPS: Final[Mapping[str, Callable[[Index, SampleIds], Groups]]] = {
    "media": groups_by_media,
    "group": groups_by_field,
    "conversation": groups_by_conversation,
}


def connected(num_samples: int, owners: Groups, media: Groups) -> Groups:
    """(num_samples,) groups of samples that media connect: medium `media[i]`, numbered from 0, is
    shown by sample `owners[i]`."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    size = num_samples + int(media.max(initial=-1)) + 1
    edges = (np.ones(len(owners), np.bool_), (owners, num_samples + media))
    _, labels = connected_components(coo_array(edges, (size, size)), directed=False)
    return np.unique(labels[:num_samples], return_inverse=True)[1]


def _media_of(samples: Index, kept: SampleIds) -> tuple[Groups, npt.NDArray[np.uint64]]:
    """(num_media,) of samples: the place in `kept` of each medium's sample, and its hash; of a
    sample without media the hash of the sample. Parts share their conversation as a medium."""
    places = np.full(samples.info.num_samples, -1, np.int64)
    places[kept] = np.arange(len(kept))
    owners, hashes, first = [np.empty(0, np.int64)], [np.empty(0, np.uint64)], 0
    if samples.info.split:
        owners, hashes = [places], [record_hashes(samples)]
    for part in samples.parts("media_hash", "sample_hash"):
        own = places[first : first + len(part)]
        first += len(part)
        media = part["media_hash"].combine_chunks()
        rows = pc.list_parent_indices(media).to_numpy()
        without = np.setdiff1d(np.arange(len(part)), rows)
        owners += [own[rows], own[without]]
        hashes.append(pc.list_flatten(media).to_numpy())
        hashes.append(part["sample_hash"].to_numpy()[without])
    all_owners, all_hashes = np.concatenate(owners), np.concatenate(hashes)
    return all_owners[all_owners >= 0], all_hashes[all_owners >= 0]


def deal_groups(
    groups: Groups, drawn: npt.NDArray[np.float64], shares: Mapping[str, float]
) -> dict[str, Groups]:
    """Places of the samples of each split, ascending. The smallest number that is `drawn` for a
    sample of a group decides where the group goes, so that it stays there when others come. A
    split has as many samples as its share asks for, within one group; at least one group, if there
    are enough."""
    sizes = np.bincount(groups)
    rank = np.full(len(sizes), np.inf)
    np.minimum.at(rank, groups, drawn)
    room = np.array(list(shares.values())) * len(groups)
    split = np.empty(len(sizes), np.int64)
    is_large = sizes > max(1.0, _LARGE * room.min())
    for one in sorted(np.flatnonzero(is_large).tolist(), key=lambda one: -sizes[one]):
        split[one] = np.argmax(room)
        room[split[one]] -= sizes[one]
    order = np.flatnonzero(~is_large)
    order = order[np.argsort(rank[order], kind="stable")]
    ends = np.cumsum(sizes[order])
    room = np.maximum(room, 0)
    limits = np.cumsum(room)[:-1] * (ends[-1:].sum() / max(room.sum(), 1e-9))
    split[order] = np.searchsorted(limits, ends - sizes[order] / 2, side="right")
    _fill_empty(split, rank, len(shares))
    of_samples = split[groups]
    return {name: np.flatnonzero(of_samples == i) for i, name in enumerate(shares)}


def _fill_empty(split: Groups, rank: npt.NDArray[np.float64], num_splits: int) -> None:
    """Move one group to each split without any, while another one has several."""
    for one in range(num_splits):
        counts = np.bincount(split, minlength=num_splits)
        if counts[one] == 0 and counts.max() > 1:
            of_most = np.flatnonzero(split == np.argmax(counts))
            split[of_most[np.argmax(rank[of_most])]] = one
