"""The command line: `offline-packing VERB CONFIG.yaml [key.sub=value ...]`.

Exit status: 0 done, 1 a stage or a check failed, 2 the command or the configuration is wrong,
128 and the signal's number where a signal ended it. What the verbs do is in verbs.py.
"""

import contextlib
import functools
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from offline_packing.cli import verbs
from offline_packing.cli.signals import EndedBySignal, signals_raise
from offline_packing.config.packing import load_config
from offline_packing.errors import ConfigError, ShareDoneError, StageError
from offline_packing.runs.run import Run, build_engine
from task_encoders.samples import REASONS, TASKS


class _InOrder(click.Group):
    """Help lists the verbs in the order of work, each with its whole first sentence."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        whole = [(name, command.get_short_help_str(500)) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(whole)


_SETTINGS: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(cls=_InOrder, context_settings=_SETTINGS)
@click.version_option(package_name="offline-packing")
def cli() -> None:
    """Pack a vision-language dataset into full training sequences, before training.

    Most verbs are called as VERB CONFIG [KEY.SUB=VALUE]..., where CONFIG is a YAML file and its
    fields can be set behind it: offline-packing run pack.yaml pack.seq_length=8192
    """


def _output_options(function: Callable[..., Any]) -> Callable[..., Any]:
    quiet = click.option("--quiet", is_flag=True, help="Show warnings, errors and results only.")
    debug = click.option(
        "--debug", is_flag=True, expose_value=False, help="Show the traceback of an error."
    )
    return quiet(debug(function))


_deep_option = click.option(
    "--deep",
    is_flag=True,
    help="Also compare what was written with the source, and encode every sample again.",
)


def _preview_options(function: Callable[..., Any]) -> Callable[..., Any]:
    options = (
        click.option(
            "--packs",
            type=click.IntRange(min=1),
            default=3,
            show_default=True,
            help="How many packs to draw at random.",
        ),
        click.option(
            "--pack", multiple=True, metavar="KEY", help="Show this pack, by key or number."
        ),
        click.option(
            "--seed",
            type=click.IntRange(min=0),
            default=0,
            show_default=True,
            help="Decides which packs are drawn.",
        ),
        click.option("--full", is_flag=True, help="Show long texts in full."),
        click.option(
            "--html",
            type=click.Path(dir_okay=False, path_type=Path),
            help="Write one page, with images and first frames of videos, instead of text.",
        ),
    )
    return functools.reduce(
        lambda decorated, option: option(decorated), reversed(options), function
    )


def _set_aside_options(function: Callable[..., Any]) -> Callable[..., Any]:
    csv = click.option("--csv", is_flag=True, help="Comma-separated values, with a header.")
    reason = click.option(
        "--reason", multiple=True, type=click.Choice(tuple(REASONS)), help="List these only."
    )
    return csv(reason(function))


_OPTIONS: dict[verbs.Verb, Callable[..., Any]] = {
    verbs.verify_verb: _deep_option,
    verbs.run_verb: _deep_option,
    verbs.preview_verb: _preview_options,
    verbs.set_aside_verb: _set_aside_options,
}


def _add_stage_command(name: str, verb: verbs.Verb) -> None:
    @cli.command(name, help=verb.__doc__)
    @click.argument("config")
    @click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE]...")
    @click.option("--dry-run", is_flag=True, help="Say what would be done; write nothing.")
    @click.option(
        "--accept-mismatch",
        multiple=True,
        metavar="FIELD",
        help="Use what was measured although this field, as an error message named it, differs "
        "now; or modification_time: although files were copied without their times.",
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
            if engine.IS_SHARED and verb not in verbs.SHARED_VERBS:
                raise ConfigError(
                    f"engine.name={parsed.engine.name} shares measure, write and verify among "
                    f"ranks; run {name} with engine.name=local"
                )
            run = Run(
                parsed,
                engine,
                accept_mismatch=frozenset(accept_mismatch),
                progress=not quiet and sys.stderr.isatty(),
            )
            reads_only = dry_run or verb in verbs.READING_VERBS
            # These fail where nothing was made yet, and leave nothing behind.
            needs_none = verb in verbs.NEED_OUTPUT and not run.workspace.packing.exists()
            lock = run.workspace.lock(shared=engine.IS_SHARED)
            with contextlib.nullcontext() if reads_only or needs_none else lock:
                verb(run, dry_run, **verb_options)


for _verb in verbs.VERBS:
    _add_stage_command(_verb.__name__.removesuffix("_verb").replace("_", "-"), _verb)


@cli.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--task", type=click.Choice(TASKS), help="What packs that do not say so are trained as."
)
@_output_options
def index(folder: Path, task: str | None, quiet: bool) -> None:
    """Give a FOLDER of packs (*.tar), written by others, the metadata that Energon needs."""
    from offline_packing.layouts.energon_metadata import index_pack_folder

    _start_logging(quiet)
    click.echo(f"indexed {index_pack_folder(folder, task):,} packs in {folder}")


@cli.command()
@click.argument(
    "folders", nargs=-1, required=True, type=click.Path(file_okay=False, path_type=Path)
)
@_output_options
def blend(folders: tuple[Path, ...], quiet: bool) -> None:
    """Print the YAML with which Energon reads several outputs as one dataset."""
    from offline_packing.upkeep import blend as blending

    _start_logging(quiet)
    click.echo(blending.blend(folders), nl=False)


@cli.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path), default="demo_output")
@click.option("--num-samples", default=2000, show_default=True, help="How many samples to draw.")
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
        with signals_raise():
            cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except EndedBySignal as ended:
        click.echo(f"{ended}; the same command goes on where it stopped", err=True)
        sys.exit(128 + ended.number)
    except ShareDoneError as done:
        click.echo(str(done), err=True)
    except BrokenPipeError:  # `| head` has seen enough; nothing is left to be flushed into it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except Exception as error:
        if "--debug" in sys.argv[1:]:
            raise
        known = isinstance(error, StageError | OSError)
        cause = error.__cause__ if isinstance(error, click.Abort) else error  # of an EOFError
        text = str(error) if known else f"{type(cause).__name__}: {cause} (--debug shows where)"
        click.echo(f"error: {' '.join(text.split())}", err=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


if __name__ == "__main__":
    main()
