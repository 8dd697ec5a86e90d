"""Errors that end a stage. Their text is one line: the thing, its value, the limit, the remedy."""

from typing import Final

from task_encoders.samples import SampleError
from task_encoders.storage.remote_requests import RemoteError

#: C0 and C1 but tab and line ends, and what turns the direction of writing.
_CONTROLS: Final = {
    code: ascii(chr(code))[1:-1]
    for first, end in ((0, 9), (11, 13), (14, 32), (127, 160), (0x202A, 0x202F), (0x2066, 0x206A))
    for code in range(first, end)
}


class StageError(RuntimeError):
    """A stage cannot go on."""


class ChangedError(StageError):
    """The source changed after it was measured."""

    def __init__(self, what: str, why: object = "") -> None:
        super().__init__(
            f"{what} changed since it was measured{f': {why}' if why else ''}; restore it, or "
            "measure again with output.overwrite=true"
        )


class ConfigError(StageError):
    """The configuration, or the command line, cannot be used."""


class DamagedError(StageError):
    """One of an output's own files is not as it was written."""


class DiskFullError(StageError):
    """The disk is full: every other task would fail, too."""


class ShareDoneError(StageError):
    """This rank has done its share of a stage, but others have not: run the stage again when they
    are done."""


def as_sample_error(error: Exception) -> SampleError:
    """Turn any error of a record into the reason to set it aside, without the traceback, which
    would keep the whole record in memory.

    Raises:
        Exception: the error itself, if it is not the fault of a record: a failing disk or
            storage, a lack of memory or of a package, a stage that cannot go on.
    """
    if isinstance(error, SampleError):
        return SampleError(error.reason, error.detail)
    if isinstance(error, OSError | MemoryError | ImportError | StageError | RemoteError):
        raise error
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return SampleError("unexpected_error", text[:200])


def show_controls(text: str) -> str:
    """Escape control characters in a text from the data, which a terminal would obey; white space
    stays."""
    return text.translate(_CONTROLS)
