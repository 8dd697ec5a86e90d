"""Time, memory and packs of one method on one distribution, in a fresh process."""

import multiprocessing
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from length_distributions import draw_lengths
from planner_peers import PEERS

from offline_packing import plan_packs
from offline_packing.planner.strategies.histogram import count_lengths, lower_bound

WARM_UP_SAMPLES = 2000


def peak_mib() -> float:
    """Largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(
    method: str, distribution: str, num_samples: int, seq_length: int, repeat: int
) -> dict[str, Any]:
    """One row of the table: the best of ``repeat`` runs after a warm-up, in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure_here, (method, distribution, num_samples, seq_length, repeat))


def _measure_here(
    method: str, distribution: str, num_samples: int, seq_length: int, repeat: int
) -> dict[str, Any]:
    lengths = draw_lengths(distribution, num_samples)
    lengths = lengths[lengths <= seq_length]  # few peers define what happens to longer ones
    run: Callable[[Any], Any]
    if method in PEERS:
        run, given = lambda x: PEERS[method].function(x, seq_length), lengths.tolist()
    else:
        run = lambda x: plan_packs(  # noqa: E731
            x, seq_length, strategy=method, assignment=(), sample_order="composed"
        )
        given = lengths
    run(given[:WARM_UP_SAMPLES])
    if method == "auto":
        run(
            draw_lengths("narrow", WARM_UP_SAMPLES)
        )  # compiles the parts that narrow distributions need
    before = peak_mib()
    seconds, cpu_seconds = [], []
    result: Any = None
    for _ in range(repeat):
        start, cpu_start = time.perf_counter(), time.process_time()
        result = run(given)
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
    packs = [result.pack(i) for i in range(result.num_packs)] if method not in PEERS else result
    ids = np.concatenate([np.asarray(pack) for pack in packs])
    starts = np.concatenate([[0], np.cumsum([len(pack) for pack in packs])])[:-1]
    assert np.array_equal(np.sort(ids), np.arange(len(lengths))), f"{method} lost samples"
    assert np.add.reduceat(lengths[ids].astype(np.int64), starts).max() <= seq_length
    cost = np.add.reduceat(lengths[ids].astype(np.float64) ** 2, starts)
    bound = lower_bound(count_lengths(lengths, seq_length))
    return {
        "distribution": distribution,
        "method": method,
        "packs": len(packs),
        "above bound": len(packs) - bound,
        "gap %": round(100 * (len(packs) / bound - 1), 4),
        "fill %": round(100 * float(lengths.sum(dtype=np.int64)) / (len(packs) * seq_length), 3),
        "seconds": round(min(seconds), 4),
        "CPU seconds": round(min(cpu_seconds), 4),
        "peak MiB": round(peak_mib() - before),
        "cost CV": round(float(cost.std() / cost.mean()), 3),
    }
