"""What a verb is: one object that says its name, help and options, whether it locks the output, and
whether ranks may share it. `offline-packing NAME CONFIG.yaml [key.sub=value ...]` calls it.

What a run needs is imported when one begins: help needs none of it, and is asked for often.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

import click

from offline_packing.errors import ConfigError

if TYPE_CHECKING:
    from offline_packing.runs.run import Run

#: A title, and names with their meaning.
HelpList = tuple[str, list[tuple[str, str]]]


class Verb(click.Command):
    """What can be done to one output. `function` gets a run, whether it is a dry one, and the
    verb's options; it prints its result, and raises StageError where it fails."""

    def __init__(
        self,
        name: str,
        function: Callable[..., None],
        options: Iterable[click.Option],
        *,
        locks: bool = True,
        is_shared: bool = False,
        needs_output: bool = False,
        more_help: Callable[[], HelpList] | None = None,
    ) -> None:
        """
        Args:
            function: its docstring is the help text.
            locks: whether it locks the output against other runs (never in a dry run).
            is_shared: whether several ranks can do it to one output at the same time.
            needs_output: it fails if there is no output yet, and leaves nothing behind there.
            more_help: a list at the end of its help, made on demand: it may take time to import.
        """
        params = [*_RUN_PARAMETERS, *options]
        super().__init__(name, callback=self._run, params=params, help=function.__doc__)
        self.function, self.more_help = function, more_help
        self.locks, self.is_shared, self.needs_output = locks, is_shared, needs_output

    def _run(
        self,
        config: str,
        overrides: tuple[str, ...],
        dry_run: bool,
        accept_mismatch: tuple[str, ...],
        **options: Any,
    ) -> None:
        from offline_packing.config.packing import load_config
        from offline_packing.runs.run import Run, build_engine

        parsed = load_config(config, overrides)
        with build_engine(parsed) as engine:
            if engine.IS_SHARED and not self.is_shared:
                shared = ", ".join(verb.name or "" for verb in VERBS if verb.is_shared)
                raise ConfigError(
                    f"engine.name={parsed.engine.name} shares {shared} among ranks; run "
                    f"{self.name} with engine.name=local"
                )
            quiet = click.get_current_context().obj
            run = Run(parsed, engine, frozenset(accept_mismatch), progress=not quiet)
            with self._lock(run, dry_run):
                self.function(run, dry_run, **options)

    def _lock(self, run: Run, dry_run: bool) -> contextlib.AbstractContextManager[None]:
        """Held while the verb is at work."""
        is_missing = self.needs_output and not run.workspace.packing.exists()
        if dry_run or is_missing or not self.locks:
            return contextlib.nullcontext()
        return run.workspace.lock(shared=run.engine.IS_SHARED)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.more_help is not None:
            title, lines = self.more_help()
            with formatter.section(title):
                formatter.write_dl(lines)


#: In the order in which help lists them.
VERBS: Final[list[Verb]] = []


def verb(name: str, *options: click.Option, **properties: Any) -> Callable[..., Verb]:
    """Make a function a verb. `properties` are those of Verb."""

    def register(function: Callable[..., None]) -> Verb:
        VERBS.append(Verb(name, function, options, **properties))
        return VERBS[-1]

    return register


def _start_logging(context: click.Context, _: click.Parameter, quiet: bool) -> None:
    """Log to stderr, only warnings if quiet; `obj` of the context keeps which."""
    context.obj = quiet
    level = logging.WARNING if quiet else logging.INFO
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
    logging.captureWarnings(True)
    # Bad pictures are found when they are measured; other warnings would break up the bar.
    warnings.filterwarnings("ignore", module=r"PIL\.")


#: Of every command.
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
_RUN_PARAMETERS: Final = (
    click.Argument(["config"]),
    click.Argument(["overrides"], nargs=-1, metavar="[KEY.SUB=VALUE]..."),
    click.Option(["--dry-run"], is_flag=True, help="Say what would be done; write nothing."),
    click.Option(
        ["--accept-mismatch"],
        multiple=True,
        metavar="FIELD",
        help="Use what was measured although this field, as an error message named it, differs "
        "now; or modification_time: although files were copied without their times.",
    ),
)
