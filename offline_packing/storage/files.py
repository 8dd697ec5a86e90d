"""Files that are either complete or absent, reads that notice a changed file, local copies of files
without random access, and scratch folders: for outputs on a disk or in object storage."""

import atexit
import errno
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

import numpy as np
import orjson
import xxhash
from pydantic import TypeAdapter, ValidationError

from offline_packing.errors import ChangedError, DamagedError, DiskFullError, StageError
from task_encoders.field_types import first_problem
from task_encoders.storage.paths import REMEDY, as_remote, read_at
from task_encoders.threads import in_threads

#: The number of objects that are read at the same time: each takes some 30 ms to its first byte.
_AT_ONCE: Final = 16

Item = TypeVar("Item")
Result = TypeVar("Result")


def is_remote(path: Path) -> bool:
    """Tell whether a path is in object storage."""
    return as_remote(path) is not None


def scratch_folder(folder: Path) -> Path:
    """Return the folder itself or, of an object storage, a local one in `private_folder`, the same
    in all processes. A folder below `_packing` gets one inside that of `_packing`."""
    if not is_remote(folder):
        return folder
    output, _, below = f"{folder}/".rpartition("/_packing/")
    names = [xxhash.xxh3_64_hexdigest(name.encode()) for name in (output, below) if name]
    return private_folder().joinpath(*names)


def private_folder() -> Path:
    """Return the user's folder below TMPDIR, and make it if there is none. Only the user may enter
    it; its name cannot be guessed, so that nobody can make it first."""
    parent, prefix = Path(tempfile.gettempdir()), f"offline-packing-{os.getuid()}-"

    def find() -> list[Path]:
        return sorted(filter(_is_private, parent.glob(f"{prefix}*")))

    if not find():
        tempfile.mkdtemp(prefix=prefix, dir=parent)
    return find()[0]  # of several that processes made at the same time


def _is_private(path: Path) -> bool:
    try:
        info = path.lstat()
    except FileNotFoundError:
        return False
    is_own = stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid()
    return is_own and not stat.S_IMODE(info.st_mode) & 0o077


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder in `private_folder`, and remove it after the block. Also remove what killed
    processes left."""
    parent = private_folder()
    with ExitStack() as held:
        with _locked(parent, fcntl.LOCK_EX):
            for left in parent.glob("copy-*"):
                # The lock of a process that died is released. A folder that is in use may be
                # removed meanwhile: whoever made it removes it without the parent's lock.
                with (
                    suppress(BlockingIOError, FileNotFoundError),
                    _locked(left, fcntl.LOCK_EX | fcntl.LOCK_NB),
                ):
                    shutil.rmtree(left)
            folder = Path(tempfile.mkdtemp(prefix="copy-", dir=parent))
            held.enter_context(_locked(folder, fcntl.LOCK_EX))
        held.callback(remove_folder, folder)
        yield folder


@contextmanager
def _locked(folder: Path, operation: int) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, operation)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def local_copy(path: Path) -> Iterator[Path]:
    """Return the path itself; of an object, a copy of the same name while the block runs."""
    if not (remote := as_remote(path)):
        yield path
        return
    with temporary_folder() as folder:
        copy = folder / path.name
        with copy.open("wb") as target:
            remote.download(target)
        yield copy


def read_each(
    folder: Path, read: Callable[[Item], Result], items: Iterable[Item]
) -> Iterator[Result]:
    """Yield `read(item)` of each item, which is a file in the folder; files of an object storage
    are read ahead, in threads."""
    if not is_remote(folder):
        yield from map(read, items)
        return
    yield from in_threads(read, items, _AT_ONCE, ahead=_AT_ONCE)


def remove_folder(folder: Path) -> None:
    """Remove a folder with its content, if it exists."""
    if remote := as_remote(folder):
        remote.remove_tree()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def remove_path(path: Path) -> None:
    """Remove a file, or the folder in its place, if it exists."""
    remove_folder(path) if path.is_dir() else path.unlink(missing_ok=True)


logger = logging.getLogger(__name__)

TEMPORARY_SUFFIX = ".tmp"
#: Field of a JSON file with the hash of all its other fields.
_SEAL: Final = "xxh3_128_of_this"
#: Return the validator of a type; it is made once.
adapter: Final = functools.lru_cache(TypeAdapter)
#: The number of bytes that are read at a time.
_HASHED_BLOCK: Final = 8 << 20
#: Errors of a full disk: no space, quota used up, file larger than allowed.
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file, which is synced and renamed to `path` if the block succeeds; of an
    object, a local file that is uploaded. Raises DiskFullError if the disk is full."""
    if remote := as_remote(path):
        with translate_disk_full(Path(tempfile.gettempdir())), remote.uploaded() as file:
            yield file
        return
    with translate_disk_full(path):
        temporary, file = _open_temporary(path)
        try:
            with file:
                yield file
                file.flush()
                os.fsync(file.fileno())
                if path.is_dir():  # instead of the file; what it holds is the user's
                    path.replace(temporary.with_suffix(".damaged"))
                os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


@contextmanager
def translate_disk_full(path: Path) -> Iterator[None]:
    """Raise DiskFullError where the block, which writes to `path`, fills the disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        raise DiskFullError(
            f"{path} cannot be written: {error.strerror}; free some space and run again"
        ) from error


def _open_temporary(path: Path) -> tuple[Path, BinaryIO]:
    """Open a file whose name no process on any machine uses. It is locked while it is open, so that
    `remove_temporaries` knows that its writer is alive."""
    while True:
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}{TEMPORARY_SUFFIX}")
        file = open(temporary, "wb")  # noqa: SIM115 - the caller closes it
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if temporary.exists():  # otherwise it was removed as a leftover before it was locked
            return temporary, file
        file.close()


def write_atomically(path: Path, data: bytes) -> None:
    """Write a whole file with `atomic_file`."""
    with atomic_file(path) as file:
        file.write(data)


def to_json(content: Any) -> bytes:
    """Encode content as readable JSON, the same for equal content."""
    options = orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE
    return orjson.dumps(content, option=options | orjson.OPT_SERIALIZE_NUMPY)


def seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """Add a hash to an object's content, by which `read_json` detects damage."""
    return {**content, _SEAL: hash_bytes(to_json(content))}


def read_json(path: Path, remedy: str = REMEDY, *, form: Any = None) -> Any:
    """Return the content of one of our JSON files, without its seal; None: there is no file. With
    `form`, a type that pydantic knows, it must have a seal and that form. Raises DamagedError,
    with the remedy, if it is not a JSON object, or not as it was written."""
    try:
        content = orjson.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, not an object")
        sealed = content.pop(_SEAL, None)
        if (form or sealed is not None) and sealed != hash_bytes(to_json(content)):
            raise ValueError("it is not what was written")
        return content if form is None else adapter(form).validate_python(content)
    except FileNotFoundError:
        return None
    except (IsADirectoryError, TypeError, ValueError) as error:  # TypeError: nested too deeply
        why = getattr(error, "strerror", None) or error
        why = first_problem(error) if isinstance(error, ValidationError) else why
        raise DamagedError(f"{path} is damaged: {why}; {remedy}") from error


def read_range(path: str | Path, offset: int, size: int, *, whole: bool) -> bytes:
    """Read `size` bytes at `offset`; with `whole`, the file must have exactly that size. Raises
    StageError if the file is gone, shorter, or has another size than when it was measured."""
    try:
        with open(path, "rb", buffering=0) as file:
            actual = os.fstat(file.fileno()).st_size
            data = read_at(file.fileno(), size, offset)
    except OSError as error:
        raise unreadable(path, error.strerror) from error
    if len(data) != size or (whole and actual != size):
        why = f"it has {actual} bytes, {offset + size} were expected"
        raise ChangedError(str(path), why)
    return data


def unreadable(path: str | Path, why: object) -> StageError:
    """Return the error of a source's file that can no longer be read."""
    return StageError(
        f"{path} cannot be read: {why}; restore it, or measure again with output.overwrite=true"
    )


def hash_bytes(data: bytes) -> str:
    """Return the xxh3_128 in hexadecimal. It reads 33 GB/s, and finds damage, not malice."""
    return xxhash.xxh3_128_hexdigest(data)


def hash_file(path: Path) -> str:
    """Return the xxh3_128 of a file's content."""
    with path.open("rb", _HASHED_BLOCK if is_remote(path) else 0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()  # type: ignore[arg-type]


def hash_files(folder: Path, pattern: str) -> dict[str, str]:
    """Hash the files of a folder that match a pattern; return the hashes by name."""
    paths = sorted(folder.glob(pattern))
    hashes = read_each(folder, hash_file, paths)
    return {path.name: found for path, found in zip(paths, hashes, strict=True)}


def remove_temporaries(folder: Path) -> None:
    """Remove half-written files of killed runs from a folder; files being written stay. Objects are
    never half-written."""
    if is_remote(folder):
        return
    for path in folder.glob(f"*{TEMPORARY_SUFFIX}"):
        with suppress(OSError), open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


@contextmanager
def hold_lock(
    path: Path, what: str, *, shared: bool = False, lock: Callable[..., None] = fcntl.flock
) -> Iterator[None]:
    """Hold a lock file while the block runs, alone or shared; a read-only file is locked as it is.
    With `fcntl.lockf`, forked processes that outlive this one do not hold it. Raises StageError if
    another process holds it. Object storage has no locks."""
    if is_remote(path):
        logger.info("object storage has no locks: start no second run on %s", what)
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with _open_lock(path) as file:
        try:
            lock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StageError(f"another run is working on {what}; wait for it to end") from error
        except OSError as error:
            logger.warning(
                "the file system has no locks (%s); do not start a second run on %s while this one "
                "works",
                *(error.strerror, what),
            )
        yield


def _open_lock(path: Path) -> BinaryIO:
    try:
        return open(path, "ab")
    except IsADirectoryError as error:
        raise StageError(f"{path} is a folder; remove it") from error
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM) or not path.exists():
            raise
        return open(path, "rb")


@contextmanager
def wait_for_lock(path: Path) -> Iterator[None]:
    """Hold a lock file while the block runs, waiting for any other holder; a killed process holds
    nothing. On a file system without locks nobody waits."""
    with open(path, "ab") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def kept_copy(path: Path, expected_hash: str) -> Path:
    """Return the path itself; of an object, a copy that this process makes once and keeps until it
    ends, unless the hash differs."""
    if not is_remote(path):
        return path
    copy = _copies() / hash_bytes(f"{path} {expected_hash}".encode())
    if not copy.exists():
        with local_copy(path) as once:
            if hash_file(once) != expected_hash:
                return path
            shutil.move(once, copy)
    return copy


@functools.cache
def _copies() -> Path:
    own = ExitStack()
    atexit.register(own.close)
    return own.enter_context(temporary_folder())


def load_array(path: Path) -> np.ndarray:
    """Map the array in a .npy file: it stays on disk and is paged in as needed."""
    with local_copy(path) as copy:  # mapped, it outlives its name
        array: np.ndarray = np.load(copy, mmap_mode="r", allow_pickle=False)
    return array


def sync_folder(folder: Path) -> None:
    """Make the renames in a folder durable."""
    if is_remote(folder):
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
