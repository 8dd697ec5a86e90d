"""Packs above the proved bound where all samples are of similar length, and CPU seconds.

python tools/benchmarks/narrow_gaps.py --samples 20000 --samples 400000
python tools/benchmarks/narrow_gaps.py --random 200

The second compares plans of random distributions, of 100 to 3,000 samples each, with all peers.
"""

from collections.abc import Callable, Sequence
from time import process_time

import click
import numpy as np
from benchmark_planner import print_table
from length_distributions import draw_lengths, draw_random
from planner_peers import PEERS, missing_packages

from offline_packing import plan_packs
from offline_packing.planner.strategies import STRATEGIES

Draw = Callable[[np.random.Generator, int], np.ndarray]

#: lengths in tokens, and seq_length
CASES: dict[str, tuple[int, Draw]] = {
    "narrow": (8192, lambda _, n: draw_lengths("narrow", n)),
    "narrow, 4,096": (4096, lambda _, n: draw_lengths("narrow", n)),
    "narrow, 16,384": (16_384, lambda _, n: draw_lengths("narrow", n)),
    "729 + gamma(2, 20)": (8192, lambda rng, n: 729 + rng.gamma(2, 20, n)),
    "729 + gamma(2, 120)": (8192, lambda rng, n: 729 + rng.gamma(2, 120, n)),
    "1,200 + gamma(3, 150)": (8192, lambda rng, n: 1200 + rng.gamma(3, 150, n)),
    "1,300 ± 100": (8192, lambda rng, n: rng.normal(1300, 100, n)),
    "1,300 ± 300": (8192, lambda rng, n: rng.normal(1300, 300, n).clip(1, 8192)),
    "700 to 1,400": (8192, lambda rng, n: rng.integers(700, 1400, n)),
    "1,000 to 3,000": (8192, lambda rng, n: rng.integers(1000, 3000, n)),
    "1,400 to 3,400": (8192, lambda rng, n: rng.integers(1400, 3400, n)),
    # InternVL: up to 12 tiles, and a text
    "tiles, 4,096": (
        4096,
        lambda rng, n: 256 * rng.integers(1, 13, n) + np.exp(rng.normal(4, 0.8, n)),
    ),
    # siglip: one picture, and a text
    "729 + lognormal, 4,096": (4096, lambda rng, n: 729 + np.exp(rng.normal(4, 0.8, n))),
}


def fewest_of_peers(lengths: np.ndarray, seq_length: int) -> int:
    """Packs of the best peer: those of `planner_peers` that are installed, and those that are
    strategies here."""
    missing, given = missing_packages(), lengths.tolist()
    theirs = [
        len(peer.function(given, seq_length))
        for peer in PEERS.values()
        if peer.package not in missing
    ]
    here = STRATEGIES.keys() - {"auto", "mixed"}  # which packs as auto does
    return min(theirs + [plan_packs(lengths, seq_length, strategy=s).num_packs for s in here])


@click.command()
@click.option("--samples", "sizes", multiple=True, type=int, default=(20_000, 100_000, 400_000))
@click.option("--random", "num_random", type=int, help="Random distributions instead.")
def main(sizes: Sequence[int], num_random: int | None) -> None:
    """Measure the default strategy on narrow distributions."""
    if num_random:
        print_table([_compare(num_random)])
        return
    rows = []
    for name, (seq_length, draw) in CASES.items():
        plan_packs(draw(np.random.default_rng(1), 2000).astype(np.int32), seq_length)
        for num_samples in sizes:
            lengths = draw(np.random.default_rng(0), num_samples).astype(np.int32)
            start = process_time()
            plan = plan_packs(lengths, seq_length)
            rows.append(
                {
                    "lengths": name,
                    "samples": f"{num_samples:,}",
                    "packs": f"{plan.num_packs:,}",
                    "above bound": plan.num_packs - plan.info.lower_bound,
                    "gap %": round(100 * plan.gap, 4),
                    "CPU seconds": round(process_time() - start, 2),
                }
            )
    print_table(rows)


def _compare(num_random: int) -> dict[str, object]:
    """One row: sums over all plans."""
    above, fewer, more, seconds = [], 0, 0, 0.0
    for seed in range(num_random):
        seq_length, lengths = draw_random(seed)
        start = process_time()
        plan = plan_packs(lengths, seq_length)
        seconds += process_time() - start
        above.append(plan.num_packs - plan.info.lower_bound)
        difference = plan.num_packs - fewest_of_peers(lengths, seq_length)
        fewer, more = fewer + (difference < 0), more + (difference > 0)
    return {
        "plans": num_random,
        "at the bound": above.count(0),
        "packs above, all": sum(above),
        "most": max(above),
        "fewer than the best peer": fewer,
        "more": more,
        "CPU seconds": round(seconds, 1),
    }


if __name__ == "__main__":
    main()
