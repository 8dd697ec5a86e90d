"""Packs of a given number, by re-dividing two packs at a time (multiway number partitioning).

Other methods fill packs exactly and leave what does not fit; here all packs share the room that
there is. So the number of packs that the bound allows is often met, in milliseconds:

    packs of 10       [6 5] [4 3]      one is above, one has room
    re-divided        [6 4] [5 3]      the best subset of the four samples for the first pack

Packs begin with samples dealt out longest first, each to the pack with the fewest tokens (Graham,
1969); or as another plan has its fullest packs; or by the mix of patterns of a linear program. A
few samples of each of two packs are then divided anew, so that the squares of the tokens above
seq_length fall or stay, until no pack is above.
"""

import heapq
from functools import partial
from typing import NamedTuple

import numpy as np

from offline_packing.planner.strategies.composition import Composition, from_packs, select_patterns
from offline_packing.planner.strategies.kernels import Kernel, random_below, random_state

#: samples of each of two packs that are divided anew, and in plans of at most so many samples
_POOL, _SMALL_POOL, _FEW_SAMPLES = 6, 4, 1000
_SORTED_ROUNDS = 4  # rounds in which the fullest meets the emptiest, and so on
_PATIENCE = 20  # tries for each pack in which the tokens above seq_length must fall by a tenth
#: steps in all attempts at a plan, sums and samples that are looked at: up to about three seconds
WORK = 600_000_000


class _Bins(NamedTuple):
    """Packs that are changed in place, and arrays for the division of two of them."""

    #: int32 (num_packs, places): lengths of a pack, the first ``sizes`` of its row
    lengths: np.ndarray
    #: int64 (num_packs,): samples and tokens of each
    sizes: np.ndarray
    tokens: np.ndarray
    #: int64 (2 * k,): lengths that are divided, k at most of each pack
    pool: np.ndarray
    #: int64 (4, 2 ** k): sums of the subsets of half of them, and which lengths these have
    sums: np.ndarray
    subsets: np.ndarray


def even_fill(
    counts: np.ndarray,
    num_packs: int,
    kept: np.ndarray | None = None,
    *,
    seed: int = 0,
    work: int = WORK,
    is_random: bool = False,
) -> tuple[Composition | None, int]:
    """Pack all samples into ``num_packs`` packs, each a pattern of its own; None if that is not
    found in ``work`` steps. Returns the steps that are left, too.

    ``kept`` int (at most num_packs, places): lengths that are in packs at the beginning, 0 for
    none. The others are dealt out, the longest first unless ``is_random``.
    """
    kept = np.zeros((0, 1), np.int32) if kept is None else kept
    held = np.zeros((num_packs, kept.shape[1]), np.int32)
    held[: len(kept)] = kept
    rest = counts - np.bincount(kept[kept > 0], minlength=len(counts))
    lengths = np.repeat(np.arange(len(counts)), rest)[::-1].copy()
    if is_random:
        np.random.default_rng(seed).shuffle(lengths)
    pack_of = _deal(lengths, held.sum(axis=1, dtype=np.int64))
    before, more = np.count_nonzero(held, axis=1), np.bincount(pack_of, minlength=num_packs)
    sizes = before + more
    packs = np.zeros((num_packs, int(sizes.max(initial=0)) + 4), np.int32)
    packs[np.arange(packs.shape[1]) < before[:, np.newaxis]] = held[held > 0]
    order = np.argsort(pack_of, kind="stable")
    first = np.cumsum(more) - more - before
    places = np.arange(len(order)) - np.repeat(first, more)
    packs[pack_of[order], places] = lengths[order]
    pool = _SMALL_POOL if counts.sum() <= _FEW_SAMPLES else _POOL
    sums, subsets = np.zeros((2, 4, 1 << pool), np.int64)
    tokens = packs.sum(axis=1, dtype=np.int64)
    bins = _Bins(packs, sizes, tokens, np.zeros(2 * pool, np.int64), sums, subsets)
    work, is_found = _search(bins, len(counts) - 1, random_state(seed), work)
    if not is_found:
        return None, work
    packs[np.arange(packs.shape[1]) >= sizes[:, np.newaxis]] = 0
    return from_packs(packs[sizes > 0], 1), work


def fullest_packs(composition: Composition, num_packs: int) -> np.ndarray:
    """Return the lengths in the fullest packs, int32 (num_packs, places), 0 for none."""
    fullest = np.argsort(-composition.pattern_tokens(), kind="stable")
    return _rows_of(select_patterns(composition, fullest))[:num_packs]


def _rows_of(composition: Composition) -> np.ndarray:
    """Return the lengths in each pack, int32 (num_packs, places), 0 for none."""
    lengths, times, offsets, multiplicity, _ = composition
    sizes = np.add.reduceat(times, offsets[:-1])
    rows = np.zeros((len(sizes), int(sizes.max())), np.int32)
    rows[np.arange(rows.shape[1]) < sizes[:, np.newaxis]] = np.repeat(lengths, times)
    return np.repeat(rows, multiplicity, axis=0)


def packs_by_mix(
    counts: np.ndarray, num_packs: int, patterns: Composition, shares: np.ndarray, *, seed: int
) -> np.ndarray:
    """Return packs as lengths, int32 (at most num_packs, places), 0 for none: each pattern is used
    in proportion to its share, float64 (num_patterns,), and the samples take the places of the
    patterns by the rank of their lengths."""
    ends = np.floor(np.cumsum(shares) * (num_packs / shares.sum()) + 1e-9).astype(np.int64)
    times = np.diff(ends, prepend=0)
    used = select_patterns(patterns._replace(multiplicity=times), np.flatnonzero(times))
    packs = _rows_of(used)
    places = np.random.default_rng(seed).permutation(np.flatnonzero(packs))
    places = places[np.argsort(-packs.ravel()[places], kind="stable")]
    lengths = np.repeat(np.arange(len(counts)), counts)[::-1][: len(places)]
    packs[:] = 0
    packs.ravel()[places[: len(lengths)]] = lengths
    return packs


@Kernel
def _deal(lengths: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return the pack of each sample, int64 (num_samples,): the one with the fewest tokens when it
    is the sample's turn. ``tokens`` int64 (num_packs,): those in packs at the beginning."""
    num_packs = tokens.shape[0]
    heap = list(np.sort(tokens * num_packs + np.arange(num_packs)))
    pack_of = np.empty(len(lengths), np.int64)
    for sample in range(len(lengths)):
        pack_of[sample] = heap[0] % num_packs
        heapq.heapreplace(heap, heap[0] + lengths[sample] * num_packs)
    return pack_of


@partial(Kernel, slowness=3)
def _search(bins: _Bins, capacity: int, state: np.ndarray, work: int) -> tuple[int, bool]:
    """Re-divide packs above the capacity and others, until none is above or ``work`` is used up.
    Returns the work that is left, and whether none is above."""
    tokens, num_packs = bins.tokens, len(bins.tokens)
    for _ in range(_SORTED_ROUNDS):
        order = np.argsort(tokens, kind="mergesort")
        for pair in range(num_packs // 2):
            pack, other = order[-1 - pair], order[pair]
            if tokens[pack] <= capacity:
                break
            work -= _redivide(bins, capacity, pack, other, state)
    # Packs that are no longer above or below the capacity are dropped when drawn.
    above = [pack for pack in range(num_packs) if tokens[pack] > capacity]
    below = [pack for pack in range(num_packs) if tokens[pack] < capacity]
    is_listed = tokens < capacity
    excess = np.maximum(tokens - capacity, 0).sum()
    tries = 0
    while len(above) > 0 and work > 0:
        tries += 1
        if tries % (_PATIENCE * (num_packs + 1)) == 0:
            now = np.maximum(tokens - capacity, 0).sum()
            if now > 0.9 * excess:
                break
            excess = now
        place = random_below(state, len(above))
        pack = above[place]
        if tokens[pack] <= capacity:
            above[place] = above[-1]
            above.pop()
            continue
        # Passing the excess to a full pack also helps: others fit that pack.
        other = -1
        while tries % 4 != 0 and len(below) > 0:
            place = random_below(state, len(below))
            other = below[place]
            if tokens[other] < capacity:
                break
            is_listed[other] = False
            below[place] = below[-1]
            below.pop()
            other = -1
        if other < 0:
            other = random_below(state, num_packs)
        if other == pack:
            continue
        work -= _redivide(bins, capacity, pack, other, state)
        if tokens[other] > capacity:
            above.append(other)
        for changed in (pack, other):
            if tokens[changed] < capacity and not is_listed[changed]:
                is_listed[changed] = True
                below.append(changed)
    return work, len(above) == 0


@Kernel
def _redivide(bins: _Bins, capacity: int, pack: int, other: int, state: np.ndarray) -> int:
    """Divide some samples of two packs anew, unless the squares of the tokens above the capacity
    would grow: the pack gets the subset that fills it best; or half of the tokens, if both packs
    stay full. Subsets are found among the sums of both halves of the samples, sorted (Horowitz and
    Sahni, 1974). Returns the steps that this took."""
    packs, sizes, tokens, pool, sums, subsets = bins
    most = len(pool) // 2
    own, others = min(most, sizes[pack]), min(most, sizes[other])
    _draw_first(packs[pack], sizes[pack], own, state)
    _draw_first(packs[other], sizes[other], others, state)
    number = own_tokens = 0
    for place in range(most):
        if place < own:
            pool[number] = packs[pack, place]
            own_tokens += pool[number]
            number += 1
        if place < others:
            pool[number] = packs[other, place]
            number += 1
    both = tokens[pack] + tokens[other]
    room = max(0, max(capacity, (both + 1) // 2) - tokens[pack] + own_tokens)
    half = number // 2
    steps = 2 * number + (4 << half)
    low = _sorted_sums(pool[:half], sums[:2], subsets[:2])
    high = 2 + _sorted_sums(pool[half:number], sums[2:], subsets[2:])
    last, best, chosen = (1 << (number - half)) - 1, -1, 0
    for first in range(1 << half):
        if sums[low, first] > room or best == room:
            break
        while sums[low, first] + sums[high, last] > room:
            last -= 1
        if sums[low, first] + sums[high, last] > best:
            best = sums[low, first] + sums[high, last]
            chosen = subsets[low, first] | subsets[high, last] << half
    new = tokens[pack] - own_tokens + best
    before = max(0, tokens[pack] - capacity) ** 2 + max(0, tokens[other] - capacity) ** 2
    after = max(0, new - capacity) ** 2 + max(0, both - new - capacity) ** 2
    moved = 0
    for place in range(number):
        moved += chosen >> place & 1
    fits = sizes[pack] - own + moved <= packs.shape[1]
    if after > before or not fits or sizes[other] - others + number - moved > packs.shape[1]:
        return steps
    for changed, count in ((pack, own), (other, others)):
        sizes[changed] -= count
        for place in range(min(count, sizes[changed])):
            packs[changed, place] = packs[changed, sizes[changed] + count - 1 - place]
    for place in range(number):
        changed = pack if chosen >> place & 1 else other
        packs[changed, sizes[changed]] = pool[place]
        sizes[changed] += 1
    tokens[pack], tokens[other] = new, both - new
    return steps


@Kernel
def _draw_first(lengths: np.ndarray, size: int, number: int, state: np.ndarray) -> None:
    """Bring random ones of the first ``size`` lengths to the first ``number`` places."""
    for place in range(number if number < size else 0):
        drawn = place + random_below(state, size - place)
        lengths[place], lengths[drawn] = lengths[drawn], lengths[place]


@Kernel
def _sorted_sums(lengths: np.ndarray, sums: np.ndarray, subsets: np.ndarray) -> int:
    """Find the sums of all subsets, ascending, with a bit for each length in the subset. Returns
    which row of ``sums`` and ``subsets``, int64 (2, …), holds them."""
    sums[0, 0] = subsets[0, 0] = 0
    row = 0
    for item in range(len(lengths)):
        without = with_item = 0
        for place in range(2 << item):
            more = sums[row, with_item] + lengths[item]
            if without < 1 << item and sums[row, without] <= more:
                sums[1 - row, place] = sums[row, without]
                subsets[1 - row, place] = subsets[row, without]
                without += 1
            else:
                sums[1 - row, place] = more
                subsets[1 - row, place] = subsets[row, with_item] | 1 << item
                with_item += 1
        row = 1 - row
    return row
