"""This project's version, and the packages of training in the versions that our tests ran with
(docs/training.md).

setup.py runs this file: nothing but Python's own modules is imported at the top.
"""

import functools
from contextlib import suppress
from importlib import metadata
from typing import Final

VERSION: Final = "0.1.0"
#: Distribution -> accepted versions.
SUPPORTED: Final = {
    "megatron-core": ">=0.16",
    "megatron-energon": ">=7.4,<8",
    "transformers": ">=5.9,<6",
}


class UnsupportedVersionError(ImportError):
    """A package is installed in a version that is not accepted."""


@functools.cache
def require_supported(*packages: str) -> None:
    """Refuse packages of SUPPORTED that are installed in another version. Call it before importing
    their modules, where a missing name would be a traceback.

    One that is absent, or on PYTHONPATH without metadata, is left to its import.

    Raises:
        UnsupportedVersionError: names package, version, accepted versions and the remedy.
    """
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            require(package, SUPPORTED[package], "offline-packing")


def require(package: str, accepted: str, what: str) -> None:
    """Refuse a package in another version than `what` needs. Raises UnsupportedVersionError."""
    from packaging.specifiers import SpecifierSet

    installed = metadata.version(package)
    if not SpecifierSet(accepted).contains(installed, prereleases=True):
        raise UnsupportedVersionError(
            f"{package} {installed} is installed, {what} needs {accepted}; "
            f"pip install '{package}{accepted}'"
        )
