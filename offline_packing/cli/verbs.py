"""The verbs: they print the results of the stages. A verb imports its stage when it runs.

A verb's docstring is its help text; with `dry_run` it says what it would do.
"""

from __future__ import annotations

import contextlib
import io
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from offline_packing.cli.verb import FILE, Verb, echo, verb
from offline_packing.errors import ConfigError, StageError
from task_encoders.samples import REASONS
from task_encoders.storage.remote_requests import RemoteError

if TYPE_CHECKING:
    from offline_packing.runs.run import Run

logger = logging.getLogger(__name__)

_deep = click.option(
    "--deep",
    is_flag=True,
    help="Also compare what was written with the source, and encode every sample again.",
)
_seed = click.option(
    "--seed", type=click.IntRange(min=0), default=0, help="Decides which packs are drawn."
)


@verb("measure", is_shared=True)
def measure_verb(run: Run, dry_run: bool, warns: bool = True) -> None:
    """Measure the tokens of every sample; no image or video is decoded."""
    from offline_packing.index.set_aside import group_set_aside
    from offline_packing.measure.measure import measure, preview_measure
    from offline_packing.runs.set_aside import aside_while_measuring, render_examples

    if dry_run:
        echo(preview_measure(run), nl=False)
        return
    info = measure(run).info
    for line in info.warnings if warns else ():
        logger.warning("measure: warning: %s", line)
    echo(f"measured {info.num_samples:,} samples, {info.num_tokens:,} tokens")
    if info.split:
        echo(info.splitting)
    if info.num_skipped:
        echo(f"left out {info.num_skipped:,} samples already in source.skip")
    if info.num_set_aside:
        echo(f"set aside {info.num_set_aside:,}, for example:")
        groups = group_set_aside(aside_while_measuring(run.workspace, info))
        echo(render_examples(run.config, groups), nl=False)


class _PlanVerb(Verb):
    """Verb whose help lists the strategies' options."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from offline_packing.planner.strategies import describe_options

        with formatter.section("Options of pack.strategy, under pack.strategy_options"):
            lines = [
                (f"{strategy}: {name}", f"{meaning}{f'  [default: {default}]' if default else ''}")
                for strategy, name, default, meaning in describe_options()
            ]
            formatter.write_dl(lines)


@verb("plan", cls=_PlanVerb)
@click.option(
    "--output",
    type=FILE,
    help="Write the packs' samples in order to this Parquet file, and how often the runs of "
    "source.skip trained each so far.",
)
def plan_verb(run: Run, dry_run: bool, output: Path | None = None, again: bool = True) -> None:
    """Decide which samples form which pack, and print the figures."""
    from offline_packing.index.set_aside import group_set_aside
    from offline_packing.plan.plan import plan, preview_plan, summary_text, write_assignment
    from offline_packing.runs.artifacts import open_index
    from offline_packing.runs.set_aside import aside_while_planning, render_examples

    samples = open_index(run)
    if dry_run:
        echo(preview_plan(run, samples), nl=False)
        return
    known = None if again else run.workspace.read_plan()
    made = plan(run, samples)
    if made.receipt == known:
        return
    if output is not None:
        columns = samples.table("key", "source_id", "num_tokens")
        if run.trained:
            from offline_packing.plan.trained import count_trained
            from offline_packing.runs.training_run import read_trained

            now = {path: read_trained(path) for path in run.trained}
            counts = count_trained(run.config, samples, now)
            columns = columns.add_column(2, "trained", [counts])
        write_assignment(columns, made.packs, output)
    echo(summary_text(run, samples, made.packs, made.set_aside), nl=False)
    groups = group_set_aside(aside_while_planning(run.workspace))
    if groups:
        echo("set aside by the plan, for example:")
        echo(render_examples(run.config, groups), nl=False)


@verb("write", is_shared=True)
def write_verb(run: Run, dry_run: bool) -> None:
    """Write the packs as tar shards, with the metadata that Megatron-Energon needs."""
    from offline_packing.runs.artifacts import open_index, open_plan
    from offline_packing.runs.set_aside import check_set_aside
    from offline_packing.write.write import preview_write, write

    samples, made = open_index(run), open_plan(run)
    if dry_run:
        echo(preview_write(run, samples, made))
        return
    if not run.workspace.manifest.exists():
        check_set_aside(run)
    counts = write(run, samples, made).counts
    packs = ", ".join(f"{name} {count:,}" for name, count in counts.packs.items())
    echo(f"wrote {counts.packed:,} samples to {run.workspace.root}; packs: {packs}")


@verb("verify", is_shared=True, needs_output=True)
@_deep
@click.option(
    "--discard",
    is_flag=True,
    help="Move files that are damaged to _packing/damaged; run makes them again.",
)
@click.option(
    "--hash-only",
    is_flag=True,
    help="Compare the bytes of all files with their hashes, and open no pack.",
)
@click.option(
    "--samples",
    type=click.FloatRange(min=0, min_open=True),
    help="Check packs drawn at random, and not the others: so many samples; below 1, a share.",
)
@_seed
def verify_verb(
    run: Run,
    dry_run: bool,
    deep: bool = False,
    discard: bool = False,
    hash_only: bool = False,
    samples: float | None = None,
    seed: int = 0,
    again: bool = True,
) -> None:
    """Re-read everything that was written, and check it."""
    from offline_packing.verify import verify as verifying
    from offline_packing.verify.verdict import check, known_verdict

    if not again and (known := known_verdict(run, deep=deep)):
        echo(known)
        return
    if discard:
        if run.engine.IS_SHARED or deep or hash_only or samples:
            raise ConfigError(
                "verify --discard works alone, without other ranks; leave out --deep, --hash-only "
                "and --samples, and set engine.name=local"
            )
        echo(verifying.discard(run, dry_run=dry_run))
        return
    if dry_run:
        echo(verifying.preview_verify(run))
        return
    if hash_only and (deep or samples):
        raise ConfigError("verify --hash-only opens no pack; leave out --deep and --samples")
    drawn = None if samples is None else verifying.Drawn(samples, seed)
    result = check(run, deep=deep, hash_only=hash_only, drawn=drawn)
    text = verifying.render_result(result, deep=deep, hash_only=hash_only, drawn=drawn)
    echo(text, nl=False)
    if not result.ok:
        raise StageError(f"{run.workspace.root} has {verifying.render_verdict(result)}")


@verb("report", needs_output=True)
def report_verb(run: Run, dry_run: bool, again: bool = True) -> None:
    """Write a page and a JSON file with the figures of the stages completed so far."""
    from offline_packing.report.report import report

    page = run.workspace.report / "report.html"
    if dry_run:
        echo(f"would write {page}")
        return
    echo(report(run, again=again))
    echo(f"report: {page}")


@verb("preview", locks=False, is_shared=True)
@click.option(
    "--packs",
    "num_packs",
    type=click.IntRange(min=1),
    default=3,
    help="How many packs to draw at random.",
)
@click.option(
    "--pack", "packs", multiple=True, metavar="KEY", help="Show this pack, by key or number."
)
@_seed
@click.option("--full", is_flag=True, help="Show long texts in full.")
@click.option(
    "--html",
    type=FILE,
    help="Write one page, with images and first frames of videos, instead of text.",
)
def preview_verb(run: Run, full: bool, html: Path | None, **which: Any) -> None:
    """Show some packs as they are trained: text, what carries loss, images and videos."""
    from offline_packing.report.pages import render_packs
    from offline_packing.report.preview import preview
    from offline_packing.report.preview_text import render_pack
    from offline_packing.storage.files import write_atomically

    shown = preview(run, **which)
    if html is None:
        for one in shown:
            click.echo(render_pack(one, full=full))
        return
    content = render_packs(list(shown), run.config.task)
    html.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(html, content)
    echo(f"preview: {html}")


@verb("run")
@_deep
def run_verb(run: Run, dry_run: bool, deep: bool = False) -> None:
    """Do measure, plan, write, verify and report; skip what is complete."""
    from offline_packing.measure.measure import estimate_run
    from offline_packing.storage.receipts import receipt_path
    from offline_packing.verify.verify import check_deep

    if deep:
        check_deep(run.config)
    manifest = run.workspace.manifest
    steps: tuple[tuple[Verb, Path | None, dict[str, bool]], ...] = (
        (measure_verb, None, {"warns": False}),  # the plan's summary has them
        (plan_verb, receipt_path(run.workspace.packing, "measure"), {"again": False}),
        (write_verb, receipt_path(run.workspace.packing, "plan"), {}),
        (verify_verb, manifest, {"deep": deep, "again": False}),
        (report_verb, manifest, {"again": False}),
    )
    for step, needed, options in steps:
        if dry_run and needed is not None and not needed.exists():
            if step is plan_verb:
                echo(estimate_run(run))
            echo(f"the later stages depend on {needed}, which does not exist yet")
            return
        # Under --quiet only the last step, and one that fails, print anything.
        silent = not (run.progress or dry_run or step is report_verb)
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said) if silent else contextlib.nullcontext():
                step.function(run, dry_run, **options)
        except (RemoteError, StageError):
            click.echo(said.getvalue(), nl=False)
            raise


@verb("set-aside", locks=False, is_shared=True)
@click.option(
    "--reason", "reasons", multiple=True, type=click.Choice(tuple(REASONS)), help="List these only."
)
@click.option("--csv", "as_csv", is_flag=True, help="Comma-separated values, with a header.")
def set_aside_verb(run: Run, **form: Any) -> None:
    """List the samples that are in no pack: key, source, reason and detail."""
    from offline_packing.runs.set_aside import list_set_aside

    for lines in list_set_aside(run, **form):
        echo(lines, nl=False)


@verb("status", locks=False, is_shared=True)
def status_verb(run: Run) -> None:
    """Show the progress of an output, also while a run is active."""
    from offline_packing.upkeep.status import status

    echo(status(run), nl=False)
