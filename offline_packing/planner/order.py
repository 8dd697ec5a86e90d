"""Order in which the packs are written, and so trained on; and numbers of packs that divide among
the ranks, so that every step can be of one kind.
"""

from collections import deque
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np
from numba import njit

from offline_packing.planner.ranks.deal import by_likeness, deal_steps, idle_shares
from offline_packing.planner.strategies.kernels import random_state, shuffle_between
from offline_packing.planner.strategies.strategy import Packs, join_packs

# Random numbers of their own: other choices stay as they are.
_SAMPLE_ORDER_STREAM = 1
_SLOT_STREAM = 6


@dataclass(frozen=True)
class RankLayout:
    """The loader that will read the packs: data-parallel ranks, and loader workers on each."""

    num_ranks: int
    #: workers per rank; 0 (loading in the main process) reads like 1
    num_workers: int = 1
    #: whether the packs of each step are of one kind: all have images, videos, or neither
    uniform: bool = False

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.num_workers < 0:
            raise ValueError(
                f"order has num_ranks {self.num_ranks} and num_workers {self.num_workers}; "
                "num_ranks must be at least 1 and num_workers at least 0"
            )

    @property
    def round(self) -> int:
        """Packs that all workers of all ranks read in one turn. If it divides the number of packs,
        all epochs read the same steps, and so does any divisor of the ranks."""
        return self.num_ranks * max(1, self.num_workers)

    def steps(self, num_packs: int) -> np.ndarray:
        """Training step at which each place in the written order is read: int64 (num_packs,).

        Energon cuts the packs into num_ranks * num_workers contiguous slices, rank after rank and
        worker after worker; a rank takes one pack from each of its workers in turn. What does not
        divide evenly makes some slices one pack longer, in the order of a generalized bit
        reversal (``Sharder.split_samples_to_workers``).
        """
        workers = max(1, self.num_workers)
        slices = self.round
        size, longer = divmod(num_packs, slices)
        sizes = np.full(slices, size)
        sizes[_bit_reversal(np.arange(slices))[:longer]] += 1
        worker = np.repeat(np.arange(slices) % workers, sizes)
        starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
        return (np.arange(num_packs) - starts) * workers + worker


def _bit_reversal(indices: np.ndarray) -> np.ndarray:
    """[0 1 2 3 4 5 6 7] -> [0 4 2 6 1 5 3 7]: both halves in this order, interleaved."""
    if len(indices) <= 2:
        return indices
    middle = len(indices) // 2
    left, right = _bit_reversal(indices[:middle]), _bit_reversal(indices[middle:])
    interleaved = np.stack([left, right[:middle]], axis=1).ravel()
    return np.append(interleaved, right[middle:])  # an odd number leaves one


def cost_grouped_order(
    cost: np.ndarray,
    layout: RankLayout,
    seed: int,
    *,
    tower: np.ndarray | None = None,
    kinds: np.ndarray | None = None,
    features: np.ndarray | None = None,
) -> np.ndarray:
    """An order in which all ranks read packs of similar cost at the same step.

    Returns a permutation, int64 (num_packs,): place i of the written order gets pack ``order[i]``.
    It serves the given layout; another number of ranks reads other packs at the same step. For
    ``tower``, ``kinds`` and ``features``, (num_packs, …), see `deal_steps`. With kinds, packs of
    each have to divide among the ranks.
    """
    rng = np.random.default_rng(seed)
    step = layout.steps(len(cost))
    is_full = np.bincount(step) == layout.num_ranks
    places = np.lexsort((np.arange(len(cost)), step, ~is_full[step]))  # incomplete steps last
    packs = rng.permutation(len(cost))
    odd = len(cost) - int(is_full.sum()) * layout.num_ranks
    likest = by_likeness(packs, cost, tower)[:odd] if odd else packs[:0]
    rest, packs = packs[likest], np.sort(np.delete(packs, likest))
    table = deal_steps(
        cost[packs],
        None if tower is None else tower[packs],
        None if kinds is None else kinds[packs],
        layout.num_ranks,
        rng,
        None if features is None else features[packs],
    )
    order = np.empty(len(cost), np.int64)
    order[places] = np.concatenate([packs[table].ravel(), rest])
    return order


def idle_share(cost: np.ndarray, layout: RankLayout) -> float:
    """Share of time that ranks wait for the slowest: ``cost`` (num_packs,) in written order. Counts
    the steps at which every rank has a pack."""
    return idle_of_order(cost, None, layout)[0]


def idle_of_order(
    cost: np.ndarray, tower: np.ndarray | None, layout: RankLayout
) -> tuple[float, float]:
    """The same, and the share where ranks wait after the tower, too; see `idle_shares`."""
    places = full_steps(len(cost), layout)
    of_tower = np.zeros(places.shape) if tower is None else tower[places]
    return idle_shares(cost[places].astype(np.float64), of_tower)


def full_steps(num_packs: int, layout: RankLayout) -> np.ndarray:
    """Places in the written order that are read at each step at which every rank has a pack: int64
    (num_steps, num_ranks)."""
    step = layout.steps(num_packs)
    is_full = np.bincount(step) == layout.num_ranks
    kept = np.flatnonzero(is_full[step])
    return kept[np.argsort(step[kept], kind="stable")].reshape(-1, layout.num_ranks)


def mixed_steps(kinds: np.ndarray, layout: RankLayout) -> int:
    """Steps whose packs are not of one kind, or that not every rank has: ``kinds`` (num_packs,) in
    written order."""
    step = layout.steps(len(kinds))
    incomplete = int((np.bincount(step) != layout.num_ranks).sum())
    table = kinds[full_steps(len(kinds), layout)]
    return incomplete + int((table != table[:, :1]).any(axis=1).sum())


@njit(cache=True)
def _gather_packs(packs: Packs, order: np.ndarray, out: Packs) -> None:
    end = 0
    for place in range(order.shape[0]):
        pack = order[place]
        for source in range(packs.pack_offsets[pack], packs.pack_offsets[pack + 1]):
            out.sample_ids[end] = packs.sample_ids[source]
            end += 1
        out.pack_offsets[place + 1] = end


def reorder_packs(packs: Packs, order: np.ndarray) -> Packs:
    """The chosen packs in the given order: place i gets pack ``order[i]``, each at most once."""
    size = int(np.diff(packs.pack_offsets)[order].sum())
    offsets = np.zeros(len(order) + 1, np.int64)
    reordered = Packs(np.empty(size, packs.sample_ids.dtype), offsets)
    _gather_packs(packs, order, reordered)
    return reordered


def shuffle_samples(packs: Packs, seed: int) -> Packs:
    """The same packs, the samples in each in random order."""
    sample_ids = packs.sample_ids.copy()
    shuffle_between(sample_ids, packs.pack_offsets, random_state([seed, _SAMPLE_ORDER_STREAM]))
    return Packs(sample_ids, packs.pack_offsets)


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
        capacities: int64 (num_sizes,), units of a pack over 1, 2, 4 … ranks; the last are those of
            a slot.
        seed: of the order of slots; None: the costliest first.

    Returns:
        The packs, and the ranks of each: int32 (num_packs,).
    """
    num_sizes = len(capacities)
    powers = _fewest_ranks(packs, lengths, capacities)
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


def _fewest_ranks(packs: Packs, lengths: np.ndarray, capacities: np.ndarray) -> np.ndarray:
    """Power of two of the fewest ranks that hold each pack, int64 (num_packs,)."""
    powers = np.full(packs.num_packs, len(capacities) - 1)
    for power in range(len(capacities) - 2, -1, -1):
        padded = -(-lengths.astype(np.int64) >> power) << power
        powers[packs.sums(padded) <= capacities[power]] = power
    return powers


def _pair_up(cost: np.ndarray, powers: np.ndarray, num_sizes: int) -> tuple[np.ndarray, np.ndarray]:
    """Packs that fill slots, one slot after the other, the costliest first; and those left over.
    ``cost`` (num_packs,) per rank."""
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
    again and again the costliest per rank goes over twice as many, or becomes two packs."""
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


IMAGES, VIDEOS = 1, 2


def kinds_of(has: np.ndarray, packs: Packs) -> np.ndarray:
    """Kind of each pack, int64 (num_packs,): ``has`` (num_samples,) is the sum of `IMAGES` and
    `VIDEOS`, for what a sample has."""
    return np.asarray(np.bitwise_or.reduceat(has[packs.sample_ids], packs.pack_offsets[:-1]))


def make_uniform(
    packs: Packs, has: np.ndarray, lengths: np.ndarray, layout: RankLayout
) -> tuple[Packs, int, int]:
    """Packs of the same samples, a multiple of the layout's round in number, and of each kind a
    multiple of its ranks; how many packs were halved, and how many are repeated. ``lengths``
    (num_samples,); see `kinds_of` for ``has``."""
    kinds, sizes = kinds_of(has, packs), np.diff(packs.pack_offsets)
    counts = np.bincount(kinds, minlength=4)
    steps = -(-counts // layout.num_ranks)
    steps[counts.argmax()] += -steps.sum() % max(1, layout.num_workers)
    missing = steps * layout.num_ranks - counts
    num_halved, num_repeated = 0, 0
    made, replaced = list[np.ndarray](), list[np.ndarray]()
    for kind in np.flatnonzero(missing):
        own = np.flatnonzero(kinds == kind)
        own = own[np.argsort(-sizes[own], kind="stable")][: missing[kind]]
        parts = deque(packs.sample_ids[slice(*packs.pack_offsets[i : i + 2])] for i in own)
        left, whole = int(missing[kind]), list[np.ndarray]()
        while parts:
            part = parts.popleft()
            # Alternately, so that both halves have media and about the same tokens.
            dealt = part[np.lexsort((-lengths[part], -has[part]))]
            halves = dealt[::2], dealt[1::2]
            if left and all(
                len(half) and np.bitwise_or.reduce(has[half]) == kind for half in halves
            ):
                parts.extend(halves)
                left -= 1
            else:
                whole.append(part)
        made += [*whole, *islice(cycle(whole), left)]
        replaced.append(own)
        num_halved, num_repeated = num_halved + int(missing[kind]) - left, num_repeated + left
    if not made:
        return packs, 0, 0
    kept = np.setdiff1d(np.arange(packs.num_packs), np.concatenate(replaced))
    new = Packs(np.concatenate(made), np.cumsum([0, *map(len, made)]))
    return join_packs([reorder_packs(packs, kept), new]), num_halved, num_repeated
