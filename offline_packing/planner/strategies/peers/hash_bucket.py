"""The multi-phase hash-bucket strategy of LLaVA-OneVision-1.5's offline sample packing.

Samples wait in one bucket per length, and phases take packs out of the buckets one after the other:
lengths that halve the sequence first, then packs around seeds with rules and limits chosen for the
data, at last all that are left. The original pops single samples from numpy arrays under a lock, in
an order that depends on its threads; here the phases run on the histogram of lengths, in one fixed
order, and only the choice among samples of equal length is random.

Like the original's tracker, each phase logs its packs, with its parameters in a form that a
configuration takes.
"""

import json
import logging
from functools import partial
from math import ceil
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from offline_packing.planner.strategies.composition import (
    Composition,
    as_rows,
    count_lengths,
    expand_composition,
    from_entries,
    join_compositions,
    packs_within,
)
from offline_packing.planner.strategies.kernels import (
    Kernel,
    add_samples,
    bitset_at_least,
    bitset_at_most,
    bitset_of,
    list_of,
)
from offline_packing.planner.strategies.longest_first import greedy_knapsack
from offline_packing.planner.strategies.strategy import Packs, Strategy, StrategyOptions


@Kernel
def _diverse_pack(lengths: np.ndarray, counts: np.ndarray, room: int, times: np.ndarray) -> bool:
    """Fill one pack round robin over ``lengths`` (ascending); return True if it is full. A length
    leaves the round when it is used up or does not fit any more."""
    times[:] = 0
    running = counts > 0
    while room > 0 and running.any():
        for index in range(lengths.shape[0]):
            if running[index] and lengths[index] <= room:
                times[index] += 1
                room -= lengths[index]
                running[index] = times[index] < counts[index]
            else:
                running[index] = False
    return room == 0


@Kernel
def pack_divisors(lengths: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fill packs exactly with lengths that each divide the next and the capacity.

    Packs are as diverse as possible; where that cannot fill one more pack (a deadlock), one pack is
    filled greedily, and then diversity has its turn again. What stays is less than one pack.
    ``lengths`` int64 (k,) ascending, ``counts`` int64 (capacity + 1,): samples of each length.
    """
    counts = counts.copy()
    capacity = counts.shape[0] - 1
    entries, patterns = list_of((0, 0)), list_of((0, 0))
    times = np.zeros(lengths.shape[0], np.int64)
    while True:
        diverse = _diverse_pack(lengths, counts[lengths], capacity, times)
        if not diverse:
            # Longest first: as each length divides the next, this fills the pack if anything does.
            room = capacity
            for index in range(lengths.shape[0] - 1, -1, -1):
                times[index] = min(counts[lengths[index]], room // lengths[index])
                room -= times[index] * lengths[index]
            if room > 0:
                return as_rows(entries), as_rows(patterns)
        start = len(entries)
        for used in np.flatnonzero(times):
            entries.append((lengths[used], times[used]))
        # A diverse choice repeats for as long as no length runs out.
        packs = packs_within(entries, start, counts) if diverse else 1
        counts[lengths] -= packs * times
        patterns.append((len(entries), packs))


@Kernel
def _choose_filler(
    counts: np.ndarray, present: np.ndarray, room: int, num_samples: int, min_samples: int
) -> int:
    """Choose the next length for a pack of ``num_samples`` so far, or -1 if nothing fits. Far from
    the required number of samples it is the shortest, close to it the length with most samples per
    token (the shorter if equal), beyond it the longest that fits."""
    best = 0
    if num_samples >= min_samples:
        best = bitset_at_most(present, room)
    elif 5 * num_samples < 4 * min_samples:
        best = bitset_at_least(present, 1)
    else:
        for length in range(1, room + 1):
            if counts[length] > 0 and (best == 0 or counts[length] * best > counts[best] * length):
                best = length
    return best if 0 < best <= room else -1


@Kernel
def pack_seeds(
    seeds: np.ndarray, fillers: np.ndarray, limits: tuple[int, int, int], reuse_failed: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Start packs with one seed each and fill them up from ``fillers``.

    ``seeds`` int64 (k, 2) rows [length, number], in the order they are tried; ``fillers`` int64
    (capacity + 1,) samples of each length; ``limits``: samples of a pack at least and at most, and
    tokens at least. A pack below them is undone; its seed becomes a filler if ``reuse_failed``.
    """
    min_samples, max_samples, min_tokens = limits
    counts, present = fillers.copy(), bitset_of(fillers)
    capacity = counts.shape[0] - 1
    entries, patterns = list_of((0, 0)), list_of((0, 0))
    for seed, number in seeds:
        for _ in range(number):
            start = len(entries)
            entries.append((seed, 1))
            room = capacity - seed
            while room > 0 and len(entries) - start < max_samples:
                size = len(entries) - start
                length = _choose_filler(counts, present, room, size, min_samples)
                if length < 0:
                    break
                add_samples(counts, present, length, -1)
                entries.append((length, 1))
                room -= length
            if len(entries) - start >= min_samples and capacity - room >= min_tokens:
                patterns.append((len(entries), 1))
                continue
            for length, _ in entries[start + 1 :]:
                add_samples(counts, present, length, 1)
            del entries[start:]
            if not reuse_failed:
                break  # another seed of this length would fail on the same fillers
            add_samples(counts, present, seed, 1)
    return as_rows(entries), as_rows(patterns)


logger = logging.getLogger(__name__)


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class AutoSeeds(_Model):
    """Every length above half of ``seq_length``: no two of them share a pack."""

    rule: Literal["auto"] = "auto"


class CustomHalfSeeds(_Model):
    """Every length from ``half`` on; without ``half``, from a third of ``seq_length``."""

    rule: Literal["custom_half"]
    half: int | None = Field(default=None, ge=1)


class GivenLengthSeeds(_Model):
    """The listed lengths, where there are samples of them."""

    rule: Literal["lengths"]
    lengths: tuple[int, ...] = Field(min_length=1)


class SizeRangeSeeds(_Model):
    """Lengths from ``min_length`` (default: a third of ``seq_length``) to ``max_length``."""

    rule: Literal["size_range"]
    min_length: int | None = Field(default=None, ge=1)
    max_length: int | None = Field(default=None, ge=1)


class TopNSeeds(_Model):
    """The ``n`` longest lengths that still have samples."""

    rule: Literal["top_n"]
    n: int = Field(default=5, ge=1)


class CapacityRatioSeeds(_Model):
    """Lengths that take ``min_ratio`` to ``max_ratio`` of ``seq_length``."""

    rule: Literal["capacity_ratio"]
    min_ratio: float = Field(default=0.3, ge=0, le=1)
    max_ratio: float = Field(default=1.0, ge=0, le=1)


SeedRule = Annotated[
    AutoSeeds
    | CustomHalfSeeds
    | GivenLengthSeeds
    | SizeRangeSeeds
    | TopNSeeds
    | CapacityRatioSeeds,
    Field(discriminator="rule"),
]


def select_seeds(rule: SeedRule, counts: np.ndarray) -> np.ndarray:
    """Return the lengths with samples that are seeds: int64 (k,) ascending."""
    lengths, seq_length = np.flatnonzero(counts), len(counts) - 1
    third, low, high = seq_length // 3, 0, seq_length
    match rule:
        case GivenLengthSeeds():
            return lengths[np.isin(lengths, rule.lengths)]
        case TopNSeeds():
            return lengths[-rule.n :]
        case AutoSeeds():
            low = seq_length // 2 + 1
        case CustomHalfSeeds():
            low = third if rule.half is None else rule.half
        case SizeRangeSeeds():
            low = third if rule.min_length is None else rule.min_length
            high = seq_length if rule.max_length is None else rule.max_length
        case CapacityRatioSeeds():
            low, high = int(seq_length * rule.min_ratio), int(seq_length * rule.max_ratio)
    return lengths[(lengths >= low) & (lengths <= high)]


class PowersOfTwoPhase(_Model):
    """Packs filled exactly by lengths seq_length, seq_length / 2, … while it divides evenly."""

    kind: Literal["powers_of_two"]

    def run(self, counts: np.ndarray) -> tuple[Composition, int]:
        """Make packs out of ``counts``, int64 (seq_length + 1,); count the seeds tried."""
        lengths = [len(counts) - 1]
        while lengths[-1] % 2 == 0:
            lengths.append(lengths[-1] // 2)
        return from_entries(*pack_divisors(np.array(lengths[::-1], np.int64), counts)), 0


class SeedPhase(_Model):
    """One pack around each seed, filled up with samples of the other lengths. A pack below
    ``min_samples`` or ``min_fill`` is undone, its samples wait for the next phases."""

    kind: Literal["seeds"]
    seeds: SeedRule = AutoSeeds()
    min_samples: int = Field(default=1, ge=1)
    max_samples: int | None = Field(default=None, ge=1)
    #: tokens in a pack as a share of seq_length
    min_fill: float = Field(default=0.95, ge=0, le=1)

    @model_validator(mode="after")
    def _check_samples(self) -> "SeedPhase":
        if self.max_samples is not None and self.max_samples < self.min_samples:
            raise ValueError(f"max_samples {self.max_samples} < min_samples {self.min_samples}")
        return self

    def run(self, counts: np.ndarray) -> tuple[Composition, int]:
        """See `PowersOfTwoPhase.run`."""
        capacity, chosen = len(counts) - 1, select_seeds(self.seeds, counts)
        fillers = counts.copy()
        fillers[chosen] = 0
        chosen = _by_potential(chosen, fillers, self.min_samples)
        seeds = np.stack([chosen, counts[chosen]], axis=1)
        limits = (self.min_samples, self.max_samples or capacity, ceil(self.min_fill * capacity))
        packs = from_entries(*pack_seeds(seeds, fillers, limits, False))
        return packs, int(seeds[:, 1].sum())


class FinalPhase(_Model):
    """Packs around ``seeds_per_length`` seeds of each length; the rest is packed greedily."""

    kind: Literal["final"]
    seeds: SeedRule = TopNSeeds(rule="top_n", n=20)
    seeds_per_length: int = Field(default=10, ge=0)
    min_fill: float = Field(default=0.95, ge=0, le=1)

    def run(self, counts: np.ndarray) -> tuple[Composition, int]:
        """See `PowersOfTwoPhase.run`."""
        capacity, chosen = len(counts) - 1, select_seeds(self.seeds, counts)[::-1]
        seeds = np.stack([chosen, np.minimum(counts[chosen], self.seeds_per_length)], axis=1)
        fillers = counts.copy()
        fillers[chosen] -= seeds[:, 1]
        limits = (1, capacity, ceil(self.min_fill * capacity))
        packs = from_entries(*pack_seeds(seeds, fillers, limits, True))
        return packs, int(seeds[:, 1].sum())


Phase = Annotated[PowersOfTwoPhase | SeedPhase | FinalPhase, Field(discriminator="kind")]

#: The original's phases with lengths as shares of seq_length, and limits that pack all length
#: distributions well: its own (5 samples and 95%, 4 and 94%, 6 and 92%) make up to 2.2% more packs.
DEFAULT_PHASES: tuple[Phase, ...] = (
    PowersOfTwoPhase(kind="powers_of_two"),
    SeedPhase(kind="seeds", min_fill=0.95),
    SeedPhase(
        kind="seeds",
        seeds=CapacityRatioSeeds(rule="capacity_ratio", min_ratio=0.25),
        min_samples=4,
        min_fill=0.99,
    ),
    SeedPhase(kind="seeds", seeds=TopNSeeds(rule="top_n", n=60), min_samples=4, min_fill=0.99),
    FinalPhase(kind="final"),
)


def _by_potential(seeds: np.ndarray, fillers: np.ndarray, min_samples: int) -> np.ndarray:
    """Order the seed lengths by the original's estimate of success. Half of it says whether the
    fillers suffice for ``min_samples``, 30% how long the seed is, 20% how many of the filler
    lengths fit beside it. Equal ones: longer first."""
    filler_lengths = np.flatnonzero(fillers)
    if len(filler_lengths) == 0:
        return seeds[::-1]
    capacity = len(fillers) - 1
    room = capacity - seeds
    num_samples = np.minimum(room // filler_lengths[0], fillers.sum() // 2) + 1
    fitting = np.searchsorted(filler_lengths, room, side="right") / len(filler_lengths)
    potential = np.minimum(num_samples / min_samples, 1) * 0.5 + seeds / capacity * 0.3
    return seeds[np.lexsort((-seeds, -(potential + fitting * 0.2)))]


class HashBucketOptions(StrategyOptions):
    """Phases, in order."""

    phases: tuple[Phase, ...] = Field(
        DEFAULT_PHASES,
        description="what is done in which order: a list of {kind: powers_of_two | seeds | final}, "
        "with rules and limits each",
    )

    @field_validator("phases")
    @classmethod
    def _check_final(cls, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
        for number, phase in enumerate(phases[:-1]):
            if isinstance(phase, FinalPhase):
                raise ValueError(
                    f"phase {number} of {len(phases)} is 'final', which leaves nothing to the "
                    "phases after it; make it the last"
                )
        return phases


@partial(Strategy, options=HashBucketOptions, lengths_only=True)
def hash_bucket(
    sizes: np.ndarray, limits: np.ndarray, *, options: HashBucketOptions, seed: int
) -> Packs:
    """Pack in phases, each of which takes full packs out of the buckets of equal length.

    ``options.phases`` lists the phases, in a configuration as plain mappings; samples that the last
    one leaves are packed by a greedy knapsack, so none is left over. A line for each phase is
    logged::

        - {kind: powers_of_two}
        - {kind: seeds, seeds: {rule: auto}, min_samples: 5, min_fill: 0.95}
        - {kind: seeds, seeds: {rule: custom_half, half: 2000}, min_samples: 4, max_samples: 40}
        - {kind: seeds, seeds: {rule: top_n, n: 60}, min_samples: 6, min_fill: 0.92}
        - {kind: final}

    ``seed`` decides which of the samples of equal length is used. Packs come out phase by phase.
    O(n log seq_length).
    """
    lengths = np.ascontiguousarray(sizes[:, 0], np.int32)
    counts = count_lengths(lengths, int(limits[0]))
    left = counts.copy()
    parts = []
    for number, phase in enumerate(options.phases, 1):
        if not left.any():
            break
        packs, num_seeds = phase.run(left)
        parts.append(packs)
        left -= parts[-1].used_counts(len(left))
        parameters = json.dumps(phase.model_dump(exclude_none=True))
        name = f"phase {number} of {len(options.phases)}, {parameters}"
        _report(name, parts[-1], left, num_seeds)
    parts.append(greedy_knapsack(left))
    if left.any():
        _report("rest, greedy knapsack", parts[-1], np.zeros_like(left))
    return expand_composition(join_compositions(parts), lengths, counts, seed=seed)


def _report(name: str, made: Composition, left: np.ndarray, num_seeds: int = 0) -> None:
    """Log the packs that a phase made, their fill, the share of its seeds that became a pack, and
    the samples that are left."""
    num_samples, capacity = made.used_counts(len(left)).sum(), len(left) - 1
    tokens = (made.pattern_tokens() * made.multiplicity).sum()
    text = f"{name}: {made.num_packs:,} packs of {num_samples:,} samples"
    if made.num_packs:
        text += f", {tokens / made.num_packs / capacity:.2%} full"
    if num_seeds:
        text += f", from {num_seeds:,} seeds ({made.num_packs / num_seeds:.1%})"
    logger.info("%s; %s samples left", text, f"{left.sum():,}")
