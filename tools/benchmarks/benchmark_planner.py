"""Measure the planner and its peers: packs, gap, fill, seconds, peak memory, spread of cost.

python tools/benchmarks/benchmark_planner.py speed --samples 1000000 --seq-length 8192
python tools/benchmarks/benchmark_planner.py scale --samples 100000000
python tools/benchmarks/benchmark_planner.py budgets | assignment | order | streaming | prefixes |
    mixtures

A distribution is one of length_distributions.py or a measured index: a folder of Parquet parts, or
an output.
"""

import json
import multiprocessing
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
from length_distributions import DISTRIBUTIONS, PER_MEDIUM, draw_lengths, draw_sft, draw_trees
from planner_peers import OWN, PEERS, missing_packages

from offline_packing import PackPlan, plan_packs
from offline_packing.config.packing import parse_config
from offline_packing.engines.local import LocalEngine
from offline_packing.index.table import INDEX_SCHEMA, Index, IndexInfo, part_name, table_writer
from offline_packing.online.pools import PackingPool
from offline_packing.plan.plan import plan
from offline_packing.planner.ranks.layout import RankLayout
from offline_packing.planner.strategies.budgets import size_lower_bound
from offline_packing.planner.strategies.composition import count_lengths, lower_bound
from offline_packing.planner.windows import WindowOptions
from offline_packing.runs.run import Run, Workspace
from offline_packing.storage.receipts import Receipt
from task_encoders.loading.schedule import InTurn

WARM_UP_SAMPLES = 2000
ROWS_PER_PART = 4096


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
        run = lambda x: plan_packs(x, seq_length, strategy=method)  # noqa: E731
        given = lengths
    run(given[:WARM_UP_SAMPLES])
    if method == "auto":  # compiles the parts that narrow distributions need
        run(draw_lengths("narrow", WARM_UP_SAMPLES))
    before = peak_mib()
    results, seconds, cpu_seconds = zip(
        *(timed(lambda: run(given)) for _ in range(repeat)), strict=True
    )
    result = results[-1]
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


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """A Markdown table, columns in the order of the first row."""
    names = list(rows[0])
    click.echo("| " + " | ".join(names) + " |")
    click.echo("|" + "---|" * len(names))
    for row in rows:
        click.echo("| " + " | ".join(str(row[name]) for name in names) + " |")


def timed(run: Callable[[], Any]) -> tuple[Any, float, float]:
    """What a function returns, its seconds and its CPU seconds."""
    start, cpu_start = time.perf_counter(), time.process_time()
    result = run()
    return result, time.perf_counter() - start, time.process_time() - cpu_start


of_distributions = click.option(
    "--distribution",
    "distributions",
    multiple=True,
    default=DISTRIBUTIONS,
    help="A distribution or a measured index.",
)


@click.group()
def main() -> None:
    """Benchmarks of the planner."""


@main.command()
@click.option("--samples", default=1_000_000, show_default=True)
@click.option("--seq-length", default=8192, show_default=True)
@of_distributions
@click.option("--method", "methods", multiple=True, default=(*OWN, *PEERS), show_default=True)
@click.option("--repeat", default=3, show_default=True)
def speed(
    samples: int, seq_length: int, distributions: Sequence[str], methods: Sequence[str], repeat: int
) -> None:
    """Packs and time of all methods on every distribution; no shuffle, warm."""
    missing = missing_packages()
    if missing:
        click.echo(f"not installed, so not measured: {', '.join(missing)}\n")
    rows = []
    for distribution in distributions:
        for method in methods:
            peer = PEERS.get(method)
            if peer and (peer.package in missing or samples > peer.max_samples):
                continue
            rows.append(measure(method, distribution, samples, seq_length, repeat))
            click.echo(json.dumps(rows[-1]), err=True)
    print_table(rows)


@main.command()
@click.option("--samples", default=100_000, show_default=True)
@click.option("--seq-length", default=8192, show_default=True)
@of_distributions
@click.option("--window", default=1000, show_default=True)
def streaming(samples: int, seq_length: int, distributions: Sequence[str], window: int) -> None:
    """Fill and age of samples when windows are packed in sequence, with carry-over."""
    print_table(
        [
            _stream(distribution, samples, WindowOptions(seq_length, window))
            for distribution in distributions
        ]
    )


def _stream(distribution: str, samples: int, options: WindowOptions) -> dict[str, Any]:
    """One row: a whole stream, with its pending samples at the end; CPU time of a warm run."""
    lengths = draw_lengths(distribution, samples)
    lengths = lengths[lengths <= options.seq_length]
    warm, pool = PackingPool[None](options), PackingPool[int](options)
    for length in lengths[:WARM_UP_SAMPLES].tolist():
        warm.add(None, length)
    packs, oldest, most_waiting = 0, 0, 0
    cpu_start = time.process_time()
    for number, length in enumerate(lengths.tolist()):
        ready = pool.add(number, length)
        packs += len(ready)
        first = min(map(min, ready), default=number)
        oldest = max(oldest, number // options.window - first // options.window)
        if (number + 1) % options.window == 0:
            most_waiting = max(most_waiting, len(pool.waiting))
    packs += len(pool.finish())
    cpu_seconds = time.process_time() - cpu_start
    bound = lower_bound(count_lengths(lengths, options.seq_length))
    tokens = int(lengths.sum(dtype=np.int64))
    return {
        "distribution": distribution,
        "packs": packs,
        "above bound": packs - bound,
        "fill %": round(100 * tokens / (packs * options.seq_length), 3),
        "fill possible %": round(100 * tokens / (bound * options.seq_length), 3),
        "oldest sample, windows": oldest,
        "most samples waiting": most_waiting,
        "CPU seconds": round(cpu_seconds, 2),
    }


@main.command()
@click.option("--samples", default=100_000_000, show_default=True)
@click.option("--distribution", default="captions", show_default=True)
@click.option("--seq-length", default=8192, show_default=True)
@click.option("--disk/--memory", default=True, show_default=True, help="From disk to disk or not.")
def scale(samples: int, distribution: str, seq_length: int, disk: bool) -> None:
    """Time and memory of one large plan, from an array on disk to a plan on disk."""
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(1) as p:
        path = Path(folder) / "num_tokens.npy"
        p.apply(_write_lengths, (path, distribution, samples))
        with multiprocessing.get_context("spawn").Pool(1) as fresh:
            row = fresh.apply(_scale_here, (path, seq_length, disk))
    print_table([{"distribution": distribution, "samples": samples, "disk": disk, **row}])


def _write_lengths(path: Path, distribution: str, samples: int) -> None:
    parts = [
        draw_lengths(distribution, min(samples, 10**7), seed)
        for seed in range(-(-samples // 10**7))
    ]
    np.save(path, np.concatenate(parts)[:samples])


def _scale_here(path: Path, seq_length: int, disk: bool) -> dict[str, Any]:
    for distribution in ("captions", "narrow"):
        plan_packs(draw_lengths(distribution, WARM_UP_SAMPLES), seq_length)
    lengths = None if disk else np.load(path)

    def run() -> PackPlan:
        if lengths is not None:
            return plan_packs(lengths, seq_length)
        plan = plan_packs(np.load(path, mmap_mode="r"), seq_length)
        plan.save(path.parent / "plan")
        return plan

    plan, seconds, cpu_seconds = timed(run)
    return {
        "packs": plan.num_packs,
        "above bound": plan.num_packs - plan.info.lower_bound,
        "seconds": round(seconds, 2),
        "CPU seconds": round(cpu_seconds, 2),
        "peak MiB": round(peak_mib()),
    }


@main.command()
@click.option("--samples", default=100_000, show_default=True)
@click.option("--seq-length", default=8192, show_default=True)
@click.option(
    "--patches", multiple=True, type=int, default=(30_000, 22_000, 20_000, 19_500, 16_000)
)
def budgets(samples: int, seq_length: int, patches: Sequence[int]) -> None:
    """Limits on tokens and on vision patches at once, SFT distribution."""
    tokens, vision = draw_sft(samples)
    plan_packs(tokens[:2000], seq_length, budgets={"patches": (vision[:2000], 22_000)})
    rows = []
    for limit in patches:
        of_patches = {"patches": (vision, limit)}
        plan, seconds, cpu_seconds = timed(
            lambda: plan_packs(tokens, seq_length, budgets=of_patches)  # noqa: B023
        )
        kept = plan.sample_ids
        loads = np.add.reduceat(vision[kept], plan.pack_offsets[:-1])
        rows.append(
            {
                "patch limit": limit,
                "token bound": size_lower_bound(tokens[kept], seq_length),
                "patch bound": size_lower_bound(vision[kept], limit),
                "packs": plan.num_packs,
                "gap %": round(100 * plan.gap, 3),
                "violations": int((loads > limit).sum()),
                "set aside": len(plan.set_aside_ids),
                "seconds": round(seconds, 2),
                "CPU seconds": round(cpu_seconds, 2),
            }
        )
    print_table(rows)


def _pack_sums(plan: PackPlan, values: np.ndarray) -> np.ndarray:
    return np.add.reduceat(values[plan.sample_ids].astype(np.float64), plan.pack_offsets[:-1])


@main.command()
@click.option("--samples", default=100_000, show_default=True)
@click.option("--packs-per-shard", default=1000, show_default=True)
def assignment(samples: int, packs_per_shard: int) -> None:
    """Measure what an output shard reads of the source under assignment locality."""
    print_table(
        [_locality(distribution, samples, packs_per_shard) for distribution in DISTRIBUTIONS]
    )


def _locality(distribution: str, samples: int, packs_per_shard: int) -> dict[str, Any]:
    """Measure the blocks that one output shard reads from source shards of twice its size."""
    tokens = draw_lengths(distribution, samples)
    plan = plan_packs(
        tokens,
        8192,
        assignment="locality",
        source_order=np.arange(samples),
        window_packs=packs_per_shard,
    )
    per_shard = samples * packs_per_shard / plan.num_packs
    shard = np.repeat(np.arange(plan.num_packs) // packs_per_shard, np.diff(plan.pack_offsets))
    opened = np.unique(np.stack([shard, plan.sample_ids // int(2 * per_shard)]), axis=1)
    block = max(1, int(per_shard / 1000))
    read = np.unique(np.stack([shard, plan.sample_ids // block]), axis=1)
    return {
        "distribution": distribution,
        "packs": plan.num_packs,
        "above bound": plan.num_packs - plan.info.lower_bound,
        "gap %": round(100 * plan.gap, 3),
        "source shards per output shard, mean": round(opened.shape[1] / (shard.max() + 1), 2),
        "max": int(np.bincount(opened[0]).max()),
        "samples read per sample written": round(block * read.shape[1] / samples, 3),
    }


@main.command()
@click.option("--samples", default=100_000, show_default=True)
@click.option("--ranks", default=8, show_default=True)
@click.option("--workers", default=2, show_default=True)
def order(samples: int, ranks: int, workers: int) -> None:
    """Idle share of ranks by the sum of squared lengths, sft, as Energon splits the packs."""
    tokens = draw_lengths("sft", samples)
    layouts = [RankLayout(ranks, workers), RankLayout(2 * ranks, workers)]
    layouts += [RankLayout(max(1, ranks // 2), workers), RankLayout(ranks, 2 * workers)]
    rows = []
    for name, planned in (("random", None), (f"for {ranks} x {workers}", layouts[0])):
        plan = plan_packs(tokens, 8192, order=planned)
        cost = _pack_sums(plan, tokens.astype(np.float64) ** 2)
        for read in layouts:
            rows.append(
                {
                    "order": name,
                    "read by ranks x workers": f"{read.num_ranks} x {read.num_workers}",
                    "idle %": round(100 * read.idle_shares(cost)[0], 2),
                }
            )
    print_table(rows)


@main.command()
@click.option("--samples", default=1_000_000, show_default=True)
@click.option("--seq-length", default=8192, show_default=True)
@click.option("--max-branches", default=16, show_default=True)
@click.option("--data-set", "data_sets", multiple=True, default=tuple(PER_MEDIUM))
def prefixes(samples: int, seq_length: int, max_branches: int, data_sets: Sequence[str]) -> None:
    """Tokens, packs and CPU time of `plan` with shared prefixes, and without, on an index with as
    many samples per image or video as data sets have."""
    rows = []
    for name in data_sets:
        with tempfile.TemporaryDirectory() as folder:
            for count in (WARM_UP_SAMPLES, samples):  # compiles
                row = _plan_trees(Path(folder), draw_trees(name, count), seq_length, max_branches)
            rows.append({"data set": name, **row})
    print_table(rows)


@main.command()
@click.option("--samples", default=1_000_000, show_default=True)
@click.option("--seq-length", default=8192, show_default=True)
@click.option("--packs-per-step", default=64, show_default=True)
@click.option("--block", default=50, show_default=True, help="Steps over which shares are summed.")
def mixtures(samples: int, seq_length: int, packs_per_step: int, block: int) -> None:
    """Shares of tokens of five sources along a mixture that changes, per block of steps of 1, 8 and
    32 ranks; and packs and CPU time of `plan`, against weights that do not change."""
    with tempfile.TemporaryDirectory() as folder:
        for count in (10 * WARM_UP_SAMPLES, samples):  # compiles
            rows = _plan_mixture(Path(folder), count, seq_length, packs_per_step, block)
    print_table(rows)


#: Shares of the sources at the start and the end of a plan.
_LINES = np.array([[0.5, 0.2, 0.1, 0.05, 0.15], [0.1, 0.3, 0.2, 0.25, 0.15]])


def _plan_mixture(
    folder: Path, count: int, seq_length: int, packs_per_step: int, block: int
) -> list[dict[str, Any]]:
    each = count // len(DISTRIBUTIONS)
    tokens = np.concatenate([draw_lengths(n, each, seed=i) for i, n in enumerate(DISTRIBUTIONS)])
    source_ids = np.repeat(np.arange(len(DISTRIBUTIONS)), each)
    drawn = np.stack([np.arange(len(tokens)), np.zeros(len(tokens), np.int64), tokens], axis=1)
    start, end = (dict(zip(DISTRIBUTIONS, line.tolist(), strict=True)) for line in _LINES)
    sources: list[dict[str, Any]] = [
        {"format": "jsonl", "path": f"{folder}/{name}", "name": name, "task": "vqa"}
        for name in DISTRIBUTIONS
    ]
    weights = _LINES.mean(axis=0).tolist()
    weighted = [one | {"weight": w} for one, w in zip(sources, weights, strict=True)]
    pack = {"seq_length": seq_length}
    (plain, cpu_plain), (packs, cpu_seconds) = (
        _plan_index(folder, {"source": source, "pack": own}, drawn, source_ids)
        for source, own in (
            (weighted, pack),
            (sources, pack | {"mixture": {"start": start, "end": end}}),
        )
    )
    of_packs = np.zeros((packs.num_packs, len(DISTRIBUTIONS)))
    pack_of_use = np.repeat(np.arange(packs.num_packs), np.diff(packs.pack_offsets))
    np.add.at(of_packs, (pack_of_use, source_ids[packs.sample_ids]), tokens[packs.sample_ids])
    rows = []
    for num_ranks in (1, 8, 32):
        epoch = InTurn(packs.num_packs, num_ranks, repeat=False).epoch(0)
        read = [epoch.items(step, rank) for step in range(len(epoch)) for rank in range(num_ranks)]
        order = np.concatenate(read)
        blocks = len(order) // (block * packs_per_step)
        ends = np.arange(blocks + 1) * block * packs_per_step
        sums = np.add.reduceat(of_packs[order[: ends[-1]]], ends[:-1])
        shares = sums / sums.sum(axis=1, keepdims=True)
        middle = (ends[:-1] + ends[1:])[:, np.newaxis] / 2 / len(order)
        apart = np.abs(shares - (_LINES[0] + (_LINES[1] - _LINES[0]) * middle))
        rows.append(
            {
                "ranks": num_ranks,
                "blocks": blocks,
                "apart, points": round(100 * apart.max(), 3),
                "mean": round(100 * apart.mean(), 3),
                "uses": len(packs.sample_ids),
                "packs": packs.num_packs,
                "bound": packs.info.lower_bound,
                "packs by weights": plain.num_packs,
                "CPU seconds": round(cpu_seconds, 2),
                "by weights": round(cpu_plain, 2),
                "ratio": round(cpu_seconds / cpu_plain, 2),
            }
        )
    return rows


def _plan_trees(
    folder: Path, drawn: np.ndarray, seq_length: int, max_branches: int
) -> dict[str, Any]:
    """One row of the table; both plans are of one index, one after the other."""
    source = {"format": "jsonl", "path": str(folder), "task": "vqa"}
    (plain, cpu_plain), (packs, cpu_seconds) = (
        _plan_index(
            folder,
            {"source": source, "pack": {"seq_length": seq_length, "share_prefixes": shared}},
            drawn,
        )
        for shared in (None, {"max_branches": max_branches})
    )
    media, prefix, tokens = drawn.T.astype(np.int64)
    least = prefix[np.unique(media, return_index=True)[1]].sum() + (tokens - prefix).sum()
    whole = tokens.sum()
    return {
        "tokens, times fewer": round(whole / packs.info.num_tokens, 2),
        "of a tree's saving %": round(100 * (whole - packs.info.num_tokens) / (whole - least), 2),
        "packs whole": plain.num_packs,
        "packs": packs.num_packs,
        "gap %": round(100 * packs.gap, 3),
        "fill %": round(100 * packs.fill, 2),
        "CPU seconds whole": round(cpu_plain, 2),
        "CPU seconds": round(cpu_seconds, 2),
        "ratio": round(cpu_seconds / cpu_plain, 2),
    }


def _plan_index(
    folder: Path, sections: dict[str, Any], drawn: np.ndarray, source_ids: np.ndarray | None = None
) -> tuple[PackPlan, float]:
    """The plan of an index, and its CPU seconds."""
    output = {"path": f"{folder}.out", "overwrite": True}
    run = Run(parse_config({**sections, "output": output}), LocalEngine(0))
    samples = _index_of(run.workspace, drawn, source_ids)
    made, _, cpu_seconds = timed(lambda: plan(run, samples))
    shutil.rmtree(run.workspace.root)
    return made.packs, cpu_seconds


def _index_of(
    workspace: Workspace, drawn: np.ndarray, source_ids: np.ndarray | None = None
) -> Index:
    """An index of samples with these media, tokens of prefixes and tokens, an image each."""
    count = len(drawn)
    sizes = {"kind": "bytes", "container": "a.tar", "offset": 0, "size": 0, "column": ""}
    row = dict.fromkeys(INDEX_SCHEMA.names, 0) | dict.fromkeys(("part", "kept", "unfit"))
    row |= {"key": "", "task": "vqa"}
    row |= {"json": sizes, "media": [sizes], "media_hash": [0], "grid_thw": [1, 24, 24]}
    row |= {"num_images": 1, "prefix_images": 1, "num_vision_patches": 576}
    rows = pa.Table.from_pylist([row], INDEX_SCHEMA).take(pa.array(np.zeros(count, np.int64)))
    media, prefix, tokens = drawn.T
    given = {"prefix_hash": media + 1, "prefix_media": media + 1, "prefix_tokens": prefix}
    given |= {"num_tokens": tokens, "key_hash": np.arange(count), "key": np.arange(count)}
    given["sample_hash"] = np.arange(count)
    if source_ids is not None:
        given["source_id"] = source_ids
    for name, values in given.items():
        place = INDEX_SCHEMA.get_field_index(name)
        rows = rows.set_column(
            place, INDEX_SCHEMA.field(name), pa.array(values).cast(INDEX_SCHEMA.field(name).type)
        )
    workspace.index.mkdir(parents=True, exist_ok=True)
    parts = [rows.slice(start, ROWS_PER_PART) for start in range(0, count, ROWS_PER_PART)]
    for number, part in enumerate(parts):
        with table_writer(workspace.index / part_name(number), INDEX_SCHEMA) as write:
            write(part)
    info = IndexInfo({}, {}, list(map(len, parts)), {})
    Receipt({}, {}, info.facts()).save(workspace.packing, "measure")
    return Index(workspace.index, info)


if __name__ == "__main__":
    main()
