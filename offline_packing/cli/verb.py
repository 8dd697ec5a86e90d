"""What a verb is: one object that says its name, help and options, whether it locks the output, and
whether ranks may share it. `offline-packing NAME CONFIG.yaml [key.sub=value ...]` calls it.

What a run needs is imported when one begins: help needs none of it, and is asked for often.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from offline_packing.errors import ConfigError

if TYPE_CHECKING:
    from offline_packing.config.packing import PackingConfig
    from offline_packing.engines import Engine
    from offline_packing.runs.run import Run

Function = TypeVar("Function", bound=Callable[..., Any])
Option = Callable[[Function], Function]


@dataclass(frozen=True)
class Verb:
    """What can be done to one output. Called with a run, whether it is a dry one, and its options,
    it prints its result, and raises StageError where it fails."""

    name: str
    #: its docstring is the help text
    function: Callable[..., None]
    options: tuple[Option[Any], ...] = ()
    #: whether it locks the output against other runs (never in a dry run)
    locks: bool = True
    #: whether several ranks can do it to one output at the same time
    is_shared: bool = False
    #: a list at the end of its help, made on demand: it may take time to import
    more_help: Callable[[], tuple[str, list[tuple[str, str]]]] | None = None
    #: it fails if there is no output yet, and leaves nothing behind there
    needs_output: bool = False

    def __call__(self, run: Run, dry_run: bool, **options: Any) -> None:
        self.function(run, dry_run, **options)

    def lock(self, run: Run, dry_run: bool) -> contextlib.AbstractContextManager[None]:
        """Held while the verb is at work."""
        is_missing = self.needs_output and not run.workspace.packing.exists()
        if dry_run or is_missing or not self.locks:
            return contextlib.nullcontext()
        return run.workspace.lock(shared=run.engine.IS_SHARED)

    def check_engine(self, config: PackingConfig, engine: Engine) -> None:
        """Raise ConfigError if several ranks would run what only one can."""
        if engine.IS_SHARED and not self.is_shared:
            shared = ", ".join(verb.name for verb in VERBS.values() if verb.is_shared)
            raise ConfigError(
                f"engine.name={config.engine.name} shares {shared} among ranks; run {self.name} "
                "with engine.name=local"
            )


#: In the order in which help lists them.
VERBS: Final[dict[str, Verb]] = {}


def verb(name: str, *options: Option[Any], **properties: Any) -> Callable[..., Verb]:
    """Make a function a verb. `properties` are those of Verb."""

    def register(function: Callable[..., None]) -> Verb:
        VERBS[name] = Verb(name, function, options, **properties)
        return VERBS[name]

    return register


def with_options(function: Function, options: tuple[Option[Any], ...]) -> Function:
    """A command's function with options, which help lists in this order."""
    return functools.reduce(lambda done, option: option(done), reversed(options), function)


#: Of every command.
OUTPUT_OPTIONS: Final[tuple[Option[Any], ...]] = (
    click.option("--quiet", is_flag=True, help="Show warnings, errors and results only."),
    click.option(
        "--debug", is_flag=True, expose_value=False, help="Show the traceback of an error."
    ),
)
_RUN_OPTIONS: Final[tuple[Option[Any], ...]] = (
    click.argument("config"),
    click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE]..."),
    click.option("--dry-run", is_flag=True, help="Say what would be done; write nothing."),
    click.option(
        "--accept-mismatch",
        multiple=True,
        metavar="FIELD",
        help="Use what was measured although this field, as an error message named it, differs "
        "now; or modification_time: although files were copied without their times.",
    ),
)


class _VerbCommand(click.Command):
    """A command whose help may end with a list."""

    more_help: Callable[[], tuple[str, list[tuple[str, str]]]] | None = None

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.more_help is not None:
            title, lines = self.more_help()
            with formatter.section(title):
                formatter.write_dl(lines)


def as_command(verb: Verb) -> click.Command:
    """The command of a verb."""

    def command(
        config: str,
        overrides: tuple[str, ...],
        dry_run: bool,
        accept_mismatch: tuple[str, ...],
        quiet: bool,
        **options: Any,
    ) -> None:
        from offline_packing.config.packing import load_config
        from offline_packing.runs.run import Run, build_engine

        start_logging(quiet)
        parsed = load_config(config, overrides)
        with build_engine(parsed) as engine:
            verb.check_engine(parsed, engine)
            run = Run(parsed, engine, frozenset(accept_mismatch), not quiet)
            with verb.lock(run, dry_run):
                verb(run, dry_run, **options)

    options = (*_RUN_OPTIONS, *verb.options, *OUTPUT_OPTIONS)
    decorate = click.command(verb.name, cls=_VerbCommand, help=verb.function.__doc__)
    made = decorate(with_options(command, options))
    made.more_help = verb.more_help
    return made


def start_logging(quiet: bool) -> None:
    """Log to stderr, only warnings if quiet."""
    level = logging.WARNING if quiet else logging.INFO
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
    logging.captureWarnings(True)
    # Bad pictures are found when they are measured; other warnings would break up the bar.
    warnings.filterwarnings("ignore", module=r"PIL\.")
