"""This project's version, and the packages of training in the versions that our tests ran with
(docs/training.md).

setup.py runs this file: nothing but Python's own modules is imported at the top.
"""

import functools
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
        accepted = SUPPORTED[package]
        try:
            installed = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        from packaging.specifiers import SpecifierSet

        if not SpecifierSet(accepted).contains(installed, prereleases=True):
            raise UnsupportedVersionError(
                f"{package} {installed} is installed, offline-packing needs {accepted}; "
                f"pip install '{package}{accepted}'"
            )


def require_at_least(package: str, version: str, what: str) -> None:
    """Refuse a package that is older than `what` needs. Raises UnsupportedVersionError."""
    from packaging.version import Version

    installed = metadata.version(package)
    if Version(installed) < Version(version):
        raise UnsupportedVersionError(
            f"{package} {installed} is installed, {what} needs >={version}; "
            f"pip install '{package}>={version}'"
        )
