"""Packs that tests of training share."""

import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from launch.model import transformers_model
from tests.helpers.packed_runs import bmr_folder, captioning_folder
from tests.helpers.transformers_runs import Case, command, make_case, train
from tests.helpers.varlen import CpuVarlen
from tests.world import World


@pytest.fixture(scope="module", autouse=True)
def _leave_groups() -> Iterator[None]:
    """Leave the process groups that a module joined: each of their 18 keeps a thread that polls,
    2% of a core for as long as the tests run."""
    yield
    if parallel := sys.modules.get("launch.loop.parallel"):
        parallel.shutdown_parallel()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed dialogues."""
    return bmr_folder(tmp_path_factory.mktemp("dialogues"))


@pytest.fixture(scope="session")
def captions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed captions."""
    return captioning_folder(tmp_path_factory.mktemp("captions"))


@pytest.fixture(scope="session")
def case(world: World, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A family's tiny checkpoint with a tokenizer, in `model`, and dialogues packed for it, with
    pictures, or "of videos" too, in `packed`; for reading only."""
    root = tmp_path_factory.mktemp("families")

    def made(name: str) -> Path:
        folder = root / name.replace(" ", "_")
        if not folder.exists():
            make_case(world, name, folder)
        return folder

    return made


@pytest.fixture(scope="session")
def undisturbed(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Output of a family's training with some options in one process; each is trained once."""

    @cache
    def trained(family: str, *options: str) -> Path:
        output = tmp_path_factory.mktemp("undisturbed")
        train(command(case(family), output, *options, family=family))
        return output

    return trained


@pytest.fixture
def varlen(monkeypatch: pytest.MonkeyPatch) -> CpuVarlen:
    """torch's varlen attention, computed on the CPU, where models may then use it."""
    kernel = CpuVarlen()
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel.varlen_attn)
    monkeypatch.setattr(transformers_model, "select_backend", lambda *_: "torch_varlen")
    return kernel
