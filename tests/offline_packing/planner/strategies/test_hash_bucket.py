"""Hash bucket: its phases against literal loops over samples, then the whole strategy."""

import logging
import re
from collections import Counter, deque
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

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
from tests.helpers.markdown import blocks
from tests.helpers.sizes import as_lists, contents

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
@settings(max_examples=300, deadline=None)
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
@settings(max_examples=300, deadline=None)
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
@settings(max_examples=150, deadline=None)
def test_the_final_phase_reuses_failed_seeds(case, per_length):
    lengths, capacity = case
    phase = FinalPhase(
        kind="final", seeds={"rule": "top_n", "n": 3}, seeds_per_length=per_length, min_fill=0.9
    )
    fillers = Counter(lengths)
    expected = []
    seeds = []
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


@pytest.mark.parametrize("phases", [None, [], documented_phases(), [{"kind": "seeds"}]])
@given(case=lengths_and_capacity(), seed=st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_every_sample_once_no_pack_over_capacity_same_seed_same_packs(phases, case, seed):
    lengths, capacity = np.array(case[0], np.int32), case[1]
    options = {} if phases is None else {"phases": phases}
    packs = hash_bucket(lengths, capacity, seed=seed, **options)
    assert sorted(packs.sample_ids.tolist()) == list(range(len(lengths)))
    for ids in as_lists(packs):
        assert lengths[ids].sum() <= capacity
    again = hash_bucket(lengths, capacity, seed=seed, **options)
    np.testing.assert_array_equal(packs.sample_ids, again.sample_ids)
    np.testing.assert_array_equal(packs.pack_offsets, again.pack_offsets)


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
    given = [yaml.safe_load(one[2]) for one in found[:-1]]
    assert hash_bucket.options(phases=given) == hash_bucket.options(phases=documented_phases())
    numbers = np.array([[int(one[i].replace(",", "")) for i in (3, 4, 8)] for one in found])
    assert numbers[:, :2].sum(axis=0).tolist() == [packs.num_packs, len(lengths)]
    np.testing.assert_array_equal(numbers[:, 2], len(lengths) - np.cumsum(numbers[:, 1]))
    # The first phase pairs samples of half the sequence; the second has the longer ones as seeds.
    num_seeds = int(((lengths > 4096) & (lengths < 8192)).sum())
    share = f"{numbers[1, 0] / num_seeds:.1%}".rstrip("%")
    assert numbers[0, 0] >= 100
    assert (found[0][5], found[1][6], found[1][7]) == ("100.00", str(num_seeds), share)


def test_the_seed_chooses_among_equal_lengths_only():
    lengths = np.random.default_rng(0).integers(1, 400, 3000)
    first = hash_bucket(lengths, 1024, seed=0)
    other = hash_bucket(lengths, 1024, seed=1)
    assert first.sample_ids.tolist() != other.sample_ids.tolist()
    np.testing.assert_array_equal(lengths[first.sample_ids], lengths[other.sample_ids])


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
