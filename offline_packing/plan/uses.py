"""Uses of each sample, and their split: decided before anything is packed.

`repeat: 2.3` uses every sample twice and three in ten of them once more; `repeat: 0.5` every second
one; which ones, depends only on key and seed. Parts of a conversation are used equally often.
`weight` says which share of all tokens a source is to have; nothing is left out for it: the source
with the most tokens relative to its weight is used once, the others are repeated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offline_packing.config.packing import PackingConfig
from offline_packing.errors import StageError
from offline_packing.index.rows import SampleIds
from offline_packing.index.set_aside import AsideSamples
from offline_packing.index.table import Index
from offline_packing.plan.splits import USE_SALT, draw, draw_splits
from offline_packing.sources.options import MAX_REPEAT, SourceOptions


@dataclass(frozen=True)
class Uses:
    """Ids of the samples to pack, each as often as it is used, round by round."""

    #: by split, in the order of the shares
    ids: Mapping[str, SampleIds]
    #: whether any sample appears twice
    repeated: bool
    #: samples that are not used at all
    not_drawn: AsideSamples


def choose_uses(config: PackingConfig, samples: Index, kept: SampleIds) -> Uses:
    """All uses of the samples that can be packed, by split: all uses of a sample are in one. Raises
    StageError if the weights ask for too many copies of a sample."""
    shares = config.output.split
    parts = dict.fromkeys(shares, slice(None))
    if len(shares) > 1:
        splits = draw_splits(samples, shares, config.output.split_seed)[kept]
        parts = {name: splits == i for i, name in enumerate(shares)}
    if all(source.repeat == 1 and not source.weight for source in config.source):
        once = {name: kept[part] for name, part in parts.items()}
        return Uses(once, False, AsideSamples.merge([]))
    source_ids = samples.array("source_id")[kept]
    hashes = samples.array("key_hash")[kept]
    num_tokens = samples.array("num_tokens")[kept]
    pack = config.pack
    uses = count_uses(config.source, hashes, source_ids, num_tokens, pack.longest_sample, pack.seed)
    not_drawn = [
        AsideSamples.of(
            kept[(uses == 0) & (source_ids == i)], "not_drawn", f"repeat {one.repeat:g}"
        )
        for i, one in enumerate(config.source)
        if one.repeat < 1
    ]
    ids = {name: in_rounds(kept[part], uses[part]) for name, part in parts.items()}
    return Uses(ids, int(uses.max(initial=0)) > 1, AsideSamples.merge(not_drawn))


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
    return (whole + (draw(hashes, seed, USE_SALT) < each - whole)).astype(np.int64)


def in_rounds(ids: SampleIds, uses: npt.NDArray[np.int64]) -> SampleIds:
    """[4, 7] used [1, 3] times -> [4, 7, 7, 7]: all first uses, then all second ones, and so on."""
    rounds = [ids[uses > i] for i in range(int(uses.max(initial=0)))]
    return np.concatenate([np.empty(0, np.int64), *rounds])
