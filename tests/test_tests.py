"""The tests themselves: where they lie, and what they may import."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import distributed

from tests.helpers.rank_processes import RankError, run_ranks

TESTS = Path(__file__).parent
ROOT = TESTS.parent
#: Folders of tests that stand for no folder of code: what needs a GPU, or other packages.
OTHERS = {"gpu", "peers"}


def imported(path: Path) -> Iterator[str]:
    """Full names of all modules and names that a file imports, inside functions as well."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_test_imports_another() -> None:
    """Code that several tests need stands in tests/helpers, which in turn imports no test."""
    paths = list(TESTS.rglob("*.py"))
    assert len(paths) > 50
    found = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in paths
        for name in imported(path)
        if name.startswith("tests.") and not name.startswith("tests.helpers.")
    ]
    assert not found, found


def test_folders_mirror_the_packages() -> None:
    """tests/offline_packing/index tests offline_packing/index."""
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")} - {Path()}
    strays = {str(folder) for folder in folders if not (ROOT / folder).is_dir()}
    assert strays <= OTHERS, strays - OTHERS


def fail(without: Path | None = None) -> None:
    """Raise on every rank; with a path, only until it exists."""
    if without is not None and without.exists():
        return
    distributed.barrier()
    if without is not None:
        without.touch()
    raise RuntimeError(f"rank {distributed.get_rank()} in _new_process_group_helper")


def test_every_failed_rank_is_reported(tmp_path: Path) -> None:
    with (
        pytest.warns(UserWarning, match="a process group was not formed"),
        pytest.raises(RankError) as raised,
    ):
        run_ranks(2, tmp_path, fail)
    assert "rank 0 in" in str(raised.value)
    assert "rank 1 in" in str(raised.value)


def test_ranks_whose_group_was_not_formed_are_run_once_more(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="a process group was not formed"):
        assert run_ranks(2, tmp_path / "ranks", fail, tmp_path / "formed") == [None, None]
