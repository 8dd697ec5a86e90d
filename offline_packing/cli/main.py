"""The command line: `offline-packing VERB CONFIG.yaml [key.sub=value ...]`.

Exit status: 0 done, 1 a stage or a check failed, 2 the command or the configuration is wrong,
128 and the signal's number if a signal ended it. The verbs are in verbs.py.

Only the standard library is imported before signals are handled: other imports take a while.
"""

import atexit
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

#: Signals that end a run as an exception, so that locks, worker processes and half-written files
#: are cleaned up.
_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class EndedBySignal(BaseException):
    """A signal asked the process to end. Not an Exception: only cleanup code may catch it."""

    def __str__(self) -> str:
        ended = signal.Signals(self.args[0])
        return "interrupted" if ended == signal.SIGINT else f"ended by {ended.name}"


@contextmanager
def signals_raise() -> Iterator[None]:
    """Raise EndedBySignal in the block on Ctrl-C, SIGTERM or SIGHUP. After the first all are
    ignored, so that nothing disturbs cleanup and the end of the process. A signal that the process
    was started to ignore (nohup) stays ignored. Only for the main thread."""
    before = {number: signal.getsignal(number) for number in _ENDING}
    changed = {number: was for number, was in before.items() if was != signal.SIG_IGN}
    hook, sys.unraisablehook = sys.unraisablehook, _raise_later
    for number in changed:
        signal.signal(number, _raise)
    try:
        yield
    except EndedBySignal:
        changed.clear()
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, was in changed.items():
            signal.signal(number, was)
        sys.unraisablehook = hook
        atexit.register(_ignore)


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    _ignore()
    raise EndedBySignal(number)


def _ignore() -> None:
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)


def _raise_later(dropped: "UnraisableHookArgs") -> None:
    """Raise again, a moment later, what a signal raised in a callback of Python's own, as imports
    have, which drop exceptions."""
    ended = dropped.exc_value
    if not isinstance(ended, EndedBySignal):
        sys.__unraisablehook__(dropped)
        return
    signal.signal(signal.SIGALRM, lambda *_: _raise(ended.args[0], None))
    signal.setitimer(signal.ITIMER_REAL, 0.05)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, or other `arguments`, and exit."""
    try:
        with signals_raise():
            _run(sys.argv[1:] if arguments is None else arguments)
    except EndedBySignal as ended:
        print(f"{ended}; run the same command again to continue", file=sys.stderr)  # noqa: T201
        sys.exit(128 + ended.args[0])


def _run(arguments: Sequence[str]) -> None:
    """Run the command; an error is one line on stderr."""
    import click

    from offline_packing.cli.commands import cli
    from offline_packing.errors import ConfigError, ShareDoneError, StageError, show_controls
    from task_encoders.storage.paths import StorageError
    from task_encoders.storage.remote_requests import RemoteError
    from task_encoders.versions import UnsupportedVersionError

    try:
        cli.main(list(arguments), standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except ShareDoneError as done:
        click.echo(str(done), err=True)
    except BrokenPipeError:  # `| head` has seen enough; nothing is left to be flushed into it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except Exception as error:
        if "--debug" in arguments:
            raise
        is_usage = isinstance(error, ConfigError | StorageError)
        is_known = is_usage or isinstance(
            error, StageError | RemoteError | OSError | UnsupportedVersionError
        )
        cause = error.__cause__ if isinstance(error, click.Abort) else error  # of an EOFError
        text = str(error) if is_known else f"{type(cause).__name__}: {cause} (--debug shows where)"
        click.echo(f"error: {show_controls(' '.join(text.split()))}", err=True)
        sys.exit(2 if is_usage else 1)
