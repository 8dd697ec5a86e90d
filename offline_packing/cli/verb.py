"""A verb of the command line: its name, help and options, whether it locks the output, and whether
ranks may share it. `offline-packing NAME CONFIG.yaml [key.sub=value ...]` calls it.

A run is imported when it starts, so that help is fast.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from offline_packing.errors import ConfigError, show_controls
from task_encoders.storage.paths import is_url, path_of
from task_encoders.versions import VERSION


class _PathOrUrl(click.Path):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and is_url(value):
            return path_of(value)
        return super().convert(value, param, ctx)


#: A local file, or a URL.
FILE: Final = _PathOrUrl(dir_okay=False, path_type=Path)
#: A local folder, or a URL.
FOLDER: Final = _PathOrUrl(file_okay=False, path_type=Path)


class Verb(click.Command):
    """Operation on one output. Its function gets a run, `dry_run` if it locks, and the verb's own
    options; it prints its result, and raises StageError if it fails."""

    def __init__(
        self,
        *,
        callback: Any,
        params: list[click.Parameter],
        locks: bool = True,
        is_shared: bool = False,
        needs_output: bool = False,
        **settings: Any,
    ) -> None:
        """Make a verb of the function `callback`.

        Args:
            locks: lock the output against other runs, except in a dry run; a verb that does not
                only shows what is there.
            is_shared: several ranks can do it to one output at the same time.
            needs_output: it fails without an output, and then makes no folder for one.
        """
        own = [*(_WORK_OPTIONS if locks else ()), *params]
        super().__init__(callback=self._run, params=[*_ARGUMENTS, *own], **settings)
        self.function = callback
        self.locks, self.is_shared, self.needs_output = locks, is_shared, needs_output

    def _run(
        self,
        config: str,
        overrides: tuple[str, ...],
        accept_mismatch: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        from offline_packing.config.packing import load_config
        from offline_packing.runs.run import Run, build_engine

        parsed = load_config(config, overrides)
        with build_engine(parsed.engine) as engine:
            if engine.IS_SHARED and not self.is_shared:
                verbs = (one for one in cli.commands.values() if isinstance(one, Verb))
                shared = ", ".join(str(one.name) for one in verbs if one.is_shared)
                raise ConfigError(
                    f"engine.name={parsed.engine.name} shares {shared} among ranks; run "
                    f"{self.name} with engine.name=local"
                )
            quiet = click.get_current_context().obj
            run = Run(parsed, engine, frozenset(accept_mismatch), progress=not quiet)
            is_missing = self.needs_output and not run.workspace.packing.exists()
            lock: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if self.locks and not options["dry_run"] and not is_missing:
                lock = run.workspace.lock(shared=engine.IS_SHARED)
            with lock:
                self.function(run, **options)


def echo(text: object, *, nl: bool = True) -> None:
    """Print a text that may contain names and ids of the data."""
    click.echo(show_controls(str(text)), nl=nl)


class _Formatter(logging.Formatter):
    """Formatter of messages that may contain names and ids of the data."""

    def format(self, record: logging.LogRecord) -> str:
        return show_controls(super().format(record))


def _start_logging(context: click.Context, _: click.Parameter, quiet: bool) -> None:
    """Log to stderr: our own messages, only warnings if quiet, and warnings of libraries. `obj` of
    the context keeps whether it is quiet."""
    context.obj = quiet
    shown = logging.StreamHandler(sys.stderr)
    ours = ("offline_packing", "task_encoders", "launch")
    shown.addFilter(lambda one: one.levelno >= logging.WARNING or one.name.split(".")[0] in ours)
    level = logging.WARNING if quiet else logging.INFO
    shown.setFormatter(_Formatter("%(message)s"))
    logging.basicConfig(level=level, handlers=[shown])
    logging.captureWarnings(True)
    # Bad pictures are found when they are measured; other warnings would break up the bar.
    warnings.filterwarnings("ignore", module=r"PIL\.")


#: Options of every command.
OUTPUT_OPTIONS: Final = (
    click.Option(
        ["--quiet"],
        is_flag=True,
        expose_value=False,
        callback=_start_logging,
        help="Show warnings, errors and results only.",
    ),
    click.Option(
        ["--debug"], is_flag=True, expose_value=False, help="Show the traceback of an error."
    ),
)
_ARGUMENTS: Final = (
    click.Argument(["config"]),
    click.Argument(["overrides"], nargs=-1, metavar="[KEY.SUB=VALUE]..."),
)
#: Options of verbs that write.
_WORK_OPTIONS: Final = (
    click.Option(["--dry-run"], is_flag=True, help="Say what would be done; write nothing."),
    click.Option(
        ["--accept-mismatch"],
        multiple=True,
        metavar="FIELD",
        help="Use what was measured although this field, as an error message named it, differs "
        "now; or modification_time: although files were copied without their times.",
    ),
)


class _InOrder(click.Group):
    """Group whose help lists the verbs in the order of work, each with its whole sentence."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        whole = [(name, command.get_short_help_str(500)) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(whole)


_SETTINGS: Final = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
    "show_default": True,
}


@click.group(cls=_InOrder, context_settings=_SETTINGS)
@click.version_option(VERSION)
def cli() -> None:
    """Pack a vision-language dataset into full training sequences, before training.

    Most verbs are called as VERB CONFIG [KEY.SUB=VALUE]..., where CONFIG is a YAML file and its
    fields can be set after it: offline-packing run pack.yaml pack.seq_length=8192
    """


#: Make a function a verb, with the settings of Verb.
verb: Final = partial(cli.command, cls=Verb)
