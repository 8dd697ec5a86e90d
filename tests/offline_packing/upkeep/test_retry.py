"""Whatever of an output is lost or damaged, one `retry` restores every byte from the source."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offline_packing.errors import StageError
from offline_packing.measure.measure import measure
from offline_packing.plan.plan import plan
from offline_packing.runs.run import Run
from offline_packing.upkeep.retry import retry
from offline_packing.verify.verify import verify
from offline_packing.write.write import write
from tests.helpers.datasets import captioning_pairs, make_run, pack_all
from tools.kill_test import content

LAYOUTS = ("energon", "indexed", "raw_packing", "references")
#: Read while an index is unfinished only, and not made again.
UNCHECKED = ("lock", "_started.json")

Edit = Callable[[Path], None]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    place = data.rindex(b"ps_0000") if path.suffix == ".sqlite" else len(data) // 2
    data[place] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


EDITS = (flip, cut, Path.unlink)


def edit_index(path: Path) -> None:
    """A table that can be read, of other lengths."""
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    at = table.column_names.index("num_tokens")
    pq.write_table(
        table.set_column(at, "num_tokens", table["num_tokens"].combine_chunks()[::-1]), path
    )


@pytest.fixture(scope="module", params=LAYOUTS)
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A tiny output of two parts and two splits."""
    folder = tmp_path_factory.mktemp(request.param)
    root = captioning_pairs(folder / "data", 24)
    (root / "part1" / "broken.json").write_text("{")
    output = {"layout": request.param, "split": {"train": 0.7, "val": 0.3}, "packs_per_shard": 1}
    run = make_run(root, folder / "out", output=output)
    pack_all(run)
    return run


@pytest.fixture
def files(finished: Run) -> Iterator[list[Path]]:
    """The files of an output, which a test damages and restores."""
    root = finished.workspace.root
    found = [path for path in sorted(root.rglob("*")) if path.is_file()]
    before = {path: path.read_bytes() for path in found}
    yield [path for path in found if path.name not in UNCHECKED]
    for path, data in before.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def check_restored(run: Run, before: dict[str, str], damaged: object) -> None:
    after = content(run.workspace.root)
    assert {name for name, _ in before.items() ^ after.items()} == set(), damaged


@pytest.mark.parametrize(
    "finished",
    [
        *("energon", "references"),
        *(pytest.param(one, marks=pytest.mark.exhaustive) for one in ("indexed", "raw_packing")),
    ],
    indirect=True,
)
def test_manifest_lost_and_another_file(finished: Run, files: list[Path]) -> None:
    """The only record of the hashes of stage.json, fragments and shards is gone."""
    before = content(finished.workspace.root)
    for path, edit in zip(files, itertools.cycle(EDITS), strict=False):
        finished.workspace.manifest.unlink()
        if path.exists():
            edit(path)
        retry(finished)
        check_restored(finished, before, (path, edit))


@pytest.mark.parametrize("finished", ["energon"], indirect=True)
@pytest.mark.parametrize("edit", [cut, edit_index])
@pytest.mark.parametrize("without", [(), ("stage.json",), ("stage.json", "manifest.json")])
def test_index_lost_and_a_part(
    finished: Run, files: list[Path], edit: Edit, without: tuple[str, ...]
) -> None:
    before = content(finished.workspace.root)
    finished.workspace.index_info.unlink()
    edit(finished.workspace.index / "part-00001.parquet")
    for path in files:
        if path.name in without:
            path.unlink()
    retry(finished)
    check_restored(finished, before, edit)
    assert verify(finished, deep=True).ok


def test_five_files(finished: Run, files: list[Path]) -> None:
    before = content(finished.workspace.root)
    for first in range(0, len(files), 5):
        some = dict(zip(files[first : first + 5], itertools.cycle(EDITS), strict=False))
        for path, edit in some.items():
            edit(path)
        retry(finished)
        check_restored(finished, before, some)


@pytest.mark.parametrize("finished", ["energon"], indirect=True)
def test_remedy_that_is_named_works(finished: Run, files: list[Path]) -> None:
    """`run` without a manifest, and a damaged file: what it says ends it."""

    def run_again() -> None:
        samples = measure(finished)
        write(finished, samples, plan(finished, samples))

    before = content(finished.workspace.root)
    said: list[str] = []
    for path in files:
        if not path.is_relative_to(finished.workspace.packing):
            continue
        finished.workspace.manifest.unlink()
        flip(path)
        try:
            run_again()
        except StageError as error:
            said.append(str(error))
        retry(finished)
        check_restored(finished, before, path)
    assert len(said) > 5
    assert [text for text in said if "; retry " not in text or "overwrite" in text] == []


def test_unfinished_index_is_kept(tmp_path: Path) -> None:
    """Nothing was made from it: only a part that cannot be read is measured again."""
    run = make_run(captioning_pairs(tmp_path / "data", 24), tmp_path / "out")
    measure(run)
    before = content(run.workspace.root)
    run.workspace.index_info.unlink()
    kept, damaged = (run.workspace.index / f"part-0000{i}.parquet" for i in range(2))
    cut(damaged)
    time = kept.stat().st_mtime_ns
    measure(run)
    assert content(run.workspace.root) == before
    assert kept.stat().st_mtime_ns == time
