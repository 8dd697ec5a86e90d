"""Mutated JSON of an output and of an export: each verb refuses it in one line, or makes it again;
and `verify --discard`, then `run` give the same bytes."""

import contextlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from pydantic import ValidationError

from offline_packing.errors import StageError
from offline_packing.export.raw_packs import export
from offline_packing.report.preview import preview
from offline_packing.report.report import report
from offline_packing.runs import manifest as manifests
from offline_packing.runs.run import Run
from offline_packing.storage.files import seal, to_json
from offline_packing.upkeep.blend import blend
from offline_packing.upkeep.pack import pack
from offline_packing.upkeep.status import status
from offline_packing.verify.verdict import check
from offline_packing.verify.verify import discard
from task_encoders.loading.folder_shards import PackedFolderError
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.packs.manifest import Manifest, ManifestError
from tests.helpers.datasets import captioning_pairs, make_run, write_json
from tests.helpers.outputs import files_of

OUTPUT = (
    "manifest.json",
    ".nv-meta/.info.json",
    ".nv-meta/split.yaml",
    ".nv-meta/dataset.yaml",
    "_packing/index.json",
    "_packing/verdict.json",
    "_packing/plan/stage.json",
    "_packing/plan/plan.json",
    "_packing/write/started.json",
    "_packing/write/train-000000.json",
    "_packing/report/report.json",
    "_packing/index/_started.json",
    "_packing/damaged/found.json",
)
#: Of an output whose index is not complete.
UNFINISHED = ("_packing/index/_started.json", "_packing/index/_total.json")
EXPORT = ("_export/source.json", "_export/manifest.json", "_export/train-000000.json")

STRANGE: list[Any] = [
    *(None, True, -1, 0, 2**62, -(2**62), 1e308, "", "x" * 300, "../../x", "/x", "\0", [], {}),
    *([[]], [None], {"a": 1}, {"": {}}, json.loads("[" * 100 + "]" * 100)),
]
#: These overflow the stack of a parser that follows them.
NESTED = (b"[" * 100_000, b"- " * 100_000, b'{"a":' * 100_000)
WHOLE = (b"", b"{}", b"[]", b"null", b"7", *NESTED, b"\xff\0PK" * 50)


def mutate(content: Any, dice: random.Random) -> Any:
    """The content with another value at a random place, or without it."""
    node, key = {"": content}, ""
    root = node
    while isinstance(node[key], dict | list) and node[key] and (dice.random() < 0.8 or key == ""):
        node = node[key]
        key = dice.choice([*node] if isinstance(node, dict) else range(len(node)))
    kind = dice.randrange(6)
    if kind == 0 and isinstance(node, dict) and node is not root:
        del node[key]
    elif kind == 1 and isinstance(node[key], dict):
        node[key] = [*node[key].items()]
    elif kind == 2 and isinstance(node, dict) and isinstance(node[key], str):
        node["../../x"] = node[key]
    else:
        node[key] = dice.choice(STRANGE)
    return root[""]


def reseal(content: Any, name: str) -> bytes:
    """The file of content whose hashes fit, as somebody makes it on purpose."""
    content.pop("xxh3_128_of_this", None)
    if name == "manifest.json":
        with contextlib.suppress(ValidationError):
            made = Manifest.model_validate_json(json.dumps(content))
            content = made.model_copy(update={"content_hash": manifests._hash(made)}).model_dump()
    return to_json(seal(content))


def damage(path: Path, dice: random.Random) -> bool:
    """Damage a file; whether its hashes still fit."""
    before = path.read_bytes()
    kind = dice.randrange(10)
    if kind == 0:
        path.write_bytes(before[: dice.randrange(len(before))])
    elif kind == 1:
        path.unlink()
        (path / "inner").mkdir(parents=True) if dice.random() < 0.5 else path.mkdir()
    elif kind < 4:
        path.write_bytes(dice.choice(WHOLE))
    elif path.suffix == ".json":
        content = mutate(orjson.loads(before), dice)
        is_resealed = isinstance(content, dict) and dice.random() < 0.6
        with contextlib.suppress(TypeError):  # beyond 64 bits
            path.write_bytes(reseal(content, path.name) if is_resealed else to_json(content))
            return is_resealed
    else:
        path.write_bytes(before.replace(b"train", dice.choice([b"../x", b"[", b"7", b"{"])))
    return False


def read_by_loader(run: Run) -> None:
    with contextlib.suppress(PackedFolderError, ManifestError):
        _ = [*PackedFolder(run.workspace.root)]


VERBS: dict[str, Callable[[Run], Any]] = {
    "run": lambda run: pack(run.config),
    "verify": check,
    "discard": discard,
    "status": status,
    "report": report,
    "preview": lambda run: list(preview(run, num_packs=1)),
    "export": lambda run: export(run.workspace.root, run.workspace.root.parent / "raw"),
    "blend": lambda run: blend([run.workspace.root, run.workspace.root.parent / "other"]),
    "loader": read_by_loader,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two outputs, one of them not complete, and an export."""
    folder = tmp_path_factory.mktemp("base")
    root = captioning_pairs(folder / "data", 10)
    (root / "part1" / "broken.json").write_text("{")
    for name in ("out", "other", "half"):
        run = run_of(folder, name)
        pack(run.config)
    export(folder / "out", folder / "raw")
    half = folder / "half"
    for path in (half / "manifest.json", *(half / "_packing").glob("*.json")):
        path.unlink()
    for name in ("plan", "write", "report"):
        shutil.rmtree(half / "_packing" / name)
    (half / UNFINISHED[1]).write_bytes(to_json({"parts": 2, "records": 11}))
    (half / "_packing/index/part-00001.parquet").unlink()
    return folder


def run_of(folder: Path, name: str = "out", data: Path | None = None) -> Run:
    output = {"split": {"train": 0.7, "val": 0.3}, "packs_per_shard": 1, "key_prefix": "p_"}
    sections = {"output": output, "engine": {"samples_per_part": 8}}
    pack_options = {"seq_length": 256, "max_set_aside": 1}
    return make_run(data or folder / "data", folder / name, pack=pack_options, **sections)


def check_case(seed: int, base: Path, folder: Path) -> None:
    dice = random.Random(seed)
    kind = dice.choice(["out"] * 8 + ["raw"] + ["half"])
    name = dice.choice({"out": OUTPUT, "raw": EXPORT, "half": UNFINISHED}[kind])
    expected = files_of(base / "other")
    for copied in ("out", "other", "raw") if kind != "half" else ("half",):
        shutil.copytree(base / copied, folder / copied)
    run = run_of(folder, "out" if kind == "raw" else kind, base / "data")
    if name == "_packing/damaged/found.json":
        write_json(folder / kind / name, {"manifest.json": "is missing"})
    is_sealed = damage(folder / kind / name, dice)
    verb = {"raw": "export", "half": dice.choice(["run", "status"])}.get(kind)
    verb = verb or dice.choice([*VERBS])
    case = f"seed {seed}: {verb} of {kind}/{name}"
    with contextlib.suppress(StageError), unexpected(case):
        VERBS[verb](run)
    if kind == "raw":
        return
    with contextlib.suppress(StageError), unexpected(case):
        discard(run)
    text = ""
    try:
        with unexpected(case):
            pack(run.config)
            found = files_of(run.workspace.root)
            # `_started.json` is read while an index is not complete only.
            differ = {one for one, _ in found.items() ^ expected.items()} - {UNFINISHED[0]}
            assert is_sealed or not differ, (case, differ)
    except StageError as error:
        text = str(error)
    assert not text or is_sealed, (case, text)
    assert "--discard" not in text, case


@contextlib.contextmanager
def unexpected(case: str) -> Any:
    """Name the case of an error that is not one of ours."""
    try:
        yield
    except StageError as error:
        if "Errno" not in str(error):
            raise
        raise AssertionError(f"{case}: {error}") from error
    except Exception as error:
        raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error


def check_seeds(seeds: range, base: Path, folder: Path) -> None:
    for seed in seeds:
        check_case(seed, base, folder / f"{seed}")
        shutil.rmtree(folder / f"{seed}")


@pytest.mark.parametrize("name", [name for name in OUTPUT if name.startswith(".nv-meta")])
def test_metadata_that_are_nested_deeply(base: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(base / "out", tmp_path / "out")
    for content in NESTED:
        (tmp_path / "out" / name).write_bytes(content)
        with pytest.raises(PackedFolderError, match="cannot be read"):
            PackedFolder(tmp_path / "out")


def test_mutated(base: Path, tmp_path: Path) -> None:
    check_seeds(range(150), base, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(150, 600, 150))
def test_many_mutated(base: Path, tmp_path: Path, first: int) -> None:
    check_seeds(range(first, first + 150), base, tmp_path)
