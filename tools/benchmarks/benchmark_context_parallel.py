"""A context-parallel size per pack, against megatron-core's schedulers: fill and idle time.

python tools/benchmarks/benchmark_context_parallel.py --samples 100000 --ranks 32

Samples of a heavy length distribution (lognormal, median 1,300, sigma 1.5, up to 131,072 tokens),
70% of them with pictures. Costs are the operations of a 7B model, tower and attention counted, as
`ModelCost` counts them; a sample or pack over cp ranks costs each of them its cp-th part. What
communication costs is not in the figures.

BalancedCPScheduler: megatron-core's class, a global batch at a time: each sample alone over as many
ranks as its tokens need, groups that all ranks begin together. DpBalancedScheduler: its rule (on
Megatron-LM's main branch), a global batch at a time: next fit in input order into packs of one
size, as many ranks as the longest sample needs.
"""

import math
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import numpy.typing as npt

from offline_packing import ContextParallel, plan_packs
from offline_packing.planner.context_parallel import idle_in_slots
from offline_packing.planner.strategies import STRATEGIES
from task_encoders.families import FAMILIES
from task_encoders.packs.pack_format import cut_multiple

LONGEST = 131_072
PATCHES_OF_A_PICTURE = 4096

Floats = npt.NDArray[np.float64]
Lengths = npt.NDArray[np.int32]


def draw_heavy(num_samples: int, seed: int = 1234) -> tuple[Lengths, Floats, float]:
    """Tokens and cost of each sample, and the tower's share of all cost."""
    rng = np.random.default_rng(seed)
    tokens = np.exp(np.log(1300) + 1.5 * rng.standard_normal(num_samples))
    tokens = np.clip(tokens, 1, LONGEST).astype(np.int32)
    with_pictures = rng.random(num_samples) < 0.7
    patches = 4 * tokens * rng.uniform(0.2, 0.95, num_samples) * with_pictures
    pictures = np.maximum(1, np.ceil(patches / PATCHES_OF_A_PICTURE))
    cost = FAMILIES["qwen2_vl"].cost
    tower = pictures * cost.tower_flops(patches / pictures)
    total = tower + cost.language_flops(tokens.astype(np.float64))
    return tokens, total, float(tower.sum() / total.sum())


def plan_slots(tokens: Lengths, cost: Floats, ranks: int, room: int) -> dict[str, Any]:
    """Packs that go over 1, 2, 4 … ranks."""
    layout = ContextParallel(ranks, room)
    plan = plan_packs(tokens, ranks * room, context_parallel=layout, cost=cost)
    assert plan.cp_sizes is not None
    costs = np.add.reduceat(cost[plan.sample_ids], plan.pack_offsets[:-1])
    sizes, counts = np.unique(plan.cp_sizes, return_counts=True)
    packed = tokens[plan.sample_ids].sum(dtype=np.int64)
    return {
        "slots": len(plan.slot_offsets) - 1,
        "fill %": f"{100 * packed / plan.room:.3f}",
        "with padding %": f"{100 * plan.fill:.3f}",
        "idle %": f"{100 * idle_in_slots(costs, plan.cp_sizes, ranks):.2f}",
        "set aside": len(plan.set_aside_ids),
        "packs over n ranks": " ".join(f"{n}: {c:,}" for n, c in zip(sizes, counts, strict=True)),
    }


def balanced_cp_steps(
    tokens: Lengths, cost: Floats, ranks: int, room: int, global_batch: int
) -> Iterator[Floats]:
    """Cost of each rank in every group of megatron-core's BalancedCPScheduler."""
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    scheduler = BalancedCPScheduler(room, SimpleNamespace(size=lambda: ranks))
    for start in range(0, len(tokens), global_batch):
        ids = range(start, min(start + global_batch, len(tokens)))
        lengths = [(i, int(tokens[i])) for i in ids]
        for group in scheduler.get_groups_and_subsamples(lengths, None)[1]:
            shared = np.bincount(np.concatenate(group).astype(int), minlength=len(tokens))
            yield np.array([(cost[some] / shared[some]).sum() for some in group])


def dp_balanced_steps(
    tokens: Lengths, cost: Floats, ranks: int, room: int, global_batch: int
) -> Iterator[Floats]:
    """Cost of each rank in every micro batch of DpBalancedScheduler."""
    cp_size = 1 << math.ceil(math.log2(tokens.max() / room))
    multiple = cut_multiple(cp_size)
    for start in range(0, len(tokens), global_batch):
        own = np.arange(start, min(start + global_batch, len(tokens)))
        padded = -(-tokens[own] // multiple) * multiple
        packs = STRATEGIES["sequential"](padded, cp_size * room)
        parts = np.split(own[packs.sample_ids], packs.pack_offsets[1:-1])
        costs = [float(cost[part].sum()) for part in parts]
        place = len(parts) - 1
        while len(costs) % (ranks // cp_size):  # single samples of the last packs fill the step
            if len(parts[place]) > 1:
                moved = cost[parts[place][-1]]
                parts[place] = parts[place][:-1]
                costs[place] -= moved
                costs.append(float(moved))
            else:
                place -= 1
        for step in np.array(costs).reshape(-1, ranks // cp_size):
            yield np.repeat(step / cp_size, cp_size)


def idle_of(steps: Iterator[Floats]) -> dict[str, Any]:
    """The share of time that ranks wait for the slowest of each step."""
    found = [(step.sum(), step.max() * len(step)) for step in steps]
    spent, available = np.sum(found, axis=0)
    return {"slots": len(found), "idle %": f"{100 * (1 - spent / available):.2f}", "set aside": 0}


@click.command()
@click.option("--samples", default=100_000, show_default=True)
@click.option("--ranks", default=32, show_default=True)
@click.option("--room", default=8192, show_default=True, help="Tokens of a rank.")
@click.option("--global-batch", default=1024, show_default=True, help="Samples of the peers'.")
@click.option("--peers/--no-peers", default=True, show_default=True)
def main(samples: int, ranks: int, room: int, global_batch: int, peers: bool) -> None:
    """Print a row per method."""
    tokens, cost, tower = draw_heavy(samples)
    plan_slots(tokens[:1000], cost[:1000], ranks, room)  # compiles
    click.echo(
        f"{tokens.sum(dtype=np.int64):,} tokens, {tower:.1%} of the operations are the tower's"
    )
    methods: dict[str, Callable[[], dict[str, Any]]] = {
        "a CP size per pack": lambda: plan_slots(tokens, cost, ranks, room)
    }
    for name, steps in (
        ("BalancedCPScheduler", balanced_cp_steps),
        ("DpBalancedScheduler", dp_balanced_steps),
    ):
        if peers:
            methods[name] = lambda steps=steps: idle_of(  # type: ignore[misc]
                steps(tokens, cost, ranks, room, global_batch)
            )
    for name, method in methods.items():
        start = time.perf_counter()
        row = {"method": name, **method(), "seconds": f"{time.perf_counter() - start:.2f}"}
        click.echo(", ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
