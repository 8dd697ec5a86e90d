"""Fill and cost of packing while training, and of dealing packs to ranks.

python tools/benchmarks/benchmark_online.py loaders
python tools/benchmarks/benchmark_online.py planning
python tools/benchmarks/benchmark_online.py buffers
python tools/benchmarks/benchmark_online.py binpack
"""

import time
from typing import Any

import click
import numpy as np
from benchmark_planner import print_table
from length_distributions import DISTRIBUTIONS, draw_lengths, draw_sft
from planner_peers import ms_swift

from offline_packing import plan_packs
from offline_packing.online.datasets import DynamicBatches, PackedIterableDataset
from offline_packing.online.online_dataset import OnlineDataset
from offline_packing.online.pools import PackingPool
from offline_packing.planner.strategies.peers.placing import first_fit_decreasing
from offline_packing.planner.windows import WindowOptions

SEQ_LENGTH = 8192


@click.group()
def main() -> None:
    """Measure packing while training."""


@main.command()
@click.option("--samples", default=20_000, show_default=True)
@click.option("--buffer", default=1000, show_default=True)
@click.option(
    "--tokens-per-second",
    default=40_000,
    show_default=True,
    help="What a trainer takes: a model of 2 billion parameters at half the peak of one H200.",
)
def loaders(samples: int, buffer: int, tokens_per_second: int) -> None:
    """Packs and processor time of the datasets for PyTorch's loaders, on one core: planning alone,
    and with a state saved after every pack. Samples are only lengths."""
    print_table(
        [
            {
                "distribution": distribution,
                "mode": mode,
                **_time_loader(dataset, lengths, tokens_per_second),
            }
            for distribution in ("captions", "sft")
            for lengths in [draw_lengths(distribution, samples)]
            for mode, dataset in _modes(lengths, buffer).items()
        ]
    )


def _modes(lengths: np.ndarray, buffer: int) -> dict[str, OnlineDataset]:
    samples = [{"length": length} for length in lengths.tolist()]

    def packed(strategy: str, leftovers: Any) -> OnlineDataset:
        return PackedIterableDataset(
            samples,
            seq_length=SEQ_LENGTH,
            buffer_size=buffer,
            strategy=strategy,
            leftovers=leftovers,
        )

    return {
        "binpack, emit": packed("binpack", "emit"),
        "binpack, carry": packed("binpack", "carry"),
        "sequential": packed("sequential", "carry"),
        "auto, carry": packed("auto", "carry"),
        "dynamic, buffer 200": DynamicBatches(samples, max_seq_len=SEQ_LENGTH, collate=list),
    }


def _time_loader(
    dataset: OnlineDataset, lengths: np.ndarray, tokens_per_second: int
) -> dict[str, Any]:
    for _ in zip(range(2), dataset, strict=False):  # compile
        pass
    seconds = []
    for saves in (False, True):
        start = time.process_time()
        packs = 0
        for _ in dataset:
            packs += 1
            if saves:
                dataset.state_dict()
        seconds.append(time.process_time() - start)
    total = int(lengths.sum())
    return {
        "packs": f"{packs:,}",
        "bound": f"{-(-total // SEQ_LENGTH):,}",
        "fill %": f"{100 * total / packs / SEQ_LENGTH:.2f}",
        "µs per sample": f"{1e6 * seconds[0] / len(lengths):.0f}",
        "× a trainer's need": f"{total / seconds[0] / tokens_per_second:,.0f}",
        "with a state per pack": f"{total / seconds[1] / tokens_per_second:,.0f}",
    }


@main.command()
@click.option("--samples", default=20_000, show_default=True)
@click.option(
    "--tokens-per-second",
    default=320_000,
    show_default=True,
    help="What the trainer takes: eight of the GPUs that `loaders` feeds.",
)
def planning(samples: int, tokens_per_second: int) -> None:
    """Samples that a `PackingPool` plans a second on one core, with and without a budget of images,
    against what a trainer takes."""
    rng = np.random.default_rng(0)
    rows = []
    for distribution in ("captions", "sft"):
        lengths, images = draw_lengths(distribution, samples), rng.integers(0, 5, samples)
        need = tokens_per_second / lengths.mean()
        for strategy in ("auto", "knapsack", "to_constant_volume"):
            for budgets in ({}, {"images": 18}):
                row = {
                    "distribution": distribution,
                    "strategy": strategy,
                    "images per pack": budgets.get("images", ""),
                    "needed": f"{need:,.0f}",
                }
                for buffer in (128, 200, 1000):
                    options = WindowOptions(
                        seq_length=SEQ_LENGTH,
                        window=buffer,
                        strategy=strategy,
                        budgets=budgets,
                        full_at=0.0 if strategy == "knapsack" else 1.0,
                    )
                    _plan(options, lengths[:5000], images)  # compile
                    start = time.process_time()
                    _plan(options, lengths, images)
                    speed = samples / (time.process_time() - start)
                    row[f"buffer {buffer}"] = f"{speed:,.0f}, {speed / need:,.0f} ×"
                rows.append(row)
    print_table(rows)


def _plan(options: WindowOptions, lengths: np.ndarray, images: np.ndarray) -> None:
    pool = PackingPool[int](options)
    for length, count in zip(lengths.tolist(), images.tolist(), strict=False):
        pool.add(length, length, {"images": count})
    pool.finish()


@main.command()
@click.option("--samples", default=20_000, show_default=True)
def buffers(samples: int) -> None:
    """Fill of packs made from a buffer in each of N data parallel ranks' n loader processes: each
    sees M / (N n) of the M samples."""
    tokens = draw_sft(samples)[0]
    rows = []
    for readers in (1, 16, 128):
        parts = [tokens[reader::readers] for reader in range(readers)]
        for buffer in (50, 200, 1000, 5000):
            plain = [
                first_fit_decreasing(part[start : start + buffer], SEQ_LENGTH)
                for part in parts
                for start in range(0, len(part), buffer)
            ]
            carried = sum(_carried_packs(part, buffer) for part in parts)
            rows.append(
                {
                    "readers, N n": readers,
                    "samples of each, M / (N n)": samples // readers,
                    "buffer": buffer,
                    "each buffer for itself, fill %": _fill(
                        tokens, sum(len(packs.pack_offsets) - 1 for packs in plain)
                    ),
                    "carried over, fill %": _fill(tokens, carried),
                }
            )
    print_table(rows)
    offline = _fill(tokens, plan_packs(tokens, SEQ_LENGTH).num_packs)
    click.echo(f"\nall samples planned at once: {offline}")


@main.command()
@click.option("--samples", default=10_000, show_default=True)
def binpack(samples: int) -> None:
    """Packs of a `PackingPool` with `auto` / of ms-swift's binpack (its rule, with binpacking), and
    CPU time per sample: the least of three each, in turn."""
    print_table(
        [
            {"lengths": name}
            | {
                f"buffer {buffer}": _against_ms_swift(lengths, SEQ_LENGTH, buffer)
                for buffer in (20, 50, 128, 200, 500, 1000, 2000)
            }
            for name in DISTRIBUTIONS
            for lengths in [draw_lengths(name, samples)]
        ]
    )
    tiny = np.random.default_rng(0).integers(1, 16, 6 * samples)
    click.echo(f"\n1 to 15 tokens, 131,072 a pack: {_against_ms_swift(tiny, 131_072, 1000)}")


def _against_ms_swift(lengths: np.ndarray, seq_length: int, buffer: int) -> str:
    _carried_packs(lengths[: 3 * buffer + 7], buffer, seq_length)  # compile
    seconds = []
    for _ in range(3):
        times = [time.process_time()]
        ours = _carried_packs(lengths, buffer, seq_length)
        times.append(time.process_time())
        theirs = len(ms_swift(lengths.tolist(), seq_length, buffer))
        times.append(time.process_time())
        seconds.append(np.diff(times))
    auto, other = 1e6 * np.min(seconds, axis=0) / len(lengths)
    return f"{ours:,} / {theirs:,}; {auto:.1f} / {other:.1f} µs, {auto / other:.2f} ×"


def _carried_packs(lengths: np.ndarray, buffer: int, seq_length: int = SEQ_LENGTH) -> int:
    pool = PackingPool[int](WindowOptions(seq_length=seq_length, window=buffer))
    ready = (len(pool.add(number, length)) for number, length in enumerate(lengths.tolist()))
    return sum(ready) + len(pool.finish())


def _fill(tokens: np.ndarray, packs: int) -> str:
    return f"{100 * tokens.sum(dtype=np.int64) / (packs * SEQ_LENGTH):.2f}"


if __name__ == "__main__":
    main()
