"""Samples to micro batches under a budget of tokens, the same number for each rank."""

import heapq
from collections.abc import Sequence
from itertools import chain

import numpy as np

from offline_packing.planner.plan_packs import plan_packs
from offline_packing.planner.strategies.strategy import Packs, join_packs, reorder_packs


def fill_micro_batches(
    ids: np.ndarray,
    lengths: np.ndarray,
    cost: np.ndarray,
    budget: int,
    num_ranks: int,
    seed: Sequence[int],
) -> Packs:
    """Put the samples `ids` into as few micro batches as `budget` tokens allow, if possible a
    multiple of num_ranks of them. `lengths` and `cost` are of all samples."""
    planning_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    plan = plan_packs(lengths[ids], budget, seed=planning_seed)
    packs = Packs(ids[plan.sample_ids], plan.pack_offsets)
    odd = packs.num_packs % num_ranks
    if not odd:
        return packs
    # The rows of most samples: small ones are easily divided.
    by_size = np.argsort(np.diff(packs.pack_offsets), kind="stable")
    last = reorder_packs(packs, by_size[-odd:])
    rest = reorder_packs(packs, np.sort(by_size[:-odd]))
    divided = _divide(last.sample_ids, lengths, cost, budget, num_ranks)
    if divided is None:
        return _split(packs, lengths, cost, budget, num_ranks - odd)
    return join_packs([rest, _as_packs(divided)])


def _divide(
    ids: np.ndarray, lengths: np.ndarray, cost: np.ndarray, budget: int, count: int
) -> list[list[int]] | None:
    """Divide samples into `count` micro batches of similar cost: the costliest first, each to that
    with the lowest cost that has room. None if that fails."""
    parts: list[list[int]] = [[] for _ in range(count)]
    spent, room = np.zeros(count), np.full(count, budget)
    for item in ids[np.argsort(-cost[ids], kind="stable")].tolist():
        open_parts = np.flatnonzero(room >= lengths[item])
        if not len(open_parts):
            return None
        part = open_parts[spent[open_parts].argmin()]
        parts[part].append(item)
        spent[part] += cost[item] or np.finfo(float).tiny
        room[part] -= lengths[item]
    return parts if all(parts) else None


def _split(packs: Packs, lengths: np.ndarray, cost: np.ndarray, budget: int, count: int) -> Packs:
    """Make up to `count` more micro batches of the same samples: the costliest of several samples
    becomes two of similar cost, again and again."""
    offsets = packs.pack_offsets
    several = np.flatnonzero(np.diff(offsets) > 1)
    costs = np.add.reduceat(cost[packs.sample_ids], offsets[:-1])[several]
    chosen = several[np.argsort(-costs, kind="stable")[:count]]
    whole = [packs.sample_ids[offsets[i] : offsets[i + 1]] for i in chosen]
    parts = [(-cost[ids].sum(), ids.tolist()) for ids in whole]
    heapq.heapify(parts)
    alone: list[list[int]] = []
    while count and parts:
        count -= 1
        largest = np.array(heapq.heappop(parts)[1])
        for half in _divide(largest, lengths, cost, budget, 2) or ():
            if len(half) > 1:
                heapq.heappush(parts, (-cost[half].sum(), half))
            else:
                alone.append(half)
    rest = reorder_packs(packs, np.setdiff1d(np.arange(packs.num_packs), chosen))
    return join_packs([rest, _as_packs([*alone, *(ids for _, ids in parts)])])


def _as_packs(parts: Sequence[Sequence[int]]) -> Packs:
    sizes = [len(part) for part in parts]
    return Packs(np.array([*chain(*parts)], np.int64), np.cumsum([0, *sizes]))
