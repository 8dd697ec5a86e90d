"""Files under a root, and never a file outside it."""

import functools
import os
import stat
from pathlib import Path
from typing import BinaryIO

from task_encoders.samples import SampleError


class MediaRoot:
    """A folder whose files may be read. Names are POSIX paths; symlinks may not lead outside."""

    def __init__(self, folder: Path) -> None:
        self.folder = os.path.realpath(folder)

    def path(self, container: str) -> str:
        """Path of a file for opening it and for messages."""
        return os.path.join(self.folder, container)

    def locate(self, folder: str, name: str) -> str:
        """Container (path relative to the root) of the file that `name` means in `folder`.

        Raises:
            SampleError: path_outside_root, or missing_image for what cannot be a file name.
        """
        if not name or "\0" in name:
            raise SampleError("missing_image", f"{name!r} is no file name")
        path = os.path.normpath(os.path.join(self.folder, folder, name))
        if not self._holds(path):
            raise SampleError("path_outside_root", f"{name!r} leads outside {self.folder!r}")
        return path[len(self.folder) :].lstrip("/")

    def open(self, container: str) -> BinaryIO:
        """Open a file for reading.

        Raises:
            SampleError: path_outside_root if a symlink leads outside; missing_image if there is no
                such file, or it is a folder, a pipe or a device, or may not be read.
        """
        path = self.path(container)
        try:
            if not self._holds(_real_folder(os.path.dirname(path))) or (
                os.path.islink(path) and not self._holds(os.path.realpath(path))
            ):
                raise SampleError("path_outside_root", f"{container!r} is a link to outside")
            # Non-blocking: opening a named pipe would wait for a writer.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise _as_sample_error(container, error) from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise SampleError("missing_image", f"{container!r} is not a regular file")
        return open(descriptor, "rb")

    def _holds(self, path: str) -> bool:
        return path.startswith(self.folder.rstrip("/") + "/") or path == self.folder


@functools.lru_cache(maxsize=1024)
def _real_folder(folder: str) -> str:
    return os.path.realpath(folder)


def _as_sample_error(container: str, error: OSError) -> Exception:
    """A file that is not there is the sample's fault; a failing disk is not."""
    if isinstance(error, FileNotFoundError | NotADirectoryError | PermissionError) or (
        error.strerror in ("File name too long", "Too many levels of symbolic links")
    ):
        return SampleError("missing_image", f"{container!r}: {error.strerror}")
    return error
