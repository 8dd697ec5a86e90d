"""Packs that go over 1, 2, 4 … ranks, and slots of them: packs that are trained at the same time.

Each sample is padded to what its pack's ranks can cut: a sample of n tokens takes ceil(n / cp) * cp
of the cp * room tokens of a pack over cp ranks; all numbers are in units of the least padding. The
longest sample left opens a pack over as few ranks as hold it, which is filled with the longest that
fit, the last two exactly where that is possible. Samples that fit one rank are packed as usual.
"""

import numpy as np

from offline_packing.planner.strategies.auto import auto
from offline_packing.planner.strategies.composition import (
    as_rows,
    count_lengths,
    expand_composition,
    from_entries,
)
from offline_packing.planner.strategies.kernels import (
    Kernel,
    bitset_at_most,
    bitset_of,
    bitset_remove,
    counting_sort,
    list_of,
    random_state,
    shuffle_between,
)
from offline_packing.planner.strategies.strategy import Packs, join_packs, reorder_packs

_PAIRS = 256  # lengths that are tried as one of the last two of a pack
_ENOUGH = 1.005  # ranks over the least possible with which no pack goes over more than it needs
_SLOT_STREAM = 6  # random numbers of their own: other choices stay as they are


def pack_over_ranks(
    lengths: np.ndarray, capacities: np.ndarray, *, seed: int | None, ranks: int
) -> Packs:
    """Packs of all samples.

    Packs go over no more ranks than their longest sample needs, unless larger ones are needed to
    fill the room: then over at least 2, 4 … of them, whichever takes the fewest slots.

    Args:
        lengths: int32 (num_samples,), in units.
        capacities: int64 (num_sizes,), units of a pack over 1, 2, 4 … ranks; multiples of these.
            Every sample fits the last.
        seed: decides which of the samples of a length goes where; None: in sample order.
        ranks: of a slot.
    """
    counts = count_lengths(lengths, int(capacities[-1]))
    room = int(capacities[0])  # of a rank
    least = -(-int(counts @ np.arange(len(counts))) // room)
    fewest, found = None, None
    for smallest in range(len(capacities)):
        # Packs over more than 2**smallest ranks, by lengths; then the others, by blocks.
        left, size = counts.copy(), 1 << smallest
        entries, patterns, num_ranks = _fill_large(left, capacities, smallest)
        blocks = -(-np.arange(len(left)) // size)
        in_blocks = np.bincount(blocks, left)[: int(capacities[smallest]) // size + 1]
        rest = auto(in_blocks.astype(np.int64))
        used = -(-(num_ranks + size * rest.num_packs) // ranks)
        if fewest is None or used < fewest:
            fewest, found = used, (size, from_entries(entries, patterns), rest)
        if used <= -(-int(least * _ENOUGH) // ranks):
            break
    assert found is not None
    size, large, rest = found
    starts = np.append(0, np.cumsum(counts))
    order = np.empty(len(lengths), np.int32 if len(lengths) < 2**31 else np.int64)
    counting_sort(lengths, starts, order)
    if seed is not None:
        shuffle_between(order, starts, random_state(seed))
    in_large = large.used_counts(len(counts))
    place = np.arange(len(order)) - np.repeat(starts[:-1], counts)
    is_large = place < np.repeat(in_large, counts)
    first, second = order[is_large], order[~is_large]
    blocks = -(-lengths[second] // size)
    block_counts = np.bincount(blocks, minlength=int(rest.lengths.max(initial=0)) + 1)
    return join_packs(
        [
            expand_composition(large, lengths[first], in_large).of(first),
            expand_composition(rest, blocks, block_counts).of(second),
        ]
    )


@Kernel
def _fill_large(
    counts: np.ndarray, capacities: np.ndarray, smallest: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Entries [length, 1] and patterns [end of entries, 1] of the packs that do not fit
    2**smallest ranks, largest first, and their ranks; their samples are taken from ``counts``."""
    entries, patterns = list_of((0, 0)), list_of((0, 0))
    num_ranks, longest = 0, counts.shape[0] - 1
    for power in range(capacities.shape[0] - 1, smallest, -1):
        size, half = 1 << power, 1 << (power - 1)
        blocks = np.zeros(longest // size + 2, np.int64)
        for length in range(1, longest + 1):
            blocks[-(-length // size)] += counts[length]
        present = bitset_of(blocks)
        while True:
            while longest > 0 and counts[longest] == 0:
                longest -= 1
            if -(-longest // half) * half <= capacities[power - 1]:
                break
            space = capacities[power] // size
            block = -(-longest // size)
            while block > 0:
                entries.append((_take(counts, blocks, present, block, size), 1))
                space -= block
                block = _next_block(blocks, present, space)
            patterns.append((len(entries), 1))
            num_ranks += size
    return as_rows(entries), as_rows(patterns), num_ranks


@Kernel
def _take(
    counts: np.ndarray, blocks: np.ndarray, present: np.ndarray, block: int, size: int
) -> int:
    """Take the longest sample of a block."""
    length = min(block * size, counts.shape[0] - 1)
    while counts[length] == 0:
        length -= 1
    counts[length] -= 1
    blocks[block] -= 1
    if blocks[block] == 0:
        bitset_remove(present, block)
    return length


@Kernel
def _next_block(blocks: np.ndarray, present: np.ndarray, space: int) -> int:
    """The largest block for a space, or one that fills it up with a second; 0 if none fits."""
    first = bitset_at_most(present, min(space, blocks.shape[0] - 1))
    if first <= 0 or first == space:
        return max(first, 0)
    block = first
    for _ in range(_PAIRS):
        other = space - block
        if block <= other:
            break
        if other < blocks.shape[0] and blocks[other] > 0:
            return block
        block = bitset_at_most(present, block - 1)
        if block <= 0:
            break
    return first


def fill_slots(
    packs: Packs, lengths: np.ndarray, cost: np.ndarray, capacities: np.ndarray, seed: int | None
) -> tuple[Packs, np.ndarray]:
    """Order packs so that they fill slots of all ranks with nearly equal cost on each.

    Packs of similar cost per rank are paired, pairs with packs of twice the ranks, and so on. The
    packs left over at each size fill one more slot: the costliest go over more ranks, or are split.
    The slots come in random order; the packs of one by ranks, the most first, so that each begins
    at a multiple of its ranks.

    Args:
        lengths: int32 (num_samples,), in units.
        cost: float64 (num_samples,); a pack over cp ranks costs each of them its cp-th part.
        capacities: int64 (num_sizes,), units of a pack over 1, 2, 4 … ranks; the last is a slot's.
        seed: of the order of slots; None: the costliest first.

    Returns:
        The packs, and the ranks of each: int32 (num_packs,).
    """
    num_sizes = len(capacities)
    powers = np.full(packs.num_packs, num_sizes - 1)  # of the fewest ranks that hold each pack
    for power in range(num_sizes - 2, -1, -1):
        padded = -(-lengths.astype(np.int64) >> power) << power
        powers[packs.sums(padded) <= capacities[power]] = power
    totals = np.add.reduceat(cost[packs.sample_ids], packs.pack_offsets[:-1])
    order, left = _pair_up(totals / (1 << powers), powers, num_sizes)
    last, widened = _widen(reorder_packs(packs, left), powers[left], lengths, cost, capacities)
    packs = join_packs([reorder_packs(packs, order), last])
    powers = np.append(powers[order], widened)
    slots = np.cumsum(1 << powers) - 1 >> (num_sizes - 1)
    turn = np.arange(slots.max(initial=-1) + 1)
    if seed is not None:
        turn = np.random.default_rng([seed, _SLOT_STREAM]).permutation(turn)
    order = np.lexsort((-powers, turn[slots]))
    return reorder_packs(packs, order), (1 << powers[order]).astype(np.int32)


def _pair_up(cost: np.ndarray, powers: np.ndarray, num_sizes: int) -> tuple[np.ndarray, np.ndarray]:
    """Packs that fill slots, one slot after the other, the costliest first; and the packs left
    over. ``cost`` (num_packs,) per rank."""
    num_packs = len(cost)
    pairs, nodes, left = [np.zeros((0, 2), np.int64)], np.zeros(0, np.int64), []
    for power in range(num_sizes):
        nodes = np.append(nodes, np.flatnonzero(powers == power))
        nodes = nodes[np.argsort(-cost[nodes], kind="stable")]
        if power == num_sizes - 1:
            break
        if len(nodes) % 2:
            left.append(int(nodes[-1]))
        pairs.append(nodes[: len(nodes) // 2 * 2].reshape(-1, 2))
        nodes = np.arange(len(cost), len(cost) + len(pairs[-1]))
        cost = np.append(cost, cost[pairs[-1]].max(axis=1))
    tree = np.concatenate(pairs)

    def leaves(nodes: np.ndarray) -> np.ndarray:
        while (inner := nodes >= num_packs).any():
            ends = np.cumsum(1 + inner)[inner]
            children = tree[nodes[inner] - num_packs]
            nodes = np.repeat(nodes, 1 + inner)
            nodes[ends - 2], nodes[ends - 1] = children.T
        return nodes

    return leaves(nodes), leaves(np.array(left, np.int64))


def _widen(
    packs: Packs,
    powers: np.ndarray,
    lengths: np.ndarray,
    cost: np.ndarray,
    capacities: np.ndarray,
) -> tuple[Packs, np.ndarray]:
    """Packs of an incomplete slot that take all ranks, and the power of two of each one's ranks:
    again and again the costliest per rank goes over twice the ranks, or becomes two packs."""
    if not packs.num_packs:
        return packs, powers
    parts = np.split(packs.sample_ids, packs.pack_offsets[1:-1])
    found = list(zip(powers.tolist(), parts, strict=True))
    free = (1 << len(capacities) - 1) - int((1 << powers).sum())
    while free:
        narrow = [place for place, (power, _) in enumerate(found) if 1 << power <= free]
        chosen = max(narrow, key=lambda i: (cost[found[i][1]].sum() / (1 << found[i][0]), -i))
        power, ids = found[chosen]
        padded = -(-lengths[ids].astype(np.int64) >> power + 1) << power + 1
        if padded.sum() <= capacities[power + 1]:
            found[chosen] = (power + 1, ids)
        else:  # of several samples: one alone fits as many ranks as there are
            found[chosen] = (power, ids[::2])
            found.append((power, ids[1::2]))
        free -= 1 << power
    offsets = np.cumsum([0, *(len(ids) for _, ids in found)])
    packs = Packs(np.concatenate([ids for _, ids in found]), offsets)
    return packs, np.array([power for power, _ in found])
