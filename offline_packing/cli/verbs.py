"""The verbs: what each stage says on stdout. A verb imports what it needs when it runs.

A verb's docstring is its help text, and `dry_run` says what it would do.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Final

import click

from offline_packing.errors import StageError
from offline_packing.runs.run import Run

#: f(stage, dry_run, **its own options); prints its result, raises StageError where it fails.
Verb = Callable[..., None]


def measure_verb(run: Run, dry_run: bool) -> None:
    """Measure the tokens of every sample; no image or video is decoded."""
    from offline_packing.index.set_aside_table import group_set_aside
    from offline_packing.measure.measure import measure, preview_measure
    from offline_packing.runs.losses import aside_while_measuring, render_examples

    if dry_run:
        click.echo(preview_measure(run), nl=False)
        return
    info = measure(run)
    click.echo(f"measured {info.num_samples:,} samples, {info.num_tokens:,} tokens")
    if info.num_skipped:
        click.echo(f"left out {info.num_skipped:,} samples that source.skip holds")
    if info.num_set_aside:
        click.echo(f"set aside {info.num_set_aside:,}, for example:")
        groups = group_set_aside(aside_while_measuring(run.workspace, info))
        click.echo(render_examples(run.config, groups), nl=False)


def plan_verb(run: Run, dry_run: bool) -> None:
    """Decide which samples form which pack, and print the figures."""
    from offline_packing.index.set_aside_table import group_set_aside
    from offline_packing.plan.plan import plan, preview_plan
    from offline_packing.runs.losses import aside_while_planning, render_examples

    if dry_run:
        click.echo(preview_plan(run), nl=False)
        return
    click.echo(plan(run), nl=False)
    groups = group_set_aside(aside_while_planning(run.workspace))
    if groups:
        click.echo("set aside by the plan, for example:")
        click.echo(render_examples(run.config, groups), nl=False)


def write_verb(run: Run, dry_run: bool) -> None:
    """Write the packs as tar shards, with the metadata that Megatron-Energon needs."""
    from offline_packing.write.write import preview_write, write

    if dry_run:
        click.echo(preview_write(run))
        return
    counts = write(run)["counts"]
    packs = ", ".join(f"{name} {count:,}" for name, count in counts["packs"].items())
    click.echo(f"wrote {counts['packed']:,} samples to {run.workspace.root}; packs: {packs}")


def verify_verb(run: Run, dry_run: bool, deep: bool = False) -> None:
    """Read everything that was written again, and check it."""
    from offline_packing.verify.verify import preview_verify, render_result, render_verdict, verify

    if dry_run:
        click.echo(preview_verify(run))
        return
    result = verify(run, deep=deep)
    click.echo(render_result(result, deep=deep), nl=False)
    if not result.ok:
        raise StageError(f"{run.workspace.root} has {render_verdict(result)}")


def report_verb(run: Run, dry_run: bool) -> None:
    """Write a page and a JSON file with the figures of all that is done so far."""
    from offline_packing.report.report import report

    page = run.workspace.report / "report.html"
    if dry_run:
        click.echo(f"would write {page}")
        return
    click.echo(report(run))
    click.echo(f"report: {page}")


def preview_verb(
    run: Run,
    dry_run: bool,
    packs: int,
    pack: tuple[str, ...],
    seed: int,
    full: bool,
    html: Path | None,
) -> None:
    """Show some packs as they are trained: text, what carries loss, images and videos."""
    from offline_packing.report.preview import preview
    from offline_packing.report.preview_page import render_packs
    from offline_packing.report.preview_text import render_pack
    from offline_packing.storage.files import write_atomically

    shown = preview(run, num_packs=packs, packs=pack, seed=seed)
    if html is None:
        for one in shown:
            click.echo(render_pack(one, full=full))
        return
    content = render_packs(list(shown), run.config.task)
    if dry_run:
        click.echo(f"would write {len(content):,} bytes to {html}")
        return
    html.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(html, content)
    click.echo(f"preview: {html}")


def run_verb(run: Run, dry_run: bool, deep: bool = False) -> None:
    """Do measure, plan, write, verify and report; what is complete is not done again."""
    from offline_packing.runs.losses import check_losses

    verify = functools.partial(verify_verb, deep=deep)
    verbs: tuple[Verb, ...] = (measure_verb, plan_verb, write_verb, verify, report_verb)
    manifest = run.workspace.manifest
    needed = (run.workspace.index_info, run.workspace.plan_info, manifest, manifest)
    for verb, artifact in zip(verbs, (None, *needed), strict=True):
        if dry_run and artifact is not None and not artifact.exists():
            click.echo(f"what follows depends on {artifact}, which is not there yet")
            return
        if verb is write_verb and not dry_run and not manifest.exists():
            check_losses(run)
        verb(run, dry_run)


def retry_verb(run: Run, dry_run: bool) -> None:
    """Go on where a run ended; write what is missing or damaged of a complete output again."""
    from offline_packing.upkeep.retry import retry

    if dry_run:
        status_verb(run, dry_run)
        return
    click.echo(retry(run))


def set_aside_verb(run: Run, dry_run: bool, csv: bool, reason: tuple[str, ...]) -> None:
    """List the samples that are in no pack: key, source, reason and detail."""
    from offline_packing.upkeep.set_aside import list_set_aside

    for lines in list_set_aside(run, reasons=reason, as_csv=csv):
        click.echo(lines, nl=False)


def status_verb(run: Run, dry_run: bool) -> None:
    """Show how far an output is, also while a run is at work on it."""
    from offline_packing.upkeep.status import status

    click.echo(status(run), nl=False)


#: In the order in which help lists them.
VERBS: Final[tuple[Verb, ...]] = (
    measure_verb,
    plan_verb,
    write_verb,
    verify_verb,
    report_verb,
    preview_verb,
    run_verb,
    set_aside_verb,
    status_verb,
    retry_verb,
)

#: What several ranks can do to one output at the same time.
SHARED_VERBS: Final[tuple[Verb, ...]] = (
    measure_verb,
    write_verb,
    verify_verb,
    status_verb,
    preview_verb,
    set_aside_verb,
)

#: What writes nothing into the output, and needs no lock.
READING_VERBS: Final[tuple[Verb, ...]] = (status_verb, preview_verb, set_aside_verb)

#: What makes nothing of its own where there is no output.
NEED_OUTPUT: Final[tuple[Verb, ...]] = (verify_verb, report_verb)
