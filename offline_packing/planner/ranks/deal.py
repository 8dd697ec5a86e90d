"""Deal of packs to steps and ranks, and the order of the steps.

Ranks meet twice in a step, after the vision tower and after the language model, so that the time of
a step is the largest tower cost among its ranks plus the largest language cost. A step is good if
its packs are alike in both:

    tower, language of 4 packs      (1, 8) (3, 7) (1, 7) (3, 8)      2 ranks
    sorted by the sum               (1, 7) (1, 8) | (3, 7) (3, 8)    time 1 + 8 + 3 + 8

So the steps themselves differ: the data of optimizer steps would vary more than with packs at
random. Steps that follow each other are therefore chosen to make up for each other, in blocks of
eight; and packs of a kind of their own, as of nothing but short texts, are spread over more steps:

    32 ranks, 42 blocks of 8 steps, 160 packs of texts      5 steps of 32, or 10 of 16 and 16 others
"""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from offline_packing.planner.ranks.layout import RankLayout, idle_shares
from offline_packing.planner.strategies.kernels import Kernel, random_below, random_state

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

#: Share of the sum's idle time that may be lost for less of both phases' together.
MAX_LOSS: Final = 0.01
#: Weights of the sum beside the two phases, tried in turn until it loses no more than that.
_SUM_WEIGHTS: Final = (0.0, 1.0, 4.0)
#: Places at which a set of steps is cut, as parts of it; and steps next to each other, and rounds,
#: in which single packs are exchanged.
_CUTS, _NEAR, _ROUNDS = 16, 8, 4


class PackCosts(NamedTuple):
    """Costs and contents of packs, a row per pack."""

    #: (num_packs,): tower and language model
    cost: Floats
    #: (num_packs,): the tower's part
    tower: Floats
    #: (num_packs,): the packs of a step are of one kind
    kinds: npt.NDArray[np.integer]
    #: (num_packs, num_features): quantities whose sums are balanced over successive steps
    features: Floats

    @classmethod
    def of(
        cls,
        cost: Floats,
        tower: Floats | None = None,
        kinds: npt.NDArray[np.integer] | None = None,
        features: Floats | None = None,
    ) -> "PackCosts":
        """Make the table; by default there is one phase, one kind, and no feature."""
        return cls(
            cost,
            np.zeros(len(cost)) if tower is None else tower,
            np.zeros(len(cost), np.int64) if kinds is None else kinds,
            np.zeros((len(cost), 0)) if features is None else features,
        )

    def rows(self, packs: Integers) -> "PackCosts":
        """Return the rows of some packs."""
        cost, tower, kinds, features = self
        return PackCosts(cost[packs], tower[packs], kinds[packs], features[packs])

    def by_likeness(self, packs: Integers) -> Integers:
        """Order packs by how close their cost is to the first pack's."""
        away = np.abs(self.cost[packs] - self.cost[packs[0]])
        return np.argsort(away + np.abs(self.tower[packs] - self.tower[packs[0]]), kind="stable")


def similar_steps(cost: Floats, tower: Floats, num_ranks: int) -> Integers:
    """Form steps of packs that cost alike: indices (num_packs // num_ranks, num_ranks), each once.

    The packs are parted again and again, across the tower's cost, the language model's or the sum,
    where the time of the parts is least; then single packs of neighbouring steps are exchanged. The
    sum's idle time stays within a point of what sorting by the sum gives.

    Args:
        cost: (num_packs,), a multiple of num_ranks of them: tower and language model.
        tower: (num_packs,), the tower's part. Without any there is one phase, which sorting serves
            best.
    """
    by_sum = np.argsort(cost, kind="stable").reshape(-1, num_ranks)
    if not tower.any() or len(by_sum) < 2 or num_ranks == 1:
        return by_sum
    keys = np.stack([tower, cost - tower, cost])
    limit, by_sum_two = idle_shares(cost[by_sum], tower[by_sum])
    orders = np.argsort(keys, axis=1, kind="stable")
    for weight in _SUM_WEIGHTS:
        weights = np.array([1.0, 1.0, weight])
        steps = _part(keys, weights, orders.copy(), num_ranks)
        if idle_shares(cost[steps], tower[steps])[0] <= limit + MAX_LOSS:
            break
    else:
        return by_sum
    parted = steps.copy()
    _exchange_near(keys, weights, steps)
    for found in (steps, parted):
        one, two = idle_shares(cost[found], tower[found])
        if one <= limit + MAX_LOSS and two < by_sum_two:
            return found
    return by_sum


@Kernel
def _part(keys: Floats, weights: Floats, orders: Integers, num_ranks: int) -> Integers:
    """Cut the packs into steps, again and again. `orders` (num_keys, num_packs) holds the packs
    sorted by each key; a part is the same stretch of all orders, so that a cut is a stable
    partition."""
    num_keys, count = keys.shape
    is_left, held = np.zeros(count, np.bool_), np.empty(count, np.int64)
    begins, ends = [0], [count]
    while len(begins):
        begin, end = begins.pop(), ends.pop()
        if end - begin < 2 * num_ranks:
            continue
        across, cut = _best_cut(keys, weights, orders, begin, end, num_ranks)
        for place in range(begin, end):
            is_left[orders[across, place]] = place < cut
        for key in range(num_keys):
            place, later = begin, 0
            for pack in orders[key, begin:end]:
                if is_left[pack]:
                    orders[key, place] = pack
                    place += 1
                else:
                    held[later] = pack
                    later += 1
            orders[key, place:end] = held[:later]
        begins += [cut, begin]
        ends += [end, cut]
    return orders[0].copy().reshape(-1, num_ranks)


@Kernel
def _best_cut(
    keys: Floats, weights: Floats, orders: Integers, begin: int, end: int, num_ranks: int
) -> tuple[int, int]:
    """Choose the key whose order is cut, and the place, so that the parts would take the least time
    if each of their steps had the part's largest packs."""
    steps = (end - begin) // num_ranks
    parts = np.arange(1, _CUTS) * steps // _CUTS
    cuts = begin + num_ranks * np.minimum(np.maximum(1, parts), steps - 1)
    bounds = np.concatenate((np.array([begin]), cuts, np.array([end])))
    left, right = np.empty((2, len(cuts)))
    least, across, at = np.inf, 0, cuts[0]
    for key in range(len(keys)):
        time = np.zeros(len(cuts))
        for other in np.flatnonzero(weights):
            _largest(keys[other], orders[key], bounds, left, right)
            time += weights[other] * (left * (cuts - begin) + right * (end - cuts))
        best = np.argmin(time)
        if time[best] < least:
            least, across, at = time[best], key, cuts[best]
    return across, at


@Kernel
def _largest(
    values: Floats, order: Integers, bounds: Integers, left: Floats, right: Floats
) -> None:
    """Find the largest value before and after each cut, all bounds but the first and the last."""
    largest, place = 0.0, bounds[0]
    for i in range(len(left)):
        while place < bounds[i + 1]:
            largest = max(largest, values[order[place]])
            place += 1
        left[i] = largest
    largest, place = 0.0, bounds[-1]
    for i in range(len(left) - 1, -1, -1):
        while place > bounds[i + 1]:
            place -= 1
            largest = max(largest, values[order[place]])
        right[i] = largest


@Kernel
def _exchange_near(keys: Floats, weights: Floats, steps: Integers) -> None:
    """Exchange a step's largest packs, in place, for packs of near steps that save most time."""
    num_steps, num_ranks = steps.shape
    used = np.flatnonzero(weights)
    top, second = np.empty((2, num_steps, len(keys)))
    largest = np.empty((num_steps, len(keys)), np.int64)
    for step in range(num_steps):
        _find_largest(keys, steps, step, top, second, largest)
    for _ in range(_ROUNDS):
        made = 0
        for step in range(num_steps):
            for key in used:
                for near in range(max(0, step - _NEAR), min(num_steps, step + _NEAR + 1)):
                    own = largest[step, key]
                    pack, best, chosen = steps[step, own], 0.0, -1
                    for k in used:
                        best += weights[k] * (top[step, k] + top[near, k])
                    best *= 1 - 1e-9
                    for rank in range(num_ranks if near != step else 0):
                        other, time = steps[near, rank], 0.0
                        for k in used:
                            here = second[step, k] if largest[step, k] == own else top[step, k]
                            there = second[near, k] if largest[near, k] == rank else top[near, k]
                            time += weights[k] * max(here, keys[k, other])
                            time += weights[k] * max(there, keys[k, pack])
                        if time < best:
                            best, chosen = time, rank
                    if chosen >= 0:
                        steps[step, own], steps[near, chosen] = steps[near, chosen], pack
                        _find_largest(keys, steps, step, top, second, largest)
                        _find_largest(keys, steps, near, top, second, largest)
                        made += 1
        if not made:
            break


@Kernel
def _find_largest(
    keys: Floats, steps: Integers, step: int, top: Floats, second: Floats, largest: Integers
) -> None:
    """Find the two largest values of a step in each key, and the rank of the first."""
    for key in range(len(keys)):
        first, next_one, rank_of_first = -1.0, -1.0, 0
        for rank in range(steps.shape[1]):
            value = keys[key, steps[step, rank]]
            if value > first:
                first, next_one, rank_of_first = value, first, rank
            elif value > next_one:
                next_one = value
        top[step, key], second[step, key] = first, next_one
        largest[step, key] = rank_of_first


#: Steps that make up for each other.
BLOCK: Final = 8
#: Limit of a feature in a step: a part of a block's average, plus this number of standard
#: deviations of random blocks; multiplied by these factors if less would cost too much.
_OF_MEAN, _OF_SPREAD, _TIMES = 0.35, 3.0, (1, 1.5, 2, 3)
#: Packs with more than this multiple of the mean of a step at its limit are spread.
_RARE: Final = 1.2
#: Numbers of packs, from which companions are chosen.
_CHOICES: Final = 24


def spread_steps(packs: PackCosts, num_ranks: int, features: Floats) -> Integers:
    """Form steps as `similar_steps` does, but spread the packs with most of a feature over all
    steps that blocks can even out, with the packs that cost least to wait for. If the sum's idle
    time would grow by more than `MAX_LOSS`, they are in fewer steps. ``features`` (num_all_packs,
    num_features) include packs of other kinds."""
    cost, tower = packs.cost, packs.tower
    if num_ranks == 1 or len(cost) < 2 * num_ranks:
        return similar_steps(cost, tower, num_ranks)
    by_sum = np.sort(cost).reshape(-1, num_ranks)
    limit = idle_shares(by_sum, np.zeros(by_sum.shape))[0] + MAX_LOSS
    block = BLOCK * num_ranks
    mean, spread = features.mean(axis=0), features.std(axis=0)
    for times in _TIMES:
        most = times * (_OF_MEAN * block * mean + _OF_SPREAD * np.sqrt(block) * spread)
        tables, rest = _rare_steps(packs, num_ranks, mean, most)
        if not tables:
            break
        table = np.concatenate([*tables, rest[similar_steps(cost[rest], tower[rest], num_ranks)]])
        if idle_shares(cost[table], np.zeros(table.shape))[0] <= limit:
            return table
    return similar_steps(cost, tower, num_ranks)


def _rare_steps(
    packs: PackCosts, num_ranks: int, mean: Floats, most: Floats
) -> tuple[list[Integers], Integers]:
    """Form steps of packs with most of a feature and of others; return them, and the packs that are
    left. A step holds about `most` (num_features,) of the feature."""
    cost, tower = packs.cost, packs.tower
    is_left, tables = np.ones(len(cost), np.bool_), []
    for values, average, limit in zip(packs.features.T, mean, most, strict=True):
        if np.partition(values, -num_ranks)[-num_ranks:].sum() <= limit:
            continue
        rare = np.flatnonzero(is_left & (values > _RARE * limit / num_ranks))
        part = max(1, int(limit / values[rare].mean())) if len(rare) else 1
        num_steps = len(rare) // part
        others = np.flatnonzero(is_left & (values <= average))
        if not num_steps or num_steps * (num_ranks - part) > len(others) // 2:
            continue
        rare = rare[np.argsort(cost[rare], kind="stable")[: num_steps * part]]
        chosen = _cheapest(packs, others, num_steps * (num_ranks - part))
        company = chosen[similar_steps(cost[chosen], tower[chosen], num_ranks - part)]
        company = company[np.argsort(cost[company].max(axis=1), kind="stable")]
        tables.append(np.concatenate([rare.reshape(num_steps, part), company], axis=1))
        is_left[tables[-1]] = False
    return tables, np.flatnonzero(is_left)


def _cheapest(packs: PackCosts, some: Integers, count: int) -> Integers:
    """Choose the `count` packs whose largest tower cost and largest language cost add up to the
    least."""
    of_tower = packs.tower[some]
    language = packs.cost[some] - of_tower
    by_tower = np.argsort(of_tower, kind="stable")
    least, best = np.inf, by_tower[:count]
    for size in np.unique(np.geomspace(count, len(some), _CHOICES).astype(np.int64)):
        chosen = by_tower[:size]
        chosen = chosen[np.argsort(language[chosen], kind="stable")[:count]]
        time = of_tower[chosen].max() + language[chosen].max()
        if time < least:
            least, best = time, chosen
    return some[best]


#: Exchanges tried per step, and at most.
_TRIES_PER_STEP, _MOST_TRIES = 400, 4_000_000


def deal_steps(packs: PackCosts, num_ranks: int, rng: np.random.Generator) -> Integers:
    """Pack numbers, (num_steps, num_ranks): each once, and the fewest repeated that fill all steps.
    `rng` decides the steps' order, the ranks within a step, and the repeated packs."""
    tables = [np.empty((0, num_ranks), np.int64)]
    for kind in np.unique(packs.kinds):
        own = rng.permutation(np.flatnonzero(packs.kinds == kind))  # equal ones meet at random
        if odd := len(own) % num_ranks:
            # A step for the packs left over after whole steps, at a random place among the costs.
            # It is filled up with the packs next in cost, which other steps hold as well, so that
            # none holds a pack twice, if there are enough.
            likest = packs.by_likeness(own)
            tables.append(own[np.resize(likest, num_ranks)][None])
            own = own[np.sort(likest[odd:])]
        tables.append(own[spread_steps(packs.rows(own), num_ranks, packs.features)])
    table = np.concatenate(tables)
    if not len(table):
        return table
    known = (packs.tower, packs.cost - packs.tower, packs.kinds)
    sums = [_in_detail(values[table].mean(axis=1)) for values in known]
    units = [one.std(axis=0) for one in sums]
    sums.append(packs.features[table].mean(axis=1))
    units.append(packs.features.std(axis=0) / np.sqrt(num_ranks))  # of steps at random
    order = _even_order(np.concatenate(sums, axis=1), np.concatenate(units), rng)
    return np.asarray(rng.permuted(table[order], axis=1))


def cost_grouped_order(packs: PackCosts, layout: RankLayout, seed: int) -> Integers:
    """Order packs so that all ranks read packs of similar cost at the same step.

    Returns a permutation, int64 (num_packs,): place i of the written order gets pack ``order[i]``.
    It serves the given layout; another number of ranks reads other packs at the same step. Of
    several kinds, packs of each have to divide among the ranks.
    """
    rng, num_packs = np.random.default_rng(seed), len(packs.cost)
    step = layout.steps(num_packs)
    is_full = np.bincount(step) == layout.num_ranks
    places = np.lexsort((np.arange(num_packs), step, ~is_full[step]))  # incomplete steps last
    drawn = rng.permutation(num_packs)
    odd = num_packs - int(is_full.sum()) * layout.num_ranks
    likest = packs.by_likeness(drawn)[:odd] if odd else drawn[:0]
    own = np.sort(np.delete(drawn, likest))
    table = deal_steps(packs.rows(own), layout.num_ranks, rng)
    order = np.empty(num_packs, np.int64)
    order[places] = np.concatenate([own[table].ravel(), drawn[likest]])
    return order


def _in_detail(values: Floats) -> Floats:
    """Scale a quantity, and add its second and third power: steps whose sums of all three are alike
    are also alike in what depends on the quantity in other ways."""
    spread = values.std() if len(values) else 0.0
    scaled = (values - values.mean()) / spread if spread else values * 0.0
    return np.stack([scaled, scaled**2, scaled**3], axis=1)


def _even_order(features: Floats, units: Floats, rng: np.random.Generator) -> Integers:
    """Order steps so that the means of successive `BLOCK` are close to the mean of all. The order
    begins at random; two steps are exchanged if that brings their blocks' sums closer to the mean.
    ``features`` (num_steps, num_features); ``units`` (num_features,): deviations that are equally
    bad."""
    order = rng.permutation(len(features))
    if len(features) <= BLOCK:
        return order
    used = features.std(axis=0) > 1e-9 * np.abs(features).max(axis=0)
    if used.any():
        scaled = (features[:, used] - features[:, used].mean(axis=0)) / units[used]
        tries = min(_TRIES_PER_STEP * len(order), _MOST_TRIES)
        _even_out(order, scaled, BLOCK, tries, random_state([int(rng.integers(2**31))]))
    return order


@Kernel
def _even_out(order: Integers, features: Floats, block: int, tries: int, state: Integers) -> None:
    """Exchange steps of two blocks, in place, if the squares of their sums fall. Steps after the
    last whole block are exchanged, too, but not counted."""
    whole, width = len(order) // block * block, features.shape[1]
    sums = np.zeros((len(order) // block + 1, width))
    for place in range(whole):
        sums[place // block] += features[order[place]]
    for _ in range(tries):
        here, there = random_below(state, whole), random_below(state, len(order))
        a, b = here // block, there // block
        change = 0.0
        for i in range(width):
            moved = features[order[there], i] - features[order[here], i]
            change += moved * (2 * sums[a, i] + moved)
            if there < whole:
                change -= moved * (2 * sums[b, i] - moved)
        if a != b and change < -1e-9:
            for i in range(width):
                moved = features[order[there], i] - features[order[here], i]
                sums[a, i] += moved
                sums[b, i] -= moved if there < whole else 0.0
            order[here], order[there] = order[there], order[here]
