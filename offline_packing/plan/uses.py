"""Uses of each sample, and their split: decided before anything is packed.

`repeat: 2.3` uses every sample twice and three in ten of them once more; `repeat: 0.5` every second
one; which ones, depends only on key and seed. Parts of a conversation are used equally often.
`weight` says which share of each split's tokens in rows a source is to have; nothing is left out
for it: the source with the most tokens relative to its weight is used once, the others are
repeated.

The split of a sample follows from the group that `source.fields.group` names; without one from its
images and videos; without any from its own content. All samples that lead from one to another by
what they share go by the least hash among them. With `output.split_seed`, that hash draws a number
in [0, 1), and the number the split in whose share it lies:

    {train: 0.9, val: 0.1}    .37 -> train    .93 -> val

So outputs of other sources, models or lengths agree on every group, and on every picture of samples
with one picture.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from offline_packing.config.packing import PackingConfig
from offline_packing.errors import StageError
from offline_packing.index.records import Hashes, shared_contents
from offline_packing.index.rows import SampleIds
from offline_packing.index.set_aside import AsideSamples
from offline_packing.index.table import Index
from offline_packing.sources.options import MAX_REPEAT

logger = logging.getLogger(__name__)

#: Salts of the numbers that are drawn from a hash.
_USE_SALT: Final = 0
_SPLIT_SALT: Final = 1
_MOST: Final = np.iinfo(np.uint64).max


@dataclass(frozen=True)
class Uses:
    """Ids of the samples to pack, each as often as it is used, round by round."""

    #: by split, in the order of the shares
    ids: Mapping[str, SampleIds]
    #: whether any sample appears twice
    repeated: bool
    #: samples that are not used at all
    not_drawn: AsideSamples


#: of the samples of one split, the tokens that each adds to rows, and the hash that draws its uses
Amounts = Callable[[SampleIds], tuple[npt.NDArray[np.integer], Hashes]]


def choose_uses(
    config: PackingConfig, samples: Index, kept: SampleIds, amounts: Amounts | None = None
) -> Uses:
    """Choose all uses of the samples that can be packed, by split: all uses of a sample are in one.
    `amounts` is what weights count, by default each sample's own. Raises StageError if they ask for
    too many copies of a sample of the first split."""
    shares = config.output.split
    parts = dict.fromkeys(shares, slice(None))
    if len(shares) > 1:
        splits = draw_splits(samples, shares, config.output.split_seed)[kept]
        parts = {name: splits == i for i, name in enumerate(shares)}
    if config.weights is None and all(source.repeat == 1 for source in config.source):
        once = {name: kept[part] for name, part in parts.items()}
        return Uses(once, False, AsideSamples.merge([]))
    source_ids = samples.array("source_id")[kept]
    hashes, num_tokens = samples.array("key_hash"), samples.array("num_tokens")
    uses, repeats = np.empty(len(kept), np.int64), list[npt.NDArray[np.float64]]()
    for name, part in parts.items():
        own = kept[part]
        tokens, draws = num_tokens[own], hashes[own]
        if amounts is not None and config.weights is not None:
            tokens, draws = amounts(own)
        try:
            repeats.append(source_repeats(config, source_ids[part], tokens))
        except StageError as error:
            if not repeats:
                raise
            logger.warning("plan: split %s keeps the first split's repeats: %s", name, error)
            repeats.append(repeats[0])
        uses[part] = draw_uses(repeats[-1][source_ids[part]], draws, config.pack.seed)
    not_drawn = [
        AsideSamples.of(
            kept[(uses == 0) & (source_ids == i)], "not_drawn", f"repeat {one.repeat:g}"
        )
        for i, one in enumerate(config.source)
        if one.repeat < 1
    ]
    # [4, 7] used [1, 3] times -> [4, 7, 7, 7]: all first uses, then all second ones, and so on
    rounds = [uses > i for i in range(max(1, int(uses.max(initial=0))))]
    ids = {
        name: np.concatenate([kept[part][used[part]] for used in rounds])
        for name, part in parts.items()
    }
    return Uses(ids, int(uses.max(initial=0)) > 1, AsideSamples.merge(not_drawn))


def draw_uses(
    repeats: npt.NDArray[np.float64], hashes: npt.NDArray[np.uint64], seed: int
) -> npt.NDArray[np.int64]:
    """Draw the uses of each sample, (num_samples,): 2 or 3 for repeat 2.3, as its hash decides."""
    whole = np.floor(repeats)
    return (whole + (_draw(hashes, seed, _USE_SALT) < repeats - whole)).astype(np.int64)


def source_repeats(
    config: PackingConfig, source_ids: npt.NDArray[np.integer], num_tokens: npt.NDArray[np.integer]
) -> npt.NDArray[np.float64]:
    """Repeat of each source, (num_sources,); of weights, too: sources of [100, 100] tokens and
    weights [1, 3] have repeats [1, 3]; samples that fit no pack do not count. Raises StageError if
    the weights ask for too many copies of a sample."""
    if config.weights is None:
        return np.array([source.repeat for source in config.source], float)
    fits = num_tokens <= config.pack.longest_sample
    tokens = np.bincount(source_ids[fits], num_tokens[fits], minlength=len(config.source))
    has_some = tokens > 0
    wanted = np.divide(config.weights, tokens, out=np.zeros(len(tokens)), where=has_some)
    repeats = np.where(has_some, wanted / wanted[has_some].min(initial=np.inf), 1.0)
    if repeats.max() > MAX_REPEAT:
        most = int(repeats.argmax())
        raise StageError(
            f"the weights ask for {repeats[most]:,.0f} copies of each sample of "
            f"{config.source[most].path}, at most {MAX_REPEAT:,} are made; lower its weight"
        )
    return np.asarray(repeats)


def draw_splits(samples: Index, shares: Mapping[str, float], seed: int) -> npt.NDArray[np.int16]:
    """Draw the split of each sample of the index, (num_samples,), as a place among the shares."""
    joined, least_of = _joined(samples)
    limits = np.cumsum(list(shares.values()))[:-1]
    splits = np.empty(samples.info.num_samples, np.int16)
    for some, rows, hashes in shared_contents(samples):
        if len(joined):
            places = np.minimum(np.searchsorted(joined, hashes), len(joined) - 1)
            hashes = np.where(joined[places] == hashes, least_of[places], hashes)
        least = np.full(some.stop - some.start, _MOST)
        np.minimum.at(least, rows, hashes)
        splits[some] = np.searchsorted(limits, _draw(least, seed, _SPLIT_SALT), side="right")
    return splits


def _joined(samples: Index) -> tuple[Hashes, Hashes]:
    """Return the hashes of all contents in samples that have several, ascending, and the least hash
    that each leads to. Only such samples join anything, so only their contents are held."""
    found = [(np.empty(0, np.int64), np.empty(0, np.uint64))]
    for some, rows, hashes in shared_contents(samples):
        joins = (np.bincount(rows, minlength=some.stop - some.start) > 1)[rows]
        found.append((some.start + rows[joins], hashes[joins]))
    owners, hashes = map(np.concatenate, zip(*found, strict=True))
    joined, places = np.unique(hashes, return_inverse=True)
    labels = label_components(places, np.unique(owners, return_inverse=True)[1])
    least = np.full(int(labels.max(initial=-1)) + 1, _MOST)
    np.minimum.at(least, labels, joined)
    return joined, least[labels]


def label_components(
    nodes: npt.NDArray[np.integer], others: npt.NDArray[np.integer]
) -> npt.NDArray[np.int64]:
    """Label nodes, (num_nodes,), by their connected component. An edge joins node `nodes[i]` and
    node `others[i]` of another kind; those of each kind are numbered from 0."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    count = int(nodes.max(initial=-1)) + 1
    size = count + int(others.max(initial=-1)) + 1
    edges = coo_array((np.ones(len(nodes), np.bool_), (nodes, count + others)), (size, size))
    labels: npt.NDArray[np.int64] = connected_components(edges, directed=False)[1][:count]
    return labels


def _draw(hashes: Hashes, seed: int, salt: int) -> npt.NDArray[np.float64]:
    """Draw a number in [0, 1) for each hash, with SplitMix64's mixing function."""
    key = np.random.default_rng([seed, salt]).integers(0, 2**64, dtype=np.uint64)
    z = hashes ^ key
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) / 2**53
