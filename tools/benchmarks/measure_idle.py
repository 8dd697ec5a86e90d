"""Idle time of ranks by the order of packs, read through Energon's own loader.

python tools/benchmarks/measure_idle.py --samples 6000 --ranks 8 --workers 2

Writes one text sample per pack with the pack's cost (sum of squared lengths), reads them as every
rank in turn, and compares the idle share with what ``pack_order.idle_share`` predicts.
"""

import io
import tarfile
import tempfile
from pathlib import Path

import click
import numpy as np
from length_distributions import draw_lengths
from megatron.energon import DefaultTaskEncoder, WorkerConfig, get_loader, get_train_dataset
from megatron.energon.flavors.webdataset import BaseWebdatasetFactory

from offline_packing import plan_packs
from offline_packing.planner.order import RankLayout, idle_share

DATASET = """sample_type: {__module__: megatron.energon, __class__: TextSample}
field_map: {text: txt}
"""
KEEP_ORDER = {"shuffle_over_epochs_multiplier": None, "parallel_shard_iters": 1}


def write_costs(folder: Path, cost: np.ndarray, packs_per_shard: int = 100) -> None:
    """A dataset with one text sample per pack."""
    names = []
    for start in range(0, len(cost), packs_per_shard):
        names.append(f"{start // packs_per_shard:04d}.tar")
        with tarfile.open(folder / names[-1], "w") as tar:
            for pack, value in enumerate(cost[start : start + packs_per_shard], start):
                text = repr(float(value)).encode()
                member = tarfile.TarInfo(f"{pack:08d}.txt")
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text))
    BaseWebdatasetFactory.prepare_dataset(
        folder, names, split_parts_ratio=[("train", 1.0)], shuffle_seed=None, workers=1
    )
    (folder / ".nv-meta" / "dataset.yaml").write_text(DATASET)


def read_costs(folder: Path, worker_config: WorkerConfig, steps: int, keep: bool) -> list[float]:
    """Cost of the packs that one rank reads in its first steps."""
    dataset = get_train_dataset(
        folder,
        task_encoder=DefaultTaskEncoder(),
        batch_size=1,
        worker_config=worker_config,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        **(KEEP_ORDER if keep else {}),
    )
    return [float(batch.text[0]) for batch, _ in zip(get_loader(dataset), range(steps))]  # noqa: B905


@click.command()
@click.option("--samples", default=6000, show_default=True)
@click.option("--ranks", default=8, show_default=True)
@click.option("--workers", default=2, show_default=True)
def main(samples: int, ranks: int, workers: int) -> None:
    """Print the idle share, read and predicted, for random and for cost-grouped order."""
    tokens = draw_lengths("sft", samples)
    layout = RankLayout(ranks, workers)
    click.echo(
        "| order | loader keeps order | packs | idle % | predicted % |\n|---|---|---|---|---|"
    )
    for name, order, keep in (
        ("random", None, True),
        ("cost groups", layout, True),
        ("cost groups", layout, False),
    ):
        plan = plan_packs(tokens, 8192, order=order)
        cost = np.add.reduceat(tokens[plan.sample_ids] ** 2.0, plan.pack_offsets[:-1])
        steps = plan.num_packs // (ranks * workers) * workers
        with tempfile.TemporaryDirectory() as folder:
            write_costs(Path(folder), cost)
            configs = [
                WorkerConfig(rank=r, world_size=ranks, num_workers=workers) for r in range(ranks)
            ]
            read = np.array([read_costs(Path(folder), c, steps, keep) for c in configs])
        idle = 1 - read.mean() / read.max(axis=0).mean()
        predicted = f"{100 * idle_share(cost, layout):.2f}" if keep else "-"
        click.echo(f"| {name} | {keep} | {plan.num_packs} | {100 * idle:.2f} | {predicted} |")


if __name__ == "__main__":
    main()
