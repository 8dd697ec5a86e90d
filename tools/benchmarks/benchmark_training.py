"""Training speed on the same samples: padded, packed online by Energon's hook, packed offline.

    python tools/benchmarks/benchmark_training.py demo_output/vqa --shapes cpu
    python tools/benchmarks/benchmark_training.py out/packed_8k --shapes 2b --steps 60
    python tools/benchmarks/benchmark_training.py out/shared --shapes cpu_7b

Writes results.json and table.md to --output. Each mode runs in a process of its own: one
warm-up, then steps of one row each, forward, backward and optimizer. The vocabulary of the model
"cpu" is folded to 1,024: after so small a decoder, an output layer for 151,936 tokens would take
nearly all the time, and it never sees padding. In "cpu_7b" a picture's tokens take the tower as
much of the decoder's time as in a model of 7B. Of packs that share prefixes, "offline" computes
each once; "predicted" is then the ratio of tokens. On a CPU, seconds are processor seconds of one
thread, so that a busy neighbour does not count.
"""

import json
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import torch
from training_loaders import MODES, build_loader, write_unpacked

from launch.config import OptimizerConfig
from launch.loop.loss import shift_labels
from launch.loop.metrics import peak_flops, row_flops
from launch.loop.optimizer import ShardedAdamW
from launch.loop.parallel import initialize_parallel
from launch.model.config import ModelConfig
from launch.model.megatron_model import build_model
from launch.model.prefix_trees import segment_params
from offline_packing.runs.manifest import require_manifest
from task_encoders.energon_samples import PackedBatch
from task_encoders.families.base.cost import TRAINING, ModelCost, cost_of_sizes
from task_encoders.packs.tokenized import IGNORE_INDEX
from task_encoders.text.qwen_vocabulary import MEDIA_TOKEN_IDS

FOLDED_WORDS: Final = 1024

#: Models by name. "cpu": its decoder takes nearly all of the time, as in a large model.
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "cpu": {
        "text": {
            "vocab_size": FOLDED_WORDS,
            "bos_token_id": None,
            "eos_token_id": None,
            "hidden_size": 256,
            "intermediate_size": 1024,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [8, 12, 12],
            },
        },
        "vision": {"hidden_size": 256, "depth": 1},
    },
    "2b": {"preset": "2b"},
    "7b": {"preset": "7b", "recompute": "full"},
}

#: The same with a tower whose operations for a picture are to the decoder's as in Qwen2-VL-7B: .44.
SHAPES["cpu_7b"] = SHAPES["cpu"] | {
    "vision": {"hidden_size": 256, "depth": 1, "embed_dim": 112, "num_heads": 2}
}

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
    "--indexed",
    type=click.Path(path_type=Path),
    help="Prefix of the same packs as token ids: one more mode.",
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
    indexed: Path | None,
    at_least: float,
    output: Path,
) -> None:
    """Train on the samples of PACKED, a folder written by offline-packing, in each mode."""
    output.mkdir(parents=True, exist_ok=True)
    train = [s for s in require_manifest(packed).shards if s.split == "train"]
    samples, packs = (sum(getattr(shard, name) for shard in train) for name in ("samples", "packs"))
    with tempfile.TemporaryDirectory() as folder:
        write_unpacked(packed, Path(folder))
        loader_options = {
            "packed": packed,
            "unpacked": Path(folder),
            "num_workers": workers,
            "padded_batch_size": padded_batch or round(samples / packs),
            "buffer_size": buffer,
            "indexed": indexed,
        }
        results = {}
        for mode in [*MODES, *(["indexed"] if indexed else [])]:
            # Unlike a Pool's, its processes may have children: the loader's.
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                results[mode] = pool.submit(run_mode, mode, shapes, steps, loader_options).result()
            click.echo(f"{mode}: {results[mode]['summary']['samples_per_second']:.2f} samples/s")
    (output / "results.json").write_text(json.dumps(results))
    summaries = {mode: result["summary"] for mode, result in results.items()}
    table = render_table(summaries)
    (output / "table.md").write_text(table)
    click.echo(f"\n{table}\nwritten to {output}")
    gain, predicted = gains(summaries)["offline"]
    if gain < at_least * predicted:
        raise click.ClickException(f"packs gain {gain:.2f}, {predicted:.2f} were predicted")


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
        model,
        OptimizerConfig(),
        model.layers(),
        next(model.parameters()).dtype,
        device=device,
        group=torch.distributed.group.WORLD,
    )
    is_cuda = device.type == "cuda"
    batches = iter(build_loader(mode, **loader_options))
    train_row(model, optimizer, next(batches), device, folded=is_folded)  # warm-up
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    steps = []
    for wait, batch in timed(batches, clock):
        counted, started = count_step(batch, cost), clock()
        train_row(model, optimizer, batch, device, folded=is_folded)
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
    model: Any, optimizer: ShardedAdamW, batch: PackedBatch, device: torch.device, *, folded: bool
) -> None:
    """One step on one row."""
    tokens, labels = batch.tokens, shift_labels(batch.labels)
    if folded:
        is_image = tokens == MEDIA_TOKEN_IDS["image_token_id"]
        tokens = (tokens % (FOLDED_WORDS - 1)).masked_fill(is_image, FOLDED_WORDS - 1)
        labels = torch.where(labels == IGNORE_INDEX, labels, labels % (FOLDED_WORDS - 1))
    num_labels = int((labels != IGNORE_INDEX).sum())
    params = segment_params(move(batch, device))
    losses = model(
        tokens=tokens.to(device, non_blocking=True),
        position_ids=batch.position_ids.to(device, non_blocking=True),
        packed_seq_params=params,
        imgs=batch.imgs.to(device, non_blocking=True),
        image_grid_thw=batch.image_grid_thw.to(device, non_blocking=True),
        labels=labels.to(device, non_blocking=True),
        pixel_values_videos=batch.pixel_values_videos.to(device, non_blocking=True),
        video_grid_thw=batch.video_grid_thw.to(device, non_blocking=True),
    )
    losses.sum().backward()
    optimizer.step(learning_rate=1e-5, denominator=max(num_labels, 1), max_norm=1.0)
    if device.type == "cuda":
        torch.cuda.synchronize()


def move(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """The batch with its boundaries on the device."""
    batch.cu_lengths = batch.cu_lengths.to(device)
    batch.attn_mask = batch.attn_mask.to(device)
    batch.parents = batch.parents.to(device)
    return batch


def count_step(batch: PackedBatch, cost: ModelCost) -> dict[str, float]:
    """Samples, real tokens, positions that are computed, and operations that are needed."""
    return {
        "samples": len(batch.sub_sample_keys),
        "tokens": int((~batch.attn_mask).sum()),
        "positions": batch.tokens.shape[1],
        "flops": TRAINING * float(row_flops(cost, batch)[:2].sum()),
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
    """Samples per second of each mode as a multiple of the padded run's, and the multiple that the
    saved padding alone would give."""
    base = summaries["padded"]
    return {
        mode: (
            figures["samples_per_second"] / base["samples_per_second"],
            base["positions_per_sample"] / figures["positions_per_sample"],
        )
        for mode, figures in summaries.items()
    }


def render_table(summaries: Mapping[str, Mapping[str, float]]) -> str:
    """A Markdown table, one row per mode; speeds also as a multiple of the padded run's. Last,
    what NeVA's documentation reports."""
    found = gains(summaries)
    lines = [
        "| run | samples/s | × padded | predicted | tokens/s | padding | step p50 | p95/p50 | "
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
    for name, (padded, packed) in NEVA.items():
        lines.append(f"| {name} | {packed:.2f} | {packed / padded:.2f} |{' – |' * 8}")
    return "\n".join(lines) + "\n"


def peak_memory_gib(is_cuda: bool) -> float:
    """Peak memory of the device, or of this process on a CPU."""
    if is_cuda:
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main()
