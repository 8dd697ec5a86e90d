"""`offline-packing launch`: the scripts of the installed package."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from offline_packing.cli.commands import cli
from tests.helpers.command import invoke

FOLDER = Path(__file__).parents[3] / "launch"


def test_scripts_are_listed() -> None:
    """With what each is for; the part that they share is not a script."""
    lines = invoke("launch").output.splitlines()
    assert [line.split()[0] for line in lines] == [
        "pack", "pack_slurm", "pretrain_qwen2_vl", "sft_qwen2_vl"
    ]  # fmt: skip
    assert "Fine-tune Qwen2-VL" in lines[-1]


@pytest.mark.parametrize("name", ["sft_qwen2_vl", "sft_qwen2_vl.sh", "slurm_sft.sbatch"])
def test_paths_are_printed(name: str) -> None:
    path = Path(invoke("launch", "--print", name).output.strip())
    assert path.parent == FOLDER
    assert path.name.startswith(name)
    assert path.is_file()


def test_a_script_takes_the_place_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all arguments, options of its own among them, and this Python before others."""
    called: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(os, "execvp", lambda file, arguments: called.append((file, arguments)))
    monkeypatch.setenv("PATH", "/elsewhere")
    invoke("launch", "sft_qwen2_vl", "data.path=x", "--accept-mismatch", "train.epochs")
    script = str(FOLDER / "sft_qwen2_vl.sh")
    assert called == [
        ("bash", ["bash", script, "data.path=x", "--accept-mismatch", "train.epochs"])
    ]
    assert os.environ["PATH"].endswith(":/elsewhere")


@pytest.mark.parametrize("name", ["sft.yaml", "slurm_sft.sbatch"])
def test_what_is_not_for_bash_is_not_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "execvp", lambda *_: pytest.fail("run"))
    result = CliRunner().invoke(cli, ["launch", name])
    assert result.exit_code == 1
    assert f"{name} is not run with bash; --print says where it is" in result.output
