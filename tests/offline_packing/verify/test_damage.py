"""One bit flipped in, or the loss of, any file of a finished output: verify names it."""

import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offline_packing.errors import StageError
from offline_packing.report.report import report
from offline_packing.runs.run import Run
from offline_packing.verify.verify import verify
from tests.helpers.datasets import (
    captioning_pairs,
    make_run,
    pack_all,
    packed_run,
    plan_index,
    write_json,
    write_planned,
)
from tests.helpers.repairs import repair

#: Damage that verify need not notice, and why.
UNCHECKED = {
    r"_packing/lock": "empty; holds the lock of a run",
    r"_packing/report/report\.(html|json)": "for people; `report` makes them anew",
    r"_packing/index/_started\.json": "read while the index is not complete only",
}
LAYOUTS = ("energon", "references", "indexed", "llava_onevision")

Edit = Callable[[Path], None]


def flip_middle(path: Path) -> None:
    """One bit; of a database, in a row: its pages have bytes that nothing is read from."""
    content = bytearray(path.read_bytes())
    place = content.rindex(b"ps_0000") if path.suffix == ".sqlite" else len(content) // 2
    content[place] ^= 1
    path.write_bytes(content)


EDITS = {"flipped": flip_middle, "deleted": Path.unlink}


@contextmanager
def edited(path: Path, edit: Edit) -> Iterator[None]:
    """An edit that is undone."""
    before = path.read_bytes()
    edit(path)
    yield
    path.write_bytes(before)


def finish(tmp_path: Path, layout: str = "energon") -> Run:
    """An output in two splits, with samples set aside in both stages."""
    root = captioning_pairs(tmp_path / "data", 32)
    write_json(root / "part0" / "long.json", {"captions": [{"content": "red " * 900}]})
    shutil.copy(root / "part0" / "000000.png", root / "part0" / "long.png")
    (root / "part1" / "broken.json").write_text("{")
    output = {"layout": layout, "split": {"train": 0.7, "val": 0.3}}
    run = make_run(root, tmp_path / "out", output=output)
    with run.workspace.lock():
        pack_all(run)
    report(run)
    return run


@pytest.fixture(
    scope="module",
    params=[
        *LAYOUTS[:2],
        *(pytest.param(one, marks=pytest.mark.exhaustive) for one in LAYOUTS[2:]),
    ],
)
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return finish(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def packed(tmp_path: Path) -> Run:
    """A small output that a test may change."""
    return packed_run(captioning_pairs(tmp_path / "data", 16), tmp_path / "out")


def files_of(run: Run) -> list[Path]:
    return sorted(path for path in run.workspace.root.rglob("*") if path.is_file())


def found_in(run: Run) -> str:
    """The problems that verify reports, or its error; empty where all is well."""
    try:
        result = verify(run)
    except StageError as error:
        return str(error)
    assert result.ok is (not result.problems)
    return "\n".join(result.problems)


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_every_file_is_checked(finished: Run, edit: Edit) -> None:
    root = finished.workspace.root
    assert found_in(finished) == ""
    files = files_of(finished)
    assert len(files) > 20
    unnoticed = []
    used = set()
    for path in files:
        name = str(path.relative_to(root))
        reason = next((pattern for pattern in UNCHECKED if re.fullmatch(pattern, name)), None)
        used.add(reason)
        if reason is not None:
            continue
        with edited(path, edit):
            # A manifest that is gone makes the output one that is not complete.
            texts = [name, str(path)]
            if name == "manifest.json" and edit is Path.unlink:
                texts.append(f"no manifest in {root}; run write first")
            found = found_in(finished)
            if not any(text in found for text in texts):
                unnoticed.append((name, found))
    assert unnoticed == []
    assert used - {None} == set(UNCHECKED)
    assert found_in(finished) == ""


@pytest.mark.parametrize("content", [b"7\n", b"[]", b"", b'{"a": 1}', None])
def test_json_that_is_no_object_or_lost_its_end(packed: Run, content: bytes | None) -> None:
    """Named like any other damage, and made again."""
    workspace = packed.workspace
    fragment = workspace.fragment("train-000000")
    for path in (
        workspace.manifest,
        workspace.index_info,
        workspace.plan_info,
        workspace.started,
        fragment,
    ):
        before = path.read_bytes()
        path.write_bytes(before[:-1] if content is None else content)
        result = verify(packed)
        assert not result.ok
        assert result.num_repairable == result.num_problems
        assert path.name in result.problems[0]
        repair(packed)
        assert path.read_bytes() == before


def test_database_is_compared_by_its_rows(packed: Run) -> None:
    """Other bytes, as another version of SQLite gives them, are not damage; a missing index is."""
    path = packed.workspace.nv_meta / "index.sqlite"
    before = path.read_bytes()
    with sqlite3.connect(path, isolation_level=None) as database:
        database.execute("PRAGMA page_size = 8192")
        database.execute("VACUUM")
    database.close()
    assert path.read_bytes() != before
    assert verify(packed).ok
    with sqlite3.connect(path) as database:
        database.execute("DROP INDEX idx_samples_by_tar_and_idx")
    database.close()
    assert ".nv-meta/index.sqlite differs" in verify(packed).problems[0]
    with sqlite3.connect(path) as database:
        database.execute("UPDATE samples SET byte_offset = 0")
    database.close()
    repair(packed)
    assert verify(packed).ok


def test_no_source_is_needed(finished: Run, tmp_path: Path) -> None:
    """Neither to verify a copy, nor to repair all but shards."""
    out = tmp_path / "copy"
    shutil.copytree(finished.workspace.root, out)
    sources = [{**finished.config.source[0].model_dump(), "path": str(tmp_path / "gone")}]
    output = {"layout": finished.config.output.layout, "split": finished.config.output.split}
    copy = make_run(sources, out, output=output)
    result = verify(copy)
    assert result.ok, result.problems
    assert result.num_samples == 32
    with pytest.raises(StageError, match=r"verify --deep needs the source: .*gone"):
        verify(copy, deep=True)
    for path in (copy.workspace.plan / "sample_ids.npy", *copy.workspace.nv_meta.glob("*")):
        path.unlink()
    repair(copy)
    assert verify(copy).ok
    patterns = ("*.tar", "*.bin", "train.jsonl")
    next(path for pattern in patterns for path in out.glob(pattern)).unlink()
    with pytest.raises(StageError, match="gone"):
        repair(copy)


def test_copy_without_the_plan(packed: Run) -> None:
    shutil.rmtree(packed.workspace.packing)
    with pytest.raises(StageError, match="_packing is missing, and with it the plan"):
        verify(packed)


def test_index_of_another_source_is_not_taken(packed: Run, tmp_path: Path) -> None:
    """Measured again it is another one: index and plan stay what they were."""
    record = next((tmp_path / "data").rglob("*.json"))
    record.write_bytes(record.read_bytes().replace(b" ", b"_"))  # other tokens, the same size
    part = packed.workspace.index / "part-00000.parquet"
    flip_middle(part)

    def content() -> dict[Path, bytes]:
        paths = packed.workspace.root.rglob("*")
        return {path: path.read_bytes() for path in paths if path.is_file()}

    before = content()
    with pytest.raises(StageError, match=rf"as recorded: .* modification time .*{record.name}"):
        repair(packed)
    after = content()
    after.pop(packed.workspace.damaged / "found.json")
    assert after == before


@pytest.mark.parametrize("name", ["sample_ids.npy", "pack_offsets.npy", "set_aside_ids.npy"])
@pytest.mark.parametrize("verb", [plan_index, write_planned, report])
def test_unreadable_plan_is_named(packed: Run, name: str, verb: Callable[[Run], Any]) -> None:
    path = packed.workspace.plan / name
    before = path.read_bytes()
    path.write_bytes(before[:8] + b"\xff\xff" + before[10:])  # the length of the header
    with pytest.raises(StageError, match=re.escape(name)):
        verb(packed)


def test_changed_plan_is_named(packed: Run) -> None:
    """An id beyond the index would be an IndexError."""
    path = packed.workspace.plan / "sample_ids.npy"
    ids = np.load(path)
    ids[3] = 1 << 20
    np.save(path, ids)
    for verb in (plan_index, write_planned, report):
        with pytest.raises(StageError, match=r"sample_ids\.npy differs from what was planned"):
            verb(packed)
    repair(packed)
    assert verify(packed).ok
