"""Does packing change what is learned? One small model, packed and padded, on the same samples.

    python tools/benchmarks/packing_learning.py out/learning --picture packing_learning.png

Packs the demo's questions and dialogues, and the same samples one by one, for every seed; trains
each mode with `launch`, by token and by sample; writes FOLDER/results_*/RUN.json, prints tables and
draws the curves. A run whose file is there is not repeated. A seed decides the first weights, which
samples are held out, and the order; the modes of a seed share the first two.
"""

import itertools
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import torch
from learning_data import SEQ_LENGTH, prepare
from learning_report import draw, render_answers, render_runs

from launch.config import LaunchConfig
from launch.loop.loss import shift_labels
from launch.loop.metrics.log import read_metrics
from launch.loop.parallel import initialize_parallel, shutdown_parallel
from launch.loop.setup import build_trainer
from offline_packing.runs.manifest import require_manifest
from offline_packing.storage.files import to_json, write_atomically
from task_encoders.energon_samples import PackedBatch
from task_encoders.families import model_options
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.model_inputs import to_packed_seq_params
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.packs.tokenized import IGNORE_INDEX
from task_encoders.settings import PackingSettings

PACKS_PER_STEP: Final = 2
#: samples of a padded row
PADDED_BATCH: Final = 4


@dataclass(frozen=True)
class Mode:
    """A way to make steps of the samples."""

    form: str
    #: rows per step
    rows: int


def _modes(packed: Path) -> dict[str, Mode]:
    """The modes by name. Padded rows are about two fifths full."""
    train = [shard for shard in require_manifest(packed).shards if shard.split == "train"]
    per_pack = sum(shard.samples for shard in train) / sum(shard.packs for shard in train)
    padded = round(PACKS_PER_STEP * per_pack / PADDED_BATCH)
    return {
        "packed": Mode("packed", PACKS_PER_STEP),
        "padded, equal samples": Mode("alone", PADDED_BATCH * padded),
        "padded, equal tokens": Mode("alone", PADDED_BATCH * max(1, round(0.4 * padded))),
        "packed at random": Mode("random", PACKS_PER_STEP),
        "packed, as many rows": Mode("packed", PADDED_BATCH * padded),
    }


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--samples", default=1000, show_default=True, help="Of the demo, captions included.")
@click.option("--seeds", default=3, show_default=True)
@click.option("--epochs", default=6, show_default=True)
@click.option("--rate", default=4e-3, show_default=True, help="Highest learning rate.")
@click.option(
    "--normalization",
    type=click.Choice(["token", "sample"]),
    multiple=True,
    default=["token", "sample"],
    show_default=True,
)
@click.option("--picture", type=click.Path(path_type=Path), help="Default: in FOLDER.")
def main(
    folder: Path,
    samples: int,
    seeds: int,
    epochs: int,
    rate: float,
    normalization: tuple[str, ...],
    picture: Path | None,
) -> None:
    """Train all runs that FOLDER lacks, then print and draw all."""
    os.environ |= {"OFFLINE_PACKED_DATA": "1", "OFFLINE_PACKING_BMR": "1"}
    prepare(folder, samples, seeds)
    results = folder / f"results_{epochs}_epochs_{rate:g}"
    results.mkdir(exist_ok=True)
    of_seeds = [_modes(folder / f"packed{seed}") for seed in range(seeds)]
    for kind, name, seed in itertools.product(normalization, of_seeds[0], range(seeds)):
        path = results / f"{seed}_{kind}_{name.replace(', ', '_').replace(' ', '_')}.json"
        if not path.exists():
            found = _run(folder, name, of_seeds[seed][name], seed, kind, epochs, rate)
            write_atomically(path, to_json(found))
            click.echo(f"{path.name}: {found['cpu_seconds']:.0f} CPU seconds")
    runs = [json.loads(path.read_bytes()) for path in sorted(results.iterdir())]
    click.echo(f"{render_runs(runs)}\n{render_answers(runs)}")
    draw(runs, picture or folder / "learning.png")


def _run(
    folder: Path, name: str, mode: Mode, seed: int, normalization: str, epochs: int, rate: float
) -> dict[str, Any]:
    """Train one run in this process. Returns its figures."""
    output = folder / f"run_{normalization}"
    shutil.rmtree(output, ignore_errors=True)
    packed, alone = folder / f"packed{seed}", mode.form == "alone"
    config = LaunchConfig.model_validate(
        {
            "model": {"checkpoint": str(folder / f"weights{seed}")},
            "data": {
                "path": str(folder / f"{mode.form}{seed}"),
                "num_workers": 0,
                "micro_batch_size": PADDED_BATCH if alone else 1,
                "task_encoder": "training_loaders:PaddingEncoder" if alone else None,
            },
            "batch": {"global_batch_packs": mode.rows},
            "train": {"epochs": epochs, "normalization": normalization, "seed": seed},
            "schedule": {"learning_rate": rate, "warmup": 0.1},
            "checkpoint": {"every": 0, "export": False},
            "validation": {"every": _validation_steps(folder, mode, seed)},
            "output": {"path": str(output)},
        }
    )
    trainer, model = build_trainer(config, initialize_parallel(1, seed=seed))
    positions = [0]

    def count(_module: Any, _args: Any, given: dict[str, Any]) -> None:
        positions[0] += given["tokens"].shape[1] * model.training

    model.register_forward_pre_hook(count, with_kwargs=True)
    seconds = os.times().user
    if not trainer.run():
        raise click.Abort  # stopped by a signal
    found = {
        "mode": name,
        "seed": seed,
        "normalization": normalization,
        "rows_per_step": mode.rows,
        "positions": positions[0],
        "cpu_seconds": os.times().user - seconds,
        "steps": read_metrics(output / "metrics.jsonl"),
        "answers": list(_answers(model, packed)),
    }
    shutdown_parallel()
    return found


def _validation_steps(folder: Path, mode: Mode, seed: int) -> int:
    """Steps between validations: two to an epoch."""
    shards = require_manifest(folder / f"{mode.form}{seed}").shards
    return max(1, sum(s.packs for s in shards if s.split == "train") // mode.rows // 2)


@torch.no_grad()
def _answers(model: Any, packed: Path) -> Iterator[dict[str, Any]]:
    """Labels of every held-out answer, and their summed loss."""
    model.eval()
    settings = PackingSettings(packed=True, bmr=True)
    options = model_options(**require_manifest(packed).config["model"])
    encoder = PackedTaskEncoder(seq_length=SEQ_LENGTH, model=options, settings=settings)
    folder = PackedFolder(packed, encoder, split="val")
    for number in range(len(folder)):
        row = folder.batch([number])
        losses = _token_losses(model, row)
        bounds = row.cu_lengths[0].tolist()
        for key, (start, end) in zip(row.sub_sample_keys, itertools.pairwise(bounds), strict=True):
            labelled = row.labels[0, start + 1 : end] != IGNORE_INDEX
            edges = torch.nn.functional.pad(labelled.int(), (1, 1)).diff().nonzero().flatten()
            for first, last in edges.view(-1, 2).tolist():
                own = losses[start + first : start + last]
                yield {"sample": key, "labels": last - first, "loss": float(own.sum())}


def _token_losses(model: Any, row: PackedBatch) -> torch.Tensor:
    """(S,) loss of the token after each position."""
    losses: torch.Tensor = model(
        tokens=row.tokens,
        position_ids=row.position_ids,
        packed_seq_params=to_packed_seq_params(row),
        imgs=row.imgs,
        image_grid_thw=row.image_grid_thw,
        labels=shift_labels(row.labels),
        pixel_values_videos=row.pixel_values_videos,
        video_grid_thw=row.video_grid_thw,
    )
    return losses[0]


if __name__ == "__main__":
    main()
