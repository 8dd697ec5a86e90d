"""The command line: `offline-packing VERB CONFIG.yaml [key.sub=value ...]`.

Exit status: 0 done, 1 a stage or a check failed, 2 the command or the configuration is wrong.
A verb imports what it needs when it runs.
"""

import contextlib
import functools
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from offline_packing.config import load_config
from offline_packing.errors import ConfigError, ShareDoneError, StageError
from offline_packing.stage import Stage, build_engine, listed
from task_encoders.samples import TASKS

logger = logging.getLogger(__name__)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="offline-packing")
def cli() -> None:
    """Pack a vision-language dataset into full training sequences, before training.

    CONFIG is a YAML file; its fields can be set on the command line: pack.seq_length=8192
    """


def measure_verb(stage: Stage, dry_run: bool) -> None:
    """Measure every sample: source -> index."""
    from offline_packing.measure import measure, preview_measure

    if dry_run:
        click.echo(preview_measure(stage), nl=False)
        return
    info = measure(stage)
    click.echo(f"measured {info.num_samples:,} samples, {info.num_tokens:,} tokens")
    if info.num_set_aside:
        reasons = listed(info.set_aside.items())
        click.echo(f"set aside: {reasons}; details in {stage.workspace.set_aside}")


def plan_verb(stage: Stage, dry_run: bool) -> None:
    """Decide which samples form which pack: index -> plan."""
    from offline_packing.plan_stage import plan, preview_plan

    click.echo(preview_plan(stage) if dry_run else plan(stage), nl=False)


def write_verb(stage: Stage, dry_run: bool) -> None:
    """Write the packed dataset: plan -> shards, Energon metadata, manifest."""
    from offline_packing.write import preview_write, write

    if dry_run:
        click.echo(preview_write(stage))
        return
    counts = write(stage)["counts"]
    packs = ", ".join(f"{name} {count:,}" for name, count in counts["packs"].items())
    click.echo(f"wrote {counts['packed']:,} samples to {stage.workspace.root}; packs: {packs}")


def verify_verb(stage: Stage, dry_run: bool, deep: bool = False) -> None:
    """Re-read everything that was written; --deep: compare it with the source, encode it again."""
    from offline_packing.verify import preview_verify, render_result, render_verdict, verify

    if dry_run:
        click.echo(preview_verify(stage))
        return
    result = verify(stage, deep=deep)
    click.echo(render_result(result, deep=deep), nl=False)
    if not result.ok:
        raise StageError(f"{stage.workspace.root} has {render_verdict(result)}")


def report_verb(stage: Stage, dry_run: bool) -> None:
    """Write a page and a JSON file with all figures of what is complete: samples, packs, shards."""
    from offline_packing.report.report import report

    page = stage.workspace.report / "report.html"
    if dry_run:
        click.echo(f"would write {page}")
        return
    click.echo(report(stage))
    click.echo(f"report: {page}")


def preview_verb(
    stage: Stage,
    dry_run: bool,
    packs: int,
    pack: tuple[str, ...],
    seed: int,
    full: bool,
    html: Path | None,
) -> None:
    """Show some packs as they are trained: sub-samples, tokens and labels as text, images."""
    from offline_packing.files import write_atomically
    from offline_packing.report.preview import preview
    from offline_packing.report.preview_page import render_packs
    from offline_packing.report.preview_text import render_pack

    shown = preview(stage, num_packs=packs, packs=pack, seed=seed)
    if html is None:
        for one in shown:
            click.echo(render_pack(one, full=full))
        return
    content = render_packs(list(shown), stage.config.task)
    if dry_run:
        click.echo(f"would write {len(content):,} bytes to {html}")
        return
    html.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(html, content)
    click.echo(f"preview: {html}")


def run_verb(stage: Stage, dry_run: bool, deep: bool = False) -> None:
    """measure, plan, write, verify and report; what is complete is not done again."""
    verify = functools.partial(verify_verb, deep=deep)
    verbs: tuple[Callable[[Stage, bool], None], ...]
    verbs = (measure_verb, plan_verb, write_verb, verify, report_verb)
    manifest = stage.workspace.manifest
    needed = (stage.workspace.index_info, stage.workspace.plan_info, manifest, manifest)
    for verb, artifact in zip(verbs, (None, *needed), strict=True):
        if dry_run and artifact is not None and not artifact.exists():
            click.echo(f"what follows depends on {artifact}, which is not there yet")
            return
        verb(stage, dry_run)


def append_verb(stage: Stage, dry_run: bool) -> None:
    """Pack further data into further shards of a complete output; the old ones stay."""
    from offline_packing.append import append, preview_append
    from offline_packing.manifest import read_manifest

    if dry_run:
        click.echo(preview_append(stage), nl=False)
        return
    before = read_manifest(stage)
    manifest = append(stage)
    counts = manifest["counts"]
    num_packs = sum(counts["packs"].values())
    click.echo(
        f"{'no new samples: ' if manifest == before else ''}{stage.workspace.root} holds "
        f"{counts['packed']:,} samples in {num_packs:,} packs, {len(manifest['shards']):,} shards"
    )


def retry_verb(stage: Stage, dry_run: bool) -> None:
    """Go on where a run ended; write what is missing or damaged of a complete output again."""
    from offline_packing.retry import retry

    if dry_run:
        status_verb(stage, dry_run)
        return
    click.echo(retry(stage))


def status_verb(stage: Stage, dry_run: bool) -> None:
    """Show how far an output is; also while a run is at work on it."""
    from offline_packing.status import status

    click.echo(status(stage), nl=False)


def _output_options(function: Callable[..., Any]) -> Callable[..., Any]:
    quiet = click.option("--quiet", is_flag=True, help="Show warnings, errors and results only.")
    debug = click.option(
        "--debug", is_flag=True, expose_value=False, help="Show the traceback of an error."
    )
    return quiet(debug(function))


_deep_option = click.option(
    "--deep", is_flag=True, help="Verify against the source, and encode every sample again."
)


def _preview_options(function: Callable[..., Any]) -> Callable[..., Any]:
    options = (
        click.option(
            "--packs",
            type=click.IntRange(min=1),
            default=3,
            show_default=True,
            help="How many packs to draw.",
        ),
        click.option("--pack", multiple=True, metavar="KEY", help="A pack by key or number."),
        click.option("--seed", default=0, show_default=True, help="Decides what is drawn."),
        click.option("--full", is_flag=True, help="Show long texts in full."),
        click.option(
            "--html",
            type=click.Path(dir_okay=False, path_type=Path),
            help="Write one page, with the images, instead of text.",
        ),
    )
    return functools.reduce(
        lambda decorated, option: option(decorated), reversed(options), function
    )


_OPTIONS: dict[Callable[..., None], Callable[..., Any]] = {
    verify_verb: _deep_option,
    run_verb: _deep_option,
    preview_verb: _preview_options,
}


def _add_stage_command(name: str, verb: Callable[..., None]) -> None:
    @cli.command(name, help=verb.__doc__)
    @click.argument("config", type=click.Path(dir_okay=False))
    @click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE]...")
    @click.option("--dry-run", is_flag=True, help="Say what would be done; write nothing.")
    @click.option(
        "--accept-mismatch",
        multiple=True,
        metavar="FIELD",
        help="Use an index although this field of its fingerprint differs, or "
        "modification_time: files although they were copied without their times.",
    )
    @_OPTIONS.get(verb, lambda function: function)
    @_output_options
    def command(
        config: str,
        overrides: tuple[str, ...],
        dry_run: bool,
        accept_mismatch: tuple[str, ...],
        quiet: bool,
        **verb_options: Any,
    ) -> None:
        _start_logging(quiet)
        parsed = load_config(config, overrides)
        with build_engine(parsed) as engine:
            if engine.IS_SHARED and verb not in _SHARED_VERBS:
                raise ConfigError(
                    f"engine.name={parsed.engine.name} shares measure, write and verify among "
                    f"ranks; run {name} with engine.name=local"
                )
            stage = Stage(
                parsed,
                engine,
                accept_mismatch=frozenset(accept_mismatch),
                progress=not quiet and sys.stderr.isatty(),
            )
            reads_only = dry_run or verb in (status_verb, preview_verb)
            # These fail where nothing was made yet, and leave nothing behind.
            needs_none = verb in _NEED_OUTPUT and not stage.workspace.packing.exists()
            lock = stage.workspace.lock(shared=engine.IS_SHARED)
            with contextlib.nullcontext() if reads_only or needs_none else lock:
                verb(stage, dry_run, **verb_options)


#: What makes nothing of its own where there is no output.
_NEED_OUTPUT = (verify_verb, append_verb, report_verb)
#: What several ranks can do to one output at the same time.
_SHARED_VERBS = (measure_verb, write_verb, verify_verb, status_verb, preview_verb)

for _verb in (
    measure_verb,
    plan_verb,
    write_verb,
    verify_verb,
    report_verb,
    preview_verb,
    run_verb,
    append_verb,
    status_verb,
    retry_verb,
):
    _add_stage_command(_verb.__name__.removesuffix("_verb"), _verb)


@cli.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--task", type=click.Choice(TASKS), help="For packs that do not name their task.")
@_output_options
def index(folder: Path, task: str | None, quiet: bool) -> None:
    """Give a FOLDER of pack tars, written by others, the metadata that Energon needs."""
    from offline_packing.energon_metadata import index_pack_folder

    _start_logging(quiet)
    click.echo(f"indexed {index_pack_folder(folder, task):,} packs in {folder}")


@cli.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path), default="demo_output")
@click.option("--num-samples", default=2000, show_default=True, help="Samples to draw.")
@click.option("--seed", default=0, show_default=True, help="Decides everything that is drawn.")
@_output_options
def demo(folder: Path, num_samples: int, seed: int, quiet: bool) -> None:
    """Draw a dataset into FOLDER, pack it, and train a tiny model on the packs."""
    from offline_packing.demo.run import main as run_demo

    _start_logging(quiet)
    run_demo(folder, num_samples=num_samples, seed=seed)


def _start_logging(quiet: bool) -> None:
    level = logging.WARNING if quiet else logging.INFO
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)


def main() -> None:
    """Entry point: an error is one line on stderr."""
    try:
        cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted; run again to go on", err=True)
        sys.exit(130)
    except ShareDoneError as done:
        click.echo(str(done), err=True)
    except Exception as error:
        if "--debug" in sys.argv[1:]:
            raise
        known = isinstance(error, StageError | OSError)
        text = str(error) if known else f"{type(error).__name__}: {error} (--debug shows where)"
        click.echo(f"error: {' '.join(text.split())}", err=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


if __name__ == "__main__":
    main()
