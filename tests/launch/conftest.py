"""Packs that tests of training share."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.model import transformers_model
from tests.helpers.packed_runs import OUTPUT, SEQ_LENGTH
from tests.helpers.transformers_runs import Case, make_case
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
def folder(world: World) -> Path:
    """Packed dialogues."""
    return world.packed("bmr", pack={"seq_length": SEQ_LENGTH}, output=OUTPUT)


@pytest.fixture(scope="session")
def captions(world: World) -> Path:
    """Packed captions."""
    return world.packed("captioning", pack={"seq_length": SEQ_LENGTH}, output=OUTPUT)


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


@pytest.fixture
def varlen(monkeypatch: pytest.MonkeyPatch) -> CpuVarlen:
    """torch's varlen attention, computed on the CPU, where models may then use it."""
    kernel = CpuVarlen()
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel.varlen_attn)
    monkeypatch.setattr(transformers_model, "select_backend", lambda *_: "torch_varlen")
    return kernel
