"""Losses of ranks on several GPUs, and of kernels of packages that are installed, equal those of
one GPU with torch's kernels. `pytest -rs` lists what was left out, and why."""

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.helpers.packed_runs import BMR_ENVIRONMENT, GPU_MODEL, bmr_folder, losses

#: All words of the packs.
WHOLE = {**GPU_MODEL, "text": {**GPU_MODEL["text"], "vocab_size": 151_936}, "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packs whose samples can be cut for two ranks."""
    root = tmp_path_factory.mktemp("gpus")
    return bmr_folder(root, context_parallel=2)


def train(
    folder: Path,
    output: Path,
    *,
    ranks: int = 1,
    module: str = "launch.train",
    model: Mapping[str, Any] | None = None,
    **sections: Any,
) -> list[float]:
    """Losses of eight steps by the command, each over four packs on any number of ranks."""
    if (found := torch.cuda.device_count()) < ranks:
        pytest.skip(f"needs {ranks} GPUs, here are {found}")
    config = {
        "model": {**WHOLE, **(model or {})},
        "data": {"path": str(folder), "num_workers": 1},
        "batch": {"global_batch_packs": 4},
        "train": {"iterations": 8},
        "schedule": {"learning_rate": 1e-3, "warmup": 0.25},
        "checkpoint": {"every": 0, "export": False},
        "output": {"path": str(output)},
        **sections,
    }
    file = output.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(config))
    command = ["-m", "launch.start", "--nproc-per-node", str(ranks), "-m", module, str(file)]
    environment = {**os.environ, **BMR_ENVIRONMENT}
    ended = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return losses(output)


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses on one GPU with torch's attention."""
    output = tmp_path_factory.mktemp("alone") / "run"
    return train(folder, output, model={"attention": "torch_varlen", "fusions": False})


@pytest.mark.parametrize(
    ("ranks", "sections"),
    [
        (1, {"model": {"attention": "torch_varlen"}}),  # with fusions
        (2, {}),
        (2, {"parallel": {"tensor": 2}}),
        (2, {"parallel": {"context": 2}}),
        (4, {"parallel": {"tensor": 2, "context": 2}}),
        (4, {"parallel": {"tensor": 2}}),
        (4, {"parallel": {"context": 2}}),
    ],
    ids=str,
)
def test_ranks_and_fusions_train_as_one_gpu(
    ranks: int, sections: Any, folder: Path, alone: list[float], tmp_path: Path
) -> None:
    found = train(folder, tmp_path / "run", ranks=ranks, **sections)
    assert found == pytest.approx(alone, abs=0.03)


@pytest.mark.parametrize(
    ("attention", "package"),
    [("flash_attn_3", "flash_attn_interface"), ("flash_attn", "flash_attn")],
)
def test_installed_kernels_train_as_those_of_torch(
    attention: str, package: str, folder: Path, alone: list[float], tmp_path: Path
) -> None:
    """The packs are padded inside, too."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if attention == "flash_attn_3" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("flash_attn_3 is for Hopper")
    found = train(folder, tmp_path / "run", model={"attention": attention})
    assert found == pytest.approx(alone, abs=0.03)


TRANSFORMERS = {"module": "launch.train_transformers"}


def test_autocast_with_flash_attention_trains_as_sdpa(folder: Path, tmp_path: Path) -> None:
    if find_spec("flash_attn") is None:
        pytest.skip("flash_attn is not installed")
    options = [{"attention": name} for name in ("sdpa", "flash_attention_2")]
    sdpa, flash = (
        train(folder, tmp_path / one["attention"], model=one, **TRANSFORMERS) for one in options
    )
    assert flash == pytest.approx(sdpa, abs=0.03)


@pytest.mark.parametrize("ranks", [2, 4])
def test_sharded_weights_train_as_whole_ones(ranks: int, folder: Path, tmp_path: Path) -> None:
    whole, sharded = (
        train(folder, tmp_path / str(fsdp), ranks=ranks, model={"fsdp": fsdp}, **TRANSFORMERS)
        for fsdp in (False, True)
    )
    assert sharded == pytest.approx(whole, abs=0.03)
