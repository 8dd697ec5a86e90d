"""Requests to an object storage: they are repeated after growing waits while they fail, and
counted; those that are refused are not repeated."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

logger = logging.getLogger(__name__)

#: Seconds before a request is made again, after the storage's own package has repeated it.
WAITS: Final = (1, 2, 5, 15, 45)
#: Remedy where a storage refuses a request.
CHECK: Final = (
    "check that the bucket exists, and that the credentials may do so there (of S3 "
    "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL in the environment, or "
    "FSSPEC_S3_ANON=true of a public bucket; of msc:// the profile in the file that MSC_CONFIG "
    "names)"
)
#: Stands for no default: the request is for an object that exists.
MUST_EXIST: Final = object()

#: Packages whose errors count as errors of a request, besides OSError.
_STORAGES: Final = frozenset(
    "aiobotocore aiohttp azure botocore gcsfs google multistorageclient requests urllib3".split()
)
#: Errors that a repetition does not change.
_REFUSED: Final = ("Credential", "Forbidden", "Unauthorized", "AccessDenied", "InvalidAccessKey")
#: Requests that this process repeated, and those that others repeated for it.
REPEATS: Final = Counter[str]()


class RemoteError(RuntimeError):
    """Object storage refuses a request, or goes on failing it. Neither an OSError nor a fault of
    the file: that it cannot be read now does not make it damaged."""


def make_request(
    path: str, done: str, request: Callable[[], Any], default: Any = MUST_EXIST
) -> Any:
    """Make a request; return its answer, or the default if there is one and no such object. `done`
    says in errors what could not be done to the object. Raises RemoteError if the storage refuses
    the request, or goes on failing it; FileNotFoundError."""
    for wait in (*WAITS, None):
        try:
            return request()
        except Exception as error:
            if isinstance(error, FileNotFoundError) and not _lacks_bucket(error):
                if default is not MUST_EXIST:
                    return default
                if done != "written":  # else it was completed, and the answer lost
                    raise
            package = type(error).__module__.partition(".")[0]
            if not isinstance(error, OSError) and package not in _STORAGES:
                raise  # of our code
            if "InvalidRange" in f"{error} {error.__cause__!r}":
                raise  # a range begins after the end of its object
            why = in_a_line(error)[:300]
            refused = isinstance(error, PermissionError) or _lacks_bucket(error)
            refused |= any(name in f"{type(error).__name__} {error}" for name in _REFUSED)
            if wait is None or refused:
                remedy = "run again" if wait is None else CHECK
                raise RemoteError(f"{path} cannot be {done}: {why}; {remedy}") from error
            REPEATS["requests"] += 1
            logger.warning("%s: a request failed (%s), again in %d s", path, why, wait)
        time.sleep(wait)
    raise AssertionError


def count_attempt(attempts: int, **event: Any) -> None:
    """Count an attempt that botocore made, which calls this after each."""
    REPEATS["requests"] += attempts > 1


def in_a_line(error: BaseException) -> str:
    """Write type and text of an error in a line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _lacks_bucket(error: Exception) -> bool:
    return "NoSuchBucket" in f"{error} {error.__cause__!r}" or "bucket does not" in str(error)
