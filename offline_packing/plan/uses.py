"""Uses of each sample, and their split: decided before anything is packed.

`repeat: 2.3` uses every sample twice and three in ten of them once more; `repeat: 0.5` every second
one; which ones, depends only on key and seed. Parts of a conversation are used equally often.
`weight` says which share of all tokens a source is to have; nothing is left out for it: the source
with the most tokens relative to its weight is used once, the others are repeated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from offline_packing.config.packing import PackingConfig
from offline_packing.errors import StageError
from offline_packing.index.records import record_hashes
from offline_packing.index.rows import SampleIds
from offline_packing.index.set_aside import AsideSamples
from offline_packing.index.table import Index
from offline_packing.layouts.shards import split_packs
from offline_packing.plan.splits import deal_groups, find_groups
from offline_packing.sources.options import MAX_REPEAT, SourceOptions

#: Salts of the numbers that are drawn from a key.
_USE, _SPLIT = 0, 1


@dataclass(frozen=True)
class Uses:
    """Ids of the samples to pack, each as often as it is used, round by round."""

    #: by split; a single entry without a name where splits are cut from the finished packs
    ids: Mapping[str, SampleIds]
    #: whether any sample appears twice
    repeated: bool
    #: samples that are not used at all
    not_drawn: AsideSamples
    #: groups of samples in each split, if samples are split by groups
    groups: Mapping[str, int] = field(default_factory=dict)


def choose_uses(config: PackingConfig, samples: Index, kept: SampleIds) -> Uses:
    """All uses of the samples that can be packed, and their splits. A split holds whole samples:
    where one is used several times, all its uses are in one split. Raises StageError if the weights
    ask for too many copies of a sample."""
    is_split = len(config.output.split) > 1
    are_once = all(source.repeat == 1 and not source.weight for source in config.source)
    pack = config.pack
    in_order = pack.order is not None or pack.slots is not None
    groups = find_groups(config, samples, kept)
    apart = is_split and (pack.epochs > 1 or in_order or groups is not None)
    if are_once and not apart:
        return Uses({"": kept}, False, AsideSamples.merge([]))
    source_ids = samples.array("source_id")[kept]
    hashes = record_hashes(samples)[kept]
    num_tokens = samples.array("num_tokens")[kept]
    uses = count_uses(config.source, hashes, source_ids, num_tokens, pack.longest_sample, pack.seed)
    unused = uses == 0
    not_drawn = [
        AsideSamples.of(kept[unused & (source_ids == i)], "not_drawn", f"repeat {source.repeat:g}")
        for i, source in enumerate(config.source)
        if source.repeat < 1
    ]
    repeated = int(uses.max(initial=0)) > 1
    parts: dict[str, SampleIds] = {"": np.flatnonzero(~unused)}
    counts: dict[str, int] = {}
    if groups is not None:
        chosen, drawn = parts[""], _drawn(hashes[parts[""]], config.pack.seed, _SPLIT)
        own_groups = np.unique(groups[chosen], return_inverse=True)[1]
        dealt = deal_groups(own_groups, drawn, config.output.split)
        counts = {name: len(np.unique(own_groups[own])) for name, own in dealt.items()}
        parts = {name: chosen[own] for name, own in dealt.items()}
    elif apart or (is_split and repeated):
        parts = assign_splits(hashes, parts[""], config.output.split, config.pack.seed)
    ids = {name: kept[in_rounds(part, uses[part])] for name, part in parts.items()}
    return Uses(ids, repeated, AsideSamples.merge(not_drawn), counts)


def count_uses(
    sources: Sequence[SourceOptions],
    hashes: npt.NDArray[np.uint64],
    source_ids: npt.NDArray[np.integer],
    num_tokens: npt.NDArray[np.integer],
    longest: int,
    seed: int,
) -> npt.NDArray[np.int64]:
    """Uses of each sample, (num_samples,): 2 or 3 for repeat 2.3, as its hash decides.

    With weights, sources of [100, 100] tokens and weights [1, 3] have repeats [1, 3]; samples above
    ``longest`` tokens fit no pack and do not count. Raises StageError if the weights ask for too
    many copies of a sample.
    """
    repeats = np.array([source.repeat for source in sources], float)
    if sources[0].weight:
        fits = num_tokens <= longest
        tokens = np.bincount(source_ids[fits], num_tokens[fits], minlength=len(sources))
        weights = np.array([source.weight for source in sources], float)
        wanted = np.divide(weights, tokens, out=np.zeros(len(sources)), where=tokens > 0)
        repeats = np.where(tokens > 0, wanted / wanted[tokens > 0].min(initial=np.inf), 1.0)
        if repeats.max() > MAX_REPEAT:
            most = int(repeats.argmax())
            raise StageError(
                f"the weights ask for {repeats[most]:,.0f} copies of each sample of "
                f"{sources[most].path}, at most {MAX_REPEAT:,} are made; lower its weight"
            )
    each = repeats[source_ids]
    whole = np.floor(each)
    return (whole + (_drawn(hashes, seed, _USE) < each - whole)).astype(np.int64)


def in_rounds(ids: SampleIds, uses: npt.NDArray[np.int64]) -> SampleIds:
    """[4, 7] used [1, 3] times -> [4, 7, 7, 7]: all first uses, then all second ones, and so on."""
    rounds = [ids[uses > i] for i in range(int(uses.max(initial=0)))]
    return np.concatenate([np.empty(0, np.int64), *rounds])


def assign_splits(
    hashes: npt.NDArray[np.uint64], ids: SampleIds, shares: Mapping[str, float], seed: int
) -> dict[str, SampleIds]:
    """The samples of each split, ascending: shares of the samples, at least one each if there are
    enough. Their hashes decide which, whatever the repeats and weights are."""
    drawn = ids[np.argsort(_drawn(hashes[ids], seed, _SPLIT), kind="stable")]
    return {
        name: np.sort(drawn[places.start : places.stop])
        for name, places in split_packs(len(ids), shares).items()
    }


def _drawn(hashes: npt.NDArray[np.uint64], seed: int, salt: int) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each hash, of SplitMix64's mixing function."""
    key = np.random.default_rng([seed, salt]).integers(0, 2**64, dtype=np.uint64)
    z = hashes ^ key
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) / 2**53
