"""Idle time of ranks in both phases, and steps of one kind.

    python tools/benchmarks/benchmark_ranks.py idle       tower and language model; 10^6 samples
    python tools/benchmarks/benchmark_ranks.py uniform    steps that mix packs with and without

Samples have the SFT length distribution, costs are those of Qwen2-VL-7B with the tower scaled to
22% of the operations. No figure includes communication.
"""

import time

import click
import numpy as np
from length_distributions import draw_sft

from offline_packing import plan_packs
from offline_packing.online.ranks.rank_schedule import RankSchedule
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.planner.ranks.layout import RankLayout, idle_shares
from offline_packing.planner.strategies.strategy import Packs
from task_encoders.families import FAMILIES

TOWER_SHARE = 0.22
#: Patches of a picture, at most: longer samples have several.
PICTURE = 4000
COST = FAMILIES["qwen2_vl"].cost


def draw_costs(num_samples: int, seed: int = 1234) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, tower cost and language cost of samples, (num_samples,) each."""
    tokens, patches = draw_sft(num_samples, seed)
    pictures = np.maximum(1, -(-patches // PICTURE))
    tower = np.where(patches, pictures * np.asarray(COST.tower_flops(patches / pictures)), 0.0)
    language = np.asarray(COST.language_flops(tokens.astype(np.float64)))
    tower *= TOWER_SHARE / (1 - TOWER_SHARE) * language.sum() / tower.sum()
    return tokens, tower, language


def sums(plan: PackPlan | Packs, values: np.ndarray) -> np.ndarray:
    """Sum over each pack."""
    return np.add.reduceat(values[plan.sample_ids], plan.pack_offsets[:-1])


def at_random(count: int, num_ranks: int, seed: int = 0) -> np.ndarray:
    """Steps dealt at random: (num_steps, num_ranks)."""
    order = np.random.default_rng(seed).permutation(count)
    return order[: count // num_ranks * num_ranks].reshape(-1, num_ranks)


@click.group()
def main() -> None:
    """Print the figures of balanced ranks."""


@main.command()
@click.option("--samples", default=60_000, show_default=True)
@click.option("--many", default=1_000_000, show_default=True)
def idle(samples: int, many: int) -> None:
    """Idle share of both phases, and of the sum; seconds for many samples."""
    tokens, tower, language = draw_costs(samples)
    click.echo("| tokens x ranks | random | by the sum | both phases | the sum: before | now |")
    click.echo("|---|---|---|---|---|---|")
    for seq_length, num_ranks in ((8192, 32), (32768, 32), (8192, 128)):
        plan = plan_packs(tokens, seq_length)
        of_tower = sums(plan, tower)
        cost, lengths = of_tower + sums(plan, language), sums(plan, tokens)
        both = RankSchedule(lengths, cost, num_ranks, tower_cost=of_tower).epoch(0)
        before = RankSchedule(lengths, cost, num_ranks).epoch(0)
        random = at_random(len(cost), num_ranks)
        shares = (
            idle_shares(cost[random], of_tower[random])[1],
            idle_shares(cost[before.table], of_tower[before.table])[1],
            idle_shares(cost[both.table], of_tower[both.table])[1],
            idle_shares(cost[before.table], of_tower[before.table])[0],
            idle_shares(cost[both.table], of_tower[both.table])[0],
        )
        row = " | ".join(f"{100 * share:.2f}%" for share in shares)
        click.echo(f"| {seq_length} x {num_ranks} | {row} |")
    tokens, tower, language = draw_costs(many)
    for budget in (None, 8192):
        begin = time.perf_counter()
        schedule = RankSchedule(tokens, tower + language, 32, budget, tower_cost=tower)
        epoch = schedule.epoch(0)
        cost, of_tower = (
            np.add.reduceat(one[epoch.numbers], epoch.starts[:-1])[epoch.table]
            for one in (tower + language, tower)
        )
        share = idle_shares(cost, of_tower)[1]
        seconds = time.perf_counter() - begin
        click.echo(f"{many:,} samples, budget {budget}: {seconds:.1f} s, idle {share:.2%}")


@main.command()
@click.option("--samples", default=1_000_000, show_default=True)
def uniform(samples: int) -> None:
    """Steps that mix packs with and without images, and the fill that it takes to have none."""
    tokens, tower, language = draw_costs(samples)
    lengths = np.asarray(tokens)
    click.echo(
        "| with images | ranks | mixed before | mixed | packs | halved | repeated | fill lost |"
    )
    click.echo("|---|---|---|---|---|---|---|---|")
    plain = plan_packs(lengths, 8192)
    for share in (0.30, 0.60, 0.95):
        media = (np.random.default_rng(3).random(samples) < share).astype(np.uint8)
        own = np.where(media, np.maximum(tower, tower[tower > 0].min()), 0.0)
        arrays = {"cost": own + language, "tower_cost": own, "media": media}
        for num_ranks in (8, 32, 128):
            found = []
            for is_uniform in (False, True):
                layout = RankLayout(num_ranks, uniform=is_uniform)
                plan = plan_packs(lengths, 8192, order=layout, **arrays)
                kinds = np.bitwise_or.reduceat(media[plan.sample_ids], plan.pack_offsets[:-1])
                found.append(layout.mixed_steps(kinds))
            done = plan.info.settings["uniform"]
            click.echo(
                f"| {share:.0%} | {num_ranks} | {found[0]} | {found[1]} | {plan.num_packs:,} | "
                f"{done['halved']} | {done['repeated']} | "
                f"{100 * (plain.fill - plan.fill):.3f}% |"
            )


if __name__ == "__main__":
    main()
