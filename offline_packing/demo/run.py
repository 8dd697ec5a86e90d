"""The demo: draw a dataset, pack it for the three tasks, verify, train, print one table.

FOLDER/data/                        the drawn dataset in its pre-packing forms, truth.json
FOLDER/{captioning,vqa,bmr}.yaml    configurations, to be run again with `offline-packing run`
FOLDER/{captioning,vqa,bmr}/        packed datasets, with _packing/report/report.html
FOLDER/table.txt
"""

import itertools
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click
import yaml

from offline_packing.config.packing import PackingConfig, load_config
from offline_packing.demo.generate import generate_demo_dataset
from offline_packing.errors import StageError
from offline_packing.layouts.energon_metadata import check_energon
from offline_packing.measure.measure import measure
from offline_packing.plan.plan import plan
from offline_packing.report.report import report
from offline_packing.runs.run import Run, build_engine, listed
from offline_packing.storage.files import read_json
from offline_packing.verify.verify import verify
from offline_packing.write.write import write
from task_encoders.families import model_options
from task_encoders.settings import PackingSettings
from task_encoders.versions import require_supported

if TYPE_CHECKING:
    from offline_packing.demo.training import LossDifference

SEQ_LENGTH: Final = 2048
MODEL: Final[Mapping[str, Any]] = {"max_pixels": 32 * model_options().model_dump()["min_pixels"]}
TRAIN_STEPS: Final = 8
COMPARED_PACKS: Final = 2
#: packs or samples of a step, in the table
BATCH: Final = 8

#: Source folders of each task. The multi-turn data come in two forms, packed together.
SOURCES: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    "captioning": (("pairs", "captioning"),),
    "vqa": (("pairs", "vqa"),),
    "bmr": (("pairs", "bmr"), ("jsonl", "bmr_jsonl/dialogues.jsonl")),
}

#: Limits of the demo; a figure outside them fails it.
MAX_PACKED_DIFFERENCE: Final = 1e-4
MIN_CONTROL_DIFFERENCE: Final = 1e-1


def main(folder: Path, *, num_samples: int, seed: int) -> None:
    """Run the demo in `folder`; completed stages are not repeated. Raises StageError if a stage
    failed, or a figure misses its target."""
    require_supported("megatron-energon", "transformers")
    check_energon()
    progress = sys.stderr.isatty()
    generate_demo_dataset(folder / "data", seed=seed, num_samples=num_samples, progress=progress)
    results = {task: _run_task(folder, task, seed, progress) for task in SOURCES}
    table = _render_table(results)
    (folder / "table.txt").write_text(table)
    click.echo(f"\n{table}\nThe pictures, packs and configurations are in {folder}; reports:")
    for task in SOURCES:
        click.echo(f"  {folder / task}/_packing/report/report.html")
    failures = [f"{task}: {one}" for task, result in results.items() for one in result.failures]
    if failures:
        raise StageError("; ".join(failures))


class _Result(NamedTuple):
    """A task's column of the table."""

    #: name and figure of each line
    figures: Mapping[str, str]
    #: reasons with their counts
    set_aside: str
    #: promises of the demo that were not kept
    failures: Sequence[str]


def _run_task(folder: Path, task: str, seed: int, progress: bool) -> _Result:
    """Pack the data of a task, verify the packs, and train on them."""
    config = _write_config(folder, task, seed)
    click.echo(f"== {task}: offline-packing run {folder / task}.yaml")
    with build_engine(config.engine) as engine:
        run = Run(config, engine, progress=progress)
        with run.workspace.lock():
            index = measure(run)
            write(run, index, plan(run, index))
            verified = verify(run, deep=True)
            report(run)
    difference, losses = _train(Path(config.output.path), task)
    found = read_json(run.workspace.report / "report.json")["figures"]
    samples, packs, saving = found["samples"], found["packs"], found["saving"]
    padded, *_, packed = saving["rows"]
    before, after = saving["iterations"]
    figures = {
        "samples": f"{samples['found']:,}",
        "set aside": f"{samples['set aside']:,}",
        "packed": f"{verified.num_samples:,}",
        "packs": f"{packs['packs']:,}",
        "lower bound of packs": f"{packs['lower bound']:,}",
        "fill": f"{packs['fill']:.2%}",
        "samples per pack (packing factor)": f"{packs['packing factor']:.2f}",
        f"padding, {padded['an epoch of']}": f"{padded['empty']:.1%}",
        "padding, packed": f"{packed['empty']:.2%}",
        f"iterations per epoch, {BATCH} samples a step": f"{before:,}",
        f"iterations per epoch, {BATCH} packs a step": f"{after:,}",
        "tokens, measured from headers and text": f"{packs['tokens']:,}",
        "tokens, encoded again by verify": f"{verified.num_tokens:,}",
        "samples lost, doubled, mismeasured, altered": f"{verified.num_problems:,}",
        "per-token loss, packed - unpacked": f"{difference.packed:.1e}",
        "... with the boundaries removed": f"{difference.without_boundaries:.1e}",
        "training loss, first step": f"{losses[0]:.3f}",
        f"training loss, step {TRAIN_STEPS}": f"{losses[-1]:.3f}",
    }
    bound, control = packs["lower bound"], difference.without_boundaries
    promises = {
        f"{verified.num_problems} problems found by verify": verified.ok,
        f"{packs['packs']} packs > lower bound {bound} + 1": packs["packs"] <= bound + 1,
        f"packed and unpacked loss differ by {difference.packed:.1e}": (
            difference.packed <= MAX_PACKED_DIFFERENCE
        ),
        f"without boundaries the loss moves by only {control:.1e}": (
            control >= MIN_CONTROL_DIFFERENCE
        ),
        f"training loss went from {losses[0]:.2f} to {losses[-1]:.2f}": losses[-1] < losses[0],
    }
    reasons = found.get("set aside", {}).items()
    aside = listed((reason, count) for reason, count in reasons if reason != "rows")
    return _Result(figures, aside, [what for what, kept in promises.items() if not kept])


def _write_config(folder: Path, task: str, seed: int) -> PackingConfig:
    """Write the configuration of a task as a user would, and load it."""
    source = [
        {"format": source_format, "path": str(folder / "data" / path), "task": task}
        for source_format, path in SOURCES[task]
    ]
    content: dict[str, Any] = {
        "source": source[0] if len(source) == 1 else source,
        "model": MODEL,
        "pack": {"seq_length": SEQ_LENGTH, "strategy": "auto", "seed": seed},
        "output": {
            "path": str(folder / task),
            "packs_per_shard": 50,
            "split": {"train": 0.95, "val": 0.05},
            "overwrite": True,
        },
        "report": {"global_batch_size": BATCH},
    }
    path = folder / f"{task}.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return load_config(path)


def _train(path: Path, task: str) -> tuple["LossDifference", list[float]]:
    """Compare packed with unpacked losses before training, then train a few steps; return both."""
    click.echo(f"   comparing packed with unpacked losses, then {TRAIN_STEPS} training steps")
    from megatron.energon import WorkerConfig, get_loader  # takes seconds to import, as torch does

    from offline_packing.demo import training
    from task_encoders.loading.packed_dataset import get_packed_train_dataset
    from task_encoders.loading.packed_folder import PackedFolder
    from task_encoders.packed_task_encoder import PackedTaskEncoder

    settings = PackingSettings(packed=True, vqa=task == "vqa", bmr=task == "bmr")
    task_encoder = PackedTaskEncoder(seq_length=SEQ_LENGTH, settings=settings, **MODEL)
    difference = training.compare_packed_with_unpacked(
        training.tiny_qwen2_vl(weight_std=0.08), PackedFolder(path, task_encoder), COMPARED_PACKS
    )
    worker_config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = get_packed_train_dataset(path, task_encoder, worker_config=worker_config)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*pin_memory.*")  # there need be no GPU
        batches = list(itertools.islice(get_loader(dataset), TRAIN_STEPS))
    return difference, training.train(training.tiny_qwen2_vl(), batches)


def _render_table(results: Mapping[str, _Result]) -> str:
    """Render one column per task and one line per figure."""
    columns = [result.figures for result in results.values()]
    rows = {"": list(results), **{name: [c[name] for c in columns] for name in columns[0]}}
    lines = [f"{name:<44}" + "".join(f"{c:>14}" for c in cells) for name, cells in rows.items()]
    lines += [f"set aside in {task}: {result.set_aside}" for task, result in results.items()]
    return "\n".join(lines) + "\n"
