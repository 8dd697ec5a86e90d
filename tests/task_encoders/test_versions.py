"""Unsupported versions of packages are refused by name, before their code is imported."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from launch.model.config import transformers_classes
from task_encoders.families import build_sample_encoder
from task_encoders.versions import SUPPORTED, UnsupportedVersionError, require_supported

TOO_OLD = {"megatron-core": "0.14.0", "megatron-energon": "7.0.0", "transformers": "4.57.1"}


def install(package: str, version: str, folder: Path) -> Path:
    """A package as pip installs it, without its code."""
    information = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    information.mkdir()
    text = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    (information / "METADATA").write_text(text)
    return folder


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python, with the packages of a folder before all others."""
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[2])])
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


#: Accepted of transformers, also of a checkout of its development branch.
INSIDE = ("5.99.0", "5.40.0.dev0")


def refusal(package: str) -> str:
    accepted = SUPPORTED[package]
    return (
        f"{package} {TOO_OLD[package]} is installed, offline-packing needs {accepted}; "
        f"pip install '{package}{accepted}'"
    )


def test_what_is_installed_is_supported() -> None:
    require_supported.cache_clear()
    require_supported(*SUPPORTED)
    for package, accepted in SUPPORTED.items():
        assert metadata.version(package) in SpecifierSet(accepted)


@pytest.mark.parametrize(
    ("package", "version"),
    [
        ("megatron-energon", "8.0.0.dev3"),
        *(("transformers", version) for version in ("6.0.0rc1", "5.8", *INSIDE)),
    ],
)
def test_versions_inside_and_outside(
    package: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(install(package, version, tmp_path))
    require_supported.cache_clear()
    if version in INSIDE:
        require_supported(package)
        return
    with pytest.raises(UnsupportedVersionError, match=f"^{package} {version} is installed, "):
        require_supported(package)


def test_a_family_that_is_newer_than_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(install("transformers", "5.12.0", tmp_path))
    for build, what in (
        (lambda: build_sample_encoder("mistral3", str(tmp_path)), "Mistral's tokenizer"),
        (lambda: transformers_classes("gemma4"), "the model of gemma4"),
    ):
        message = f"^transformers 5.12.0 is installed, {what} needs >=5.1\\d; pip install"
        with pytest.raises(UnsupportedVersionError, match=message):
            build()


def test_an_absent_package_is_left_to_its_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    for package in SUPPORTED:
        with pytest.raises(metadata.PackageNotFoundError):
            metadata.version(package)
    require_supported.cache_clear()
    require_supported(*SUPPORTED)


@pytest.mark.parametrize(
    ("package", "command"),
    [
        ("megatron-core", "launch.start -m launch.train none.yaml"),
        ("megatron-energon", "launch.start -m launch.train none.yaml"),
        ("transformers", "launch.start -m launch.train none.yaml"),
        ("transformers", "launch.train_transformers none out"),
        ("megatron-energon", "offline_packing demo {folder}/demo"),
        ("transformers", "offline_packing demo {folder}/demo"),
    ],
)
def test_commands_say_so_in_one_line(package: str, command: str, tmp_path: Path) -> None:
    """Before the demo draws its data."""
    install(package, TOO_OLD[package], tmp_path)
    ran = run(tmp_path, "-m", *command.format(folder=tmp_path).split())
    assert ran.stderr == f"error: {refusal(package)}\n"
    assert ran.returncode == 1
    assert not (tmp_path / "demo").exists()


@pytest.mark.parametrize(
    ("package", "use"),
    [
        ("megatron-energon", "task_encoders.PackedTaskEncoder"),
        ("transformers", "task_encoders.build_sample_encoder('qwen2_vl', '/checkpoint')"),
    ],
)
def test_names_to_import_say_so(package: str, use: str, tmp_path: Path) -> None:
    install(package, TOO_OLD[package], tmp_path)
    ran = run(tmp_path, "-c", f"import task_encoders; {use}")
    last = ran.stderr.splitlines()[-1]
    assert last == f"task_encoders.versions.UnsupportedVersionError: {refusal(package)}"


def test_measuring_asks_for_no_package_of_training(tmp_path: Path) -> None:
    for package, version in TOO_OLD.items():
        install(package, version, tmp_path)
    ran = run(tmp_path, "-c", "import task_encoders; task_encoders.build_sample_encoder()")
    assert ran.returncode == 0, ran.stderr
