"""Mixtures that change over a plan: the share that each source has of the tokens goes along a line.

    start  {captions: .7, docs: .3}
    end    {captions: .2, docs: .8}      in the middle of the plan captions have 45% of the tokens

Each sample gets a place in the plan, 0 to 1, at which its source's tokens before it are those that
the lines have had by then. Packs are composed of samples at neighbouring places, and are put in the
order in which the sums of tokens follow the lines most closely.
"""

from dataclasses import dataclass

import numpy as np

from offline_packing.planner.strategies.kernels import Kernel
from offline_packing.planner.strategies.strategy import Packs

_AHEAD = 64  # packs among which the next one is chosen


@dataclass(frozen=True)
class Mixture:
    """Shares of the tokens of each source at the beginning and at the end of a plan."""

    start: tuple[float, ...]
    end: tuple[float, ...]

    def order_samples(
        self, source: np.ndarray, order: np.ndarray, lengths: np.ndarray
    ) -> np.ndarray:
        """Return the samples in the order of their places in the plan, int64 (num_samples,).

        Args:
            source: integers (num_samples,), places among the shares.
            order: (num_samples,), by which the samples of a source follow each other.
            lengths: tokens of each.
        """
        ids, places = [], []
        for number, (start, end) in enumerate(zip(self.start, self.end, strict=True)):
            own = np.flatnonzero(source == number)
            keys = order[own]
            by = np.argsort(keys)
            if (np.diff(keys[by]) == 0).any():  # CPUs differ in the order of equal ones
                by = np.argsort(keys, kind="stable")
            tokens = lengths[own[by]].astype(np.float64)
            # Of a source's tokens, start t + (end - start) t² / 2 come before t: solved for t.
            before = (np.cumsum(tokens) - tokens / 2) * (start + end) / tokens.sum()
            ids.append(own[by])
            places.append(before / (start + np.sqrt(start * start + (end - start) * before)))
        # Sources are in order each: a stable sort merges them.
        return np.concatenate(ids)[np.argsort(np.concatenate(places), kind="stable")]

    def order_packs(self, packs: Packs, source: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the order of packs in which the tokens of each source follow the lines, int64
        (num_packs,). No pack moves far."""
        of_packs = packs.pack_of_slot() * len(self.start) + source[packs.sample_ids]
        shape = (packs.num_packs, len(self.start))
        tokens = np.bincount(of_packs, lengths[packs.sample_ids], shape[0] * shape[1])
        shares = tokens.reshape(shape) / max(tokens.sum(), 1)
        lines = np.array([self.start, self.end])
        return _follow(shares, lines * shares.sum(axis=0) / lines.mean(axis=0))


@Kernel
def _follow(shares: np.ndarray, lines: np.ndarray) -> np.ndarray:
    """Choose each time among the next `_AHEAD` packs: all sums shall be nearest to the lines.

    Args:
        shares: float64 (num_packs, num_sources), of the tokens of all packs.
        lines: float64 (2, num_sources), shares at the start and the end.
    """
    num_packs, num_sources = shares.shape
    order = np.arange(num_packs)
    done = np.zeros(num_sources)
    for place in range(num_packs):
        best, least = place, np.inf
        for ahead in range(place, min(place + _AHEAD, num_packs)):
            time = 0.0
            for k in range(num_sources):
                time += done[k] + shares[order[ahead], k]
            apart = 0.0
            for k in range(num_sources):
                wanted = (lines[0, k] + (lines[1, k] - lines[0, k]) * time / 2) * time
                apart += (done[k] + shares[order[ahead], k] - wanted) ** 2
            if apart < least:
                best, least = ahead, apart
        chosen = order[best]
        for later in range(best, place, -1):  # the others keep their order
            order[later] = order[later - 1]
        order[place] = chosen
        done += shares[chosen]
    return order
