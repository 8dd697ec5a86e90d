"""Training speed on the same samples: padded, packed online by Energon's hook, packed offline.

    python tools/benchmarks/benchmark_training.py demo_output/vqa --shapes cpu
    python tools/benchmarks/benchmark_training.py out/packed_8k --shapes 2b --steps 60
    python tools/benchmarks/benchmark_training.py out/vqa --modes offline --shared out/shared

Writes results.json and table.md to --output after each mode; one that fails is named, and ends no
other. Each mode runs in a process of its own: warm-up, then steps of one row each, forward,
backward and optimizer. On a GPU, where fused kernels are compiled at the first row and again at
other lengths, the rows that are measured warm up, too. The vocabulary of the model
"cpu" is folded to 1,024: after so small a decoder, an output layer for 151,936 tokens would take
nearly all the time, and it never sees padding. In "cpu_7b" a picture's tokens take the tower as
much of the decoder's time as in a model of 7B. Packs that share prefixes, "shared", compute each
once; samples are branches, and "predicted" is then the ratio of tokens. On a CPU, seconds are
processor seconds of one thread, so that a busy neighbour does not count.
"""

import itertools
import json
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import torch
from training_loaders import MODES, build_loader, write_unpacked
from training_shapes import FOLDED_WORDS, SHAPES

from launch.config import OptimizerConfig
from launch.loop.loss import shift_labels
from launch.loop.metrics import peak_flops, row_flops
from launch.loop.optimizer import ShardedAdamW
from launch.loop.parallel import initialize_parallel
from launch.model.config import ModelConfig
from launch.model.megatron.model import build_model, model_outline
from launch.model.prefix_trees import segment_params
from offline_packing.runs.manifest import require_manifest
from task_encoders.energon_samples import PackedBatch
from task_encoders.families.base.cost import TRAINING, ModelCost, cost_of_sizes
from task_encoders.samples import IGNORE_INDEX
from task_encoders.text.qwen_vocabulary import MEDIA_TOKEN_IDS

#: Bytes of a weight on one device: in 16 bits with its gradient, and four numbers of AdamW's.
BYTES_PER_WEIGHT: Final = 2 + 4 * 4

#: Figures of NeMo's documentation for NeVA: Vicuna-1.5 13B, 8 GPUs, samples/s padded and packed.
NEVA = {"NeVA, TP 8": (63.745, 89.155), "NeVA, TP 4, PP 2": (63.745, 93.840)}


@click.command()
@click.argument("packed", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--shapes", type=click.Choice(list(SHAPES)), default="cpu", show_default=True)
@click.option("--steps", type=int, help="Per mode, at most; default: one pass over the samples.")
@click.option("--workers", default=0, show_default=True, help="Loader processes.")
@click.option("--padded-batch", type=int, help="Samples per padded row; default: as in a pack.")
@click.option("--buffer", default=100, show_default=True, help="Samples the online packer buffers.")
@click.option(
    "--shared",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The same samples packed with pack.share_prefixes: one more mode.",
)
@click.option(
    "--modes",
    default=",".join(MODES),
    show_default=True,
    help="Which are run, with commas; others are compared with the first.",
)
@click.option(
    "--at-least",
    default=0.0,
    help="Fail if packs gain less than this share of what the padding that they save predicts.",
)
@click.option("--output", type=click.Path(path_type=Path), default=Path("out/benchmark_training"))
def main(
    packed: Path,
    shapes: str,
    steps: int | None,
    workers: int,
    padded_batch: int | None,
    buffer: int,
    shared: Path | None,
    modes: str,
    at_least: float,
    output: Path,
) -> None:
    """Train on the samples of PACKED, a folder written by offline-packing, in each mode."""
    output.mkdir(parents=True, exist_ok=True)
    check_fit(shapes)
    samples, packs = count_train(packed)
    fewest = min(packs, count_train(shared or packed)[1])
    if steps is not None and fewest <= steps:
        raise click.ClickException(
            f"{steps} steps and a warm-up take {steps + 1} packs > the {fewest} that there are; "
            "pack more samples, or set --steps"
        )
    with tempfile.TemporaryDirectory() as folder:
        write_unpacked(packed, Path(folder))
        loader_options = {
            "packed": packed,
            "unpacked": Path(folder),
            "num_workers": workers,
            "padded_batch_size": padded_batch or round(samples / packs),
            "buffer_size": buffer,
        }
        results, failed = dict[str, Any](), list[str]()
        for mode in [*modes.split(","), *(["shared"] if shared else [])]:
            options = loader_options
            if mode == "shared":
                options = loader_options | {"packed": shared}
            # Unlike a Pool's, its processes may have children: the loader's.
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                future = pool.submit(run_mode, mode, shapes, steps, options)
                if error := future.exception():  # other modes are measured all the same
                    click.echo(f"{mode}: {type(error).__name__}: {error}", err=True)
                    failed.append(mode)
                    continue
                results[mode] = future.result()
            click.echo(f"{mode}: {results[mode]['summary']['samples_per_second']:.2f} samples/s")
            (output / "results.json").write_text(json.dumps(results))
            summaries = {mode: result["summary"] for mode, result in results.items()}
            (output / "table.md").write_text(render_table(summaries))
    if failed:
        raise click.ClickException(f"{', '.join(failed)} failed")
    click.echo(f"\n{render_table(summaries)}\nwritten to {output}")
    for mode in {"offline"} & summaries.keys():
        gain, predicted = gains(summaries)[mode]
        if gain < at_least * predicted:
            raise click.ClickException(f"packs gain {gain:.2f}, {predicted:.2f} were predicted")


def count_train(packed: Path) -> tuple[int, int]:
    """Samples and packs of a folder's train split."""
    train = [shard for shard in require_manifest(packed).shards if shard.split == "train"]
    return sum(shard.samples for shard in train), sum(shard.packs for shard in train)


def check_fit(shapes: str) -> None:
    """Raise ClickException, before weights are made, where a model and its optimizer do not fit."""
    if shapes.startswith("cpu"):
        return
    if not torch.cuda.is_available():
        raise click.ClickException(f"shapes {shapes!r} need a CUDA device; here are none: take cpu")
    needed = BYTES_PER_WEIGHT * sum(
        weight.numel() for weight in model_outline(ModelConfig(**SHAPES[shapes])).parameters()
    )
    available, _ = torch.cuda.mem_get_info()
    if needed > available:
        raise click.ClickException(
            f"shapes {shapes!r} need {needed / 2**30:.1f} GiB for weights and optimizer > "
            f"{available / 2**30:.1f} GiB of {torch.cuda.get_device_name()}; take smaller ones"
        )


def run_mode(
    mode: str, shapes: str, max_steps: int | None, loader_options: dict[str, Any]
) -> dict[str, Any]:
    """Steps and summary of one mode."""
    device = initialize_parallel()
    torch.set_num_threads(1)
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    model = build_model(ModelConfig(**SHAPES[shapes]), device=device).train()
    sizes = model.hf_config.text_config, model.hf_config.vision_config
    cost = cost_of_sizes(shapes, *(part.to_dict() for part in sizes))
    is_folded = shapes.startswith("cpu")
    if is_folded:
        model.hf_config.image_token_id = FOLDED_WORDS - 1
    optimizer = ShardedAdamW(
        model, OptimizerConfig(), model.layers(), next(model.parameters()).dtype, device=device
    )
    is_cuda = device.type == "cuda"
    train = partial(train_row, model, optimizer, device=device, folded=is_folded)
    lengths = set[int]()
    warm_up = build_loader(mode, **loader_options) if is_cuda else ()  # a CPU compiles nothing
    for batch in itertools.islice(warm_up, max_steps and max_steps + 1):
        if batch.tokens.shape[1] not in lengths:
            lengths.add(batch.tokens.shape[1])
            train(batch)
    batches = iter(build_loader(mode, **loader_options))
    train(next(batches))
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    steps = []
    for wait, batch in timed(batches, clock):
        counted, started = count_step(batch, cost), clock()
        train(batch)
        steps.append(counted | {"wait": wait, "seconds": wait + clock() - started})
        if len(steps) == max_steps:
            break
    name = torch.cuda.get_device_name() if is_cuda else "cpu"
    summary = summarize(steps, peak_flops(device)) | {"memory_gib": peak_memory_gib(is_cuda)}
    return {"mode": mode, "device": name, "summary": summary, "steps": steps}


def timed(
    batches: Iterator[PackedBatch], clock: Callable[[], float]
) -> Iterator[tuple[float, PackedBatch]]:
    """Each batch with the seconds it took to arrive."""
    while True:
        started = clock()
        batch = next(batches, None)
        if batch is None:
            return
        yield clock() - started, batch


def train_row(
    model: Any, optimizer: ShardedAdamW, batch: PackedBatch, *, device: torch.device, folded: bool
) -> None:
    """One step on one row."""
    tokens, labels = batch.tokens, shift_labels(batch.labels)
    if folded:
        is_image = tokens == MEDIA_TOKEN_IDS["image_token_id"]
        tokens = (tokens % (FOLDED_WORDS - 1)).masked_fill(is_image, FOLDED_WORDS - 1)
        labels = torch.where(labels == IGNORE_INDEX, labels, labels % (FOLDED_WORDS - 1))
    num_labels = int((labels != IGNORE_INDEX).sum())
    row = replace(batch, tokens=tokens).to(device, non_blocking=True)
    losses = model(row, segment_params(row), labels.to(device, non_blocking=True))
    losses.sum().backward()
    optimizer.step(learning_rate=1e-5, denominator=max(num_labels, 1), max_norm=1.0)
    if device.type == "cuda":
        torch.cuda.synchronize()


def count_step(batch: PackedBatch, cost: ModelCost) -> dict[str, float]:
    """Samples, real tokens, positions that are computed, and operations that are needed."""
    return {
        "samples": len(batch.sub_sample_keys),
        "tokens": int((~batch.attn_mask).sum()),
        "positions": batch.tokens.shape[1],
        "flops": TRAINING * float(row_flops(cost, batch)),
    }


def summarize(steps: Sequence[Mapping[str, float]], peak_flops: float | None) -> dict[str, float]:
    """Totals of a run. `steps`: seconds, wait, samples, tokens, positions, flops per step."""
    column = {name: np.array([step[name] for step in steps]) for name in steps[0]}
    seconds = column["seconds"]
    total = float(seconds.sum())
    p50, p95 = np.percentile(seconds, [50, 95])
    summary = {
        "steps": float(len(steps)),
        "samples": float(column["samples"].sum()),
        "samples_per_second": float(column["samples"].sum()) / total,
        "tokens_per_second": float(column["tokens"].sum()) / total,
        "padding": 1 - float(column["tokens"].sum() / column["positions"].sum()),
        "positions_per_sample": float(column["positions"].sum() / column["samples"].sum()),
        "step_p50": float(p50),
        "step_spread": float(p95 / p50),
        "data_wait": float(column["wait"].sum()) / total,
    }
    if peak_flops is not None:
        summary["mfu"] = float(column["flops"].sum()) / total / peak_flops
    return summary


def gains(summaries: Mapping[str, Mapping[str, float]]) -> dict[str, tuple[float, float]]:
    """Samples per second of each mode as a multiple of the first's, and the multiple that the saved
    positions alone would give."""
    base = next(iter(summaries.values()))
    return {
        mode: (
            figures["samples_per_second"] / base["samples_per_second"],
            base["positions_per_sample"] / figures["positions_per_sample"],
        )
        for mode, figures in summaries.items()
    }


def render_table(summaries: Mapping[str, Mapping[str, float]]) -> str:
    """A Markdown table, one row per mode; speeds also as a multiple of the first's. Last, after a
    padded one, what NeVA's documentation reports."""
    found = gains(summaries)
    first = next(iter(summaries))
    lines = [
        f"| run | samples/s | × {first} | predicted | tokens/s | padding | step p50 | p95/p50 | "
        "data wait | memory | MFU |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for mode, figures in summaries.items():
        gain, predicted = found[mode]
        mfu = f"{figures['mfu']:.1%}" if "mfu" in figures else "–"
        lines.append(
            f"| {mode} | {figures['samples_per_second']:.2f} | {gain:.2f} | {predicted:.2f} | "
            f"{figures['tokens_per_second']:,.0f} | {figures['padding']:.1%} | "
            f"{figures['step_p50']:.3f} s | {figures['step_spread']:.2f} | "
            f"{figures['data_wait']:.1%} | {figures['memory_gib']:.2f} GiB | {mfu} |"
        )
    for name, (padded, packed) in NEVA.items() if first == "padded" else ():
        lines.append(f"| {name} | {packed:.2f} | {packed / padded:.2f} |{' – |' * 8}")
    return "\n".join(lines) + "\n"


def peak_memory_gib(is_cuda: bool) -> float:
    """Peak memory of the device, or of this process on a CPU."""
    if is_cuda:
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main()
