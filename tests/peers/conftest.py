"""Packs in other training frameworks. test_NAME.py and test_NAME_*.py run in the environment that
`make peers` makes from NAME.txt, and are skipped in any other."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_LINES = pytest.StashKey[list[str]]()


class _OfAnotherEnvironment(pytest.Module):
    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip(f"{self.path.name} runs in an environment of its own: make peers")


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    """Modules of other environments are not imported."""
    of_environment = f"{module_path.stem}_".startswith(f"test_{Path(sys.prefix).name}_")
    if module_path.parent != Path(__file__).parent or of_environment:
        return None
    return _OfAnotherEnvironment.from_parent(parent, path=module_path)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a law over the families, or the refused options, that its class names."""
    for name, values in (("trained", "families"), ("option", "refused")):
        if metafunc.cls is not None and name in metafunc.fixturenames:
            metafunc.parametrize(name, getattr(metafunc.cls, values))


def pytest_configure(config: pytest.Config) -> None:
    """Room for what the tests say."""
    config.stash.setdefault(_LINES, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Record of the comparisons, with versions."""
    for line in terminalreporter.config.stash[_LINES]:
        terminalreporter.write_line(line)


@pytest.fixture
def say(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Print a line at the end, behind the module's VERSION and the family of a test's parameter."""
    given = getattr(request.node, "callspec", None)
    family = given.params.get("family") if given else None
    name = ", ".join(filter(None, (request.module.VERSION, family)))
    return lambda text: request.config.stash[_LINES].append(f"{name}: {text}")


@pytest.fixture(autouse=True)
def _packs_of_dialogues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment variables for the packs of `case`."""
    monkeypatch.setenv("OFFLINE_PACKED_DATA", "1")
    monkeypatch.setenv("OFFLINE_PACKING_BMR", "1")


@pytest.fixture(params=["captioning", "vqa", "bmr"])
def task(
    request: pytest.FixtureRequest, _packs_of_dialogues: None, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Each task, with the environment variables for its packs."""
    for task in ("vqa", "bmr"):
        monkeypatch.setenv(f"OFFLINE_PACKING_{task.upper()}", str(int(task == request.param)))
    return str(request.param)


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest) -> str:
    """Family of `case`: that of a test's parameter, or the module's FAMILY."""
    return str(getattr(request, "param", getattr(request.module, "FAMILY", "qwen2_5_vl")))


@pytest.fixture(scope="module")
def case(family: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny checkpoint, and packs of dialogues with no picture, one, or two for it."""
    from tests.helpers.peers import small_checkpoint, small_packs  # not in every environment

    root = tmp_path_factory.mktemp(family)
    checkpoint = small_checkpoint(family, root / "checkpoint")
    return checkpoint, small_packs(family, checkpoint, root)


@pytest.fixture(scope="module")
def video_packs(family: str, case: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packs of dialogues with videos, images, and both for that checkpoint. Frames are resized as
    transformers' video processors do."""
    from tests.helpers.peers import pack_dialogues
    from tests.helpers.videos import video_pairs

    root = tmp_path_factory.mktemp("videos")
    return pack_dialogues(video_pairs(root / "source", 16), family, case[0], root, resize="torch")


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Packed folders by task: those of `make demo`, or of a smaller one."""
    from tests.helpers.peers import demo_folders  # not in every environment

    return demo_folders(tmp_path_factory.mktemp("demo"))
