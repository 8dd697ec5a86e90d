"""Peers' packers: hash bucket's phases against literal loops over samples, and those that place
sample by sample: the packs of a scan of all packs, within every limit."""

import logging
import re
from collections import Counter, deque
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing.planner.strategies import STRATEGIES
from offline_packing.planner.strategies.longest_first import greedy_knapsack
from offline_packing.planner.strategies.peers.hash_bucket import (
    FinalPhase,
    Phase,
    PowersOfTwoPhase,
    SeedPhase,
    SeedRule,
    hash_bucket,
    select_seeds,
)
from offline_packing.planner.strategies.peers.placing import (
    first_fit_decreasing,
    first_fit_shuffle,
    knapsack,
    sequential,
    shuffle_and_pack,
    to_constant_volume,
)
from tests.helpers.pages import blocks
from tests.helpers.sizes import as_lists, contents, limited_sizes

PAGE = (Path(__file__).parents[4] / "docs/configuration.md").read_text()
POWERS = PowersOfTwoPhase(kind="powers_of_two")


def counts_of(lengths: list[int], capacity: int) -> np.ndarray:
    return np.bincount(np.array(lengths, np.int64), minlength=capacity + 1)


def powers_oracle(lengths: list[int], capacity: int) -> list[list[int]]:
    """Round robin over the queues; a pack that stays unfilled is tried once longest first."""
    buckets = Counter(lengths)
    keys = [capacity]
    while keys[-1] % 2 == 0:
        keys.append(keys[-1] // 2)
    packs = []
    while True:
        pack: list[int] = []
        queue = deque(key for key in sorted(keys) if buckets[key])
        while queue and sum(pack) < capacity:
            key = queue.popleft()
            if sum(pack) + key <= capacity:
                pack.append(key)
                if pack.count(key) < buckets[key]:
                    queue.append(key)
        if sum(pack) < capacity:
            pack = []
            for key in sorted(keys, reverse=True):
                for _ in range(buckets[key]):
                    if sum(pack) + key <= capacity:
                        pack.append(key)
        if sum(pack) < capacity:
            return packs
        buckets.subtract(pack)
        packs.append(sorted(pack))


def filler_oracle(
    buckets: Counter[int], room: int, num_samples: int, min_samples: int
) -> int | None:
    fitting = sorted(key for key, number in buckets.items() if number and key <= room)
    if not fitting:
        return None
    if num_samples < Fraction(8, 10) * min_samples:
        return fitting[0]
    if num_samples < min_samples:
        return max(fitting, key=lambda key: buckets[key] * Fraction(room, key))
    return fitting[-1]


def seeds_oracle(
    seeds: list[int], buckets: Counter[int], capacity: int, phase: SeedPhase
) -> list[list[int]]:
    """Every seed on its own; a pack that misses a limit gives its samples back."""
    packs = []
    for seed in seeds:
        pack = [seed]
        while len(pack) < (phase.max_samples or capacity):
            room = capacity - sum(pack)
            key = filler_oracle(buckets, room, len(pack), phase.min_samples)
            if key is None:
                break
            buckets[key] -= 1
            pack.append(key)
        if len(pack) >= phase.min_samples and sum(pack) >= phase.min_fill * capacity:
            packs.append(pack)
        else:
            buckets.update(pack[1:])
    return packs


def potential(seed: int, buckets: Counter[int], capacity: int, min_samples: int) -> float:
    """The estimate that orders the seeds, written per seed as in the original."""
    room = capacity - seed
    number = min(room // min(buckets), sum(buckets.values()) // 2) + 1
    fitting = sum(key <= room for key in buckets) / len(buckets)
    return min(number / min_samples, 1) * 0.5 + seed / capacity * 0.3 + fitting * 0.2


@st.composite
def lengths_and_capacity(draw: st.DrawFn) -> tuple[list[int], int]:
    capacity = draw(st.integers(1, 150))
    largest = draw(st.integers(1, capacity))
    buckets = draw(st.lists(st.tuples(st.integers(1, largest), st.integers(1, 12)), max_size=25))
    return [length for length, number in buckets for _ in range(number)], capacity


@st.composite
def halving_lengths(draw: st.DrawFn) -> tuple[list[int], int]:
    capacity = draw(st.sampled_from([64, 96, 7, 1]))
    halves = [capacity >> n for n in range(7) if capacity % (1 << n) == 0]
    other = st.integers(1, capacity)
    return draw(st.lists(st.one_of(st.sampled_from(halves), other), max_size=150)), capacity


@given(case=halving_lengths())
@settings(max_examples=100, deadline=None)
def test_powers_of_two_equal_the_round_robin_and_are_all_full(case):
    lengths, capacity = case
    packs = contents(POWERS.run(counts_of(lengths, capacity))[0])
    assert [sorted(pack) for pack in packs] == powers_oracle(lengths, capacity)
    assert all(sum(pack) == capacity for pack in packs)


SEED_PHASES = [
    {"min_samples": 1, "min_fill": 0.95},
    {"min_samples": 4, "min_fill": 0.9},
    {"min_samples": 5, "min_fill": 0.5},
    {"min_samples": 10, "max_samples": 12, "min_fill": 0.0},
    {"min_samples": 2, "max_samples": 2, "min_fill": 1.0},
]


@given(case=lengths_and_capacity(), limits=st.sampled_from(SEED_PHASES), half=st.integers(1, 100))
@settings(max_examples=150, deadline=None)
def test_seed_phases_equal_the_loop_over_seeds(case, limits, half):
    lengths, capacity = case
    rule = {"rule": "custom_half", "half": half}
    phase = SeedPhase(kind="seeds", seeds=rule, **limits)
    buckets = Counter(length for length in lengths if length < half)
    seeds = sorted(length for length in lengths if length >= half)[::-1]
    if buckets:
        seeds.sort(key=lambda seed: -potential(seed, buckets, capacity, phase.min_samples))
    expected = seeds_oracle(seeds, buckets, capacity, phase)
    assert contents(phase.run(counts_of(lengths, capacity))[0]) == expected


@given(case=lengths_and_capacity(), per_length=st.integers(0, 4))
@settings(max_examples=80, deadline=None)
def test_the_final_phase_reuses_failed_seeds(case, per_length):
    lengths, capacity = case
    top = {"rule": "top_n", "n": 3}
    phase = FinalPhase(kind="final", seeds=top, seeds_per_length=per_length, min_fill=0.9)
    fillers, expected, seeds = Counter(lengths), [], []
    for key in sorted(fillers)[-3:][::-1]:
        seeds += [key] * min(fillers[key], per_length)
    fillers.subtract(seeds)
    greedy = SeedPhase(kind="seeds", min_fill=0.9)
    for seed in seeds:
        packs = seeds_oracle([seed], fillers, capacity, greedy)
        fillers.update([] if packs else [seed])
        expected += packs
    while any(fillers.values()):
        expected.append([])
        while key := filler_oracle(fillers, capacity - sum(expected[-1]), 1, 1):
            expected[-1].append(key)
            fillers[key] -= 1
    counts = counts_of(lengths, capacity)
    packed, _ = phase.run(counts)
    rest = greedy_knapsack(counts - packed.used_counts(len(counts)))
    assert contents(packed) + contents(rest) == expected


@pytest.mark.parametrize(
    ("rule", "selected"),
    [
        ({"rule": "auto"}, [60, 90, 100]),
        ({"rule": "custom_half"}, [33, 50, 60, 90, 100]),
        ({"rule": "custom_half", "half": 60}, [60, 90, 100]),
        ({"rule": "lengths", "lengths": [10, 55, 90]}, [10, 90]),
        ({"rule": "size_range", "min_length": 20, "max_length": 60}, [20, 33, 50, 60]),
        ({"rule": "size_range"}, [33, 50, 60, 90, 100]),
        ({"rule": "top_n", "n": 2}, [90, 100]),
        ({"rule": "top_n", "n": 99}, [10, 20, 33, 50, 60, 90, 100]),
        ({"rule": "capacity_ratio"}, [33, 50, 60, 90, 100]),
        ({"rule": "capacity_ratio", "min_ratio": 0.1, "max_ratio": 0.5}, [10, 20, 33, 50]),
    ],
)
def test_seed_rules_select_lengths(rule, selected):
    counts = counts_of([10, 20, 33, 50, 60, 90, 100], 100)
    phase = SeedPhase(kind="seeds", seeds=rule)
    assert select_seeds(phase.seeds, counts).tolist() == selected


def documented_phases() -> list[dict[str, Any]]:
    printed = (block.text for block in blocks(PAGE) if "kind: powers_of_two" in block.text)
    return yaml.safe_load(next(printed))["pack"]["strategy_options"]["phases"]


def test_kinds_rules_and_fields_are_documented():
    _, section = PAGE.split("### Phases of `hash_bucket`\n")
    section = section.split("\n## ")[0]
    rules = get_args(get_args(SeedRule)[0])
    for model in (*rules, *get_args(get_args(Phase)[0])):
        for name, field in model.model_fields.items():
            shown = get_args(field.annotation) if name in ("kind", "rule") else (name,)
            assert f"`{shown[0]}`" in section, (model, name)
    hash_bucket.options(phases=documented_phases())


def test_each_phase_says_what_it_made(caplog: pytest.LogCaptureFixture):
    """As the original's tracker: parameters, packs, samples, and seeds that became a pack."""
    lengths = np.exp(np.random.default_rng(0).normal(6, 1, 3000)).clip(1, 8192).astype(np.int64)
    lengths[:200] = 4096
    with caplog.at_level(logging.INFO, "offline_packing"):
        packs = hash_bucket(lengths, 8192, phases=documented_phases())
    line = re.compile(
        r"(?:phase (\d) of 5, (\{.*\})|rest, greedy knapsack): ([\d,]+) packs of ([\d,]+) samples"
        r"(?:, ([\d.]+)% full)?(?:, from ([\d,]+) seeds \(([\d.]+)%\))?; ([\d,]+) samples left"
    )
    found = [line.fullmatch(message) for message in caplog.messages]
    assert [one[1] for one in found] == ["1", "2", "3", "4", "5", None]
    assert [yaml.safe_load(one[2])["kind"] for one in found[:2]] == ["powers_of_two", "seeds"]
    numbers = np.array([[int(one[i].replace(",", "")) for i in (3, 4, 8)] for one in found])
    assert numbers[:, :2].sum(axis=0).tolist() == [packs.num_packs, len(lengths)]
    np.testing.assert_array_equal(numbers[:, 2], len(lengths) - np.cumsum(numbers[:, 1]))
    # The first phase pairs samples of half the sequence; the second has the longer ones as seeds.
    num_seeds = int(((lengths > 4096) & (lengths < 8192)).sum())
    share = f"{numbers[1, 0] / num_seeds:.1%}".rstrip("%")
    assert (found[0][5], found[1][6], found[1][7]) == ("100.00", str(num_seeds), share)


@pytest.mark.parametrize("seq_length", [8192, 32768, 262144])
def test_a_mixture_fills_its_packs(seq_length):
    rng = np.random.default_rng(4)
    lengths = np.exp(rng.normal(6, 1, 60_000)).clip(1, 8192).astype(np.int32)
    packs = hash_bucket(lengths, seq_length)
    assert packs.num_packs <= 1.005 * lengths.sum() / seq_length + 1


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ([{"kind": "seed"}], "kind"),
        ([{"kind": "seeds", "min_itmes": 3}], "min_itmes"),
        ([{"kind": "seeds", "seeds": {"rule": "top_n", "half": 3}}], "half"),
        ([{"kind": "seeds", "min_fill": 1.5}], "min_fill"),
        ([{"kind": "seeds", "min_samples": 4, "max_samples": 3}], "max_samples 3 < min_samples 4"),
        ([{"kind": "final"}, {"kind": "powers_of_two"}], "phase 0 of 2 is 'final'"),
    ],
)
def test_wrong_phases_are_refused_by_name(phases, message):
    with pytest.raises(ValueError, match=message):
        hash_bucket.options(phases=phases)


Score = Callable[[int, int], int]
#: By `score(load, number)` the first pack, the emptiest, or the fullest.
FIRST, LIGHTEST, FULLEST = (
    lambda load, number: number,
    lambda load, number: load,
    lambda load, number: -load,
)


def scanned_packs(
    order: np.ndarray, sizes: np.ndarray, limits: np.ndarray, score: Score, num_open: int = 0
) -> list[list[int]]:
    """Put each sample, in this order, into the pack with room of lowest score(load, number), and
    return the packs that are not empty."""
    packs: list[list[int]] = [[] for _ in range(num_open)]
    for sample in order.tolist():
        used = [sizes[pack].sum(axis=0) for pack in packs]
        fitting = [i for i in range(len(used)) if (used[i] + sizes[sample] <= limits).all()]
        if not fitting:
            fitting = [len(packs)]
            packs.append([])
            used.append(0 * limits)
        best = min(fitting, key=lambda number: (score(int(used[number][0]), number), number))
        packs[best].append(sample)
    return sorted(pack for pack in packs if pack)


def next_fit(order: np.ndarray, sizes: np.ndarray, limits: np.ndarray) -> list[list[int]]:
    """Packs that end where the next sample does not fit."""
    packs: list[list[int]] = []
    for sample in order.tolist():
        if not packs or (sizes[packs[-1]].sum(axis=0) + sizes[sample] > limits).any():
            packs.append([])
        packs[-1].append(sample)
    return packs


@given(case=limited_sizes(), extra=st.integers(0, 5), number=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_longest_first_equals_the_scan(case, extra, number):
    sizes, limits = case
    order = np.argsort(-sizes[:, 0], kind="stable")
    for strategy, score in ((first_fit_decreasing, FIRST), (to_constant_volume, FULLEST)):
        expected = scanned_packs(order, sizes, limits, score)
        assert sorted(as_lists(strategy(sizes, limits))) == expected
    if len(limits) == 1 and len(sizes):  # of equally full packs, either is a best fit
        loads = STRATEGIES["best_fit_decreasing"](sizes, limits).sums(sizes[:, 0])
        assert sorted(loads.tolist()) == sorted(sizes[pack, 0].sum() for pack in expected)
    for given_number, options in (
        (-(-int(sizes[:, 0].sum()) // int(limits[0])) + extra, {"extra_packs": extra}),
        (number, {"num_packs": number}),
    ):
        expected = scanned_packs(order, sizes, limits, LIGHTEST, given_number)
        assert sorted(as_lists(knapsack(sizes, limits, **options))) == expected


@given(
    case=limited_sizes(),
    seed=st.integers(0, 5),
    chunk_size=st.integers(1, 60),
    num_threads=st.sampled_from([1, 3]),
)
@settings(max_examples=100, deadline=None)
def test_first_fit_shuffle_equals_the_scan_of_each_chunk(case, seed, chunk_size, num_threads):
    sizes, limits = case
    order = np.random.default_rng(seed).permutation(len(sizes))
    expected = []
    for start in range(0, len(order), chunk_size):
        expected += scanned_packs(order[start : start + chunk_size], sizes, limits, FIRST)
    options = {"chunk_size": chunk_size, "num_threads": num_threads}
    packs = first_fit_shuffle(sizes, limits, seed=seed, **options)
    assert sorted(as_lists(packs)) == sorted(expected)


@given(
    case=limited_sizes(),
    seed=st.integers(0, 5),
    max_samples=st.one_of(st.none(), st.integers(1, 6)),
)
@settings(max_examples=80, deadline=None)
def test_a_pack_ends_where_the_next_sample_does_not_fit(case, seed, max_samples):
    sizes, limits = case
    order = np.random.default_rng(seed).permutation(len(sizes))
    packs = shuffle_and_pack(sizes, limits, seed=seed)
    assert as_lists(packs) == next_fit(order, sizes, limits)
    packs = sequential(sizes, limits, max_samples=max_samples)
    counted = np.column_stack([sizes, np.ones(len(sizes), int)])
    most = np.append(limits, max_samples or len(sizes))
    assert as_lists(packs) == next_fit(np.arange(len(sizes)), counted, most)


def test_the_seed_of_knapsack_orders_the_packs_and_nothing_else():
    lengths = np.random.default_rng(2).integers(1, 300, 500)
    first, again, other = (as_lists(knapsack(lengths, 1000, seed=seed)) for seed in (0, 0, 1))
    assert first == again != other
    assert sorted(first) == sorted(other)


EXAMPLE = [10, 10, 11, 1, 2, 7]  # the weights in the package's README, for volume 11


@pytest.mark.parametrize(
    ("low", "high", "number"), [(1, 8193, 1500), (600, 700, 1500), (1, 40, 900)]
)
def test_equals_binpacking(low, high, number):
    binpacking = pytest.importorskip("binpacking")
    if not binpacking.__version__.startswith("1.5"):
        pytest.skip(f"binpacking {binpacking.__version__} packs differently from 1.5")
    lengths = np.random.default_rng(number + low).integers(low, high, number)
    for case, capacity in ((lengths, 8192), (np.array(EXAMPLE), 11)):
        rows = list(enumerate(case.tolist()))
        expected = binpacking.to_constant_volume(rows, capacity, weight_pos=1)
        packs = to_constant_volume(case, capacity)
        assert as_lists(packs) == [[sample for sample, _ in pack] for pack in expected]
