"""Packs in the trainers of others. test_NAME.py runs in the environment .peers/NAME, which `make
peers` makes from NAME.txt, and is skipped in any other."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_LINES = pytest.StashKey[list[str]]()


class _OfAnotherEnvironment(pytest.Module):
    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip(f"{self.path.name} runs in an environment of its own: make peers")


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    """Modules of other environments are not imported."""
    name = module_path.stem.removeprefix("test_")
    if module_path.parent != Path(__file__).parent or Path(sys.prefix).name == name:
        return None
    return _OfAnotherEnvironment.from_parent(parent, path=module_path)


def pytest_configure(config: pytest.Config) -> None:
    """Room for what the tests say."""
    config.stash.setdefault(_LINES, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was compared, with versions."""
    for line in terminalreporter.config.stash[_LINES]:
        terminalreporter.write_line(line)


@pytest.fixture
def say(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Print a line at the end."""
    return request.config.stash[_LINES].append


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Packed folders by task: those of `make demo`, or of a smaller one."""
    from tests.helpers.peers import demo_folders  # not in every environment

    return demo_folders(tmp_path_factory.mktemp("demo"))
