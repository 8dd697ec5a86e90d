"""Unsupported versions of packages are refused by name, before their code is imported."""

import subprocess
import sys
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path

import pytest

from launch.model.config import transformers_class
from task_encoders.families import build_sample_encoder
from task_encoders.versions import SUPPORTED, UnsupportedVersionError, require_supported

TOO_OLD = {"megatron-core": "0.14.0", "megatron-energon": "7.0.0", "transformers": "4.57.1"}


def install(package: str, version: str, folder: Path) -> Path:
    """A package as pip installs it, without its code."""
    information = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    information.mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    (information / "METADATA").write_text(text)
    return folder


#: Accepted of transformers, also of a checkout of its development branch.
INSIDE = ("5.99.0", "5.40.0.dev0")


@pytest.mark.parametrize("version", ["8.0.0.dev3", "6.0.0rc1", "5.8", *INSIDE])
def test_versions_inside_and_outside(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = "megatron-energon" if version == "8.0.0.dev3" else "transformers"
    monkeypatch.syspath_prepend(install(package, version, tmp_path))
    require_supported.cache_clear()
    refused = f"^{package} {version} is installed, "
    with (
        nullcontext()
        if version in INSIDE
        else pytest.raises(UnsupportedVersionError, match=refused)
    ):
        require_supported(package)


def test_a_family_that_is_newer_than_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(install("transformers", "5.12.0", tmp_path))
    for build, what in (
        (lambda: build_sample_encoder("mistral3", str(tmp_path)), "Mistral's tokenizer"),
        (lambda: transformers_class("gemma4"), "the model of gemma4"),
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


#: Each command with an old version of a package; then each import, and measuring, with all of them.
PROGRAM = """
import runpy, sys
for folder, words in {commands!r}:
    sys.path.insert(0, folder)
    sys.argv[1:] = words[1:]
    try:
        runpy.run_module(words[0], run_name="__main__")
    except SystemExit as end:
        print(end.code, file=sys.stderr)
    sys.path.remove(folder)
import task_encoders
sys.path[:0] = {folders!r}
for use in (
    lambda: task_encoders.PackedTaskEncoder,
    lambda: task_encoders.build_sample_encoder("qwen2_vl", "/checkpoint"),
    lambda: task_encoders.build_sample_encoder(),
):
    try:
        use()
    except ImportError as error:
        print(error, file=sys.stderr)
print({{*sys.modules}} & {{"torch", "megatron", "transformers"}})
"""


def test_they_are_refused_before_they_are_imported(tmp_path: Path) -> None:
    """By commands in one line, and before the demo draws its data."""
    folders = {name: str(install(name, old, tmp_path / name)) for name, old in TOO_OLD.items()}
    cases = [("transformers", ["launch.train_transformers", "none", "out"])]
    cases += [(name, "launch.start -m launch.train none.yaml".split()) for name in TOO_OLD]
    cases += [(name, ["offline_packing", "demo", "demo"]) for name in [*TOO_OLD][1:]]
    commands = [(folders[name], words) for name, words in cases]
    program = PROGRAM.format(commands=commands, folders=[*folders.values()])
    command, options = [sys.executable, "-c", program], {"capture_output": True, "text": True}
    ran = subprocess.run(command, cwd=tmp_path, timeout=120, check=True, **options)
    refusals = {
        name: f"{name} {old} is installed, offline-packing needs {SUPPORTED[name]}; "
        f"pip install '{name}{SUPPORTED[name]}'\n"
        for name, old in TOO_OLD.items()
    }
    said = [f"error: {refusals[name]}1\n" for name, _ in cases]
    assert ran.stderr == "".join([*said, *[*refusals.values()][1:]])
    assert ran.stdout == "set()\n"
    assert not (tmp_path / "demo").exists()
