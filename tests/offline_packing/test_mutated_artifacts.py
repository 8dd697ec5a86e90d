"""Mutated JSON of an output and of an export, and names in it that lead elsewhere: each verb
refuses it in one line, or makes it again; no file outside is written, moved or removed; and
`verify --discard`, then `run` give the same bytes."""

import contextlib
import io
import itertools
import json
import random
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import orjson
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from offline_packing.errors import DamagedError, StageError
from offline_packing.export.export import export
from offline_packing.index.table import IndexInfo
from offline_packing.layouts.shards import ShardFragment
from offline_packing.report.preview import preview
from offline_packing.report.report import report
from offline_packing.runs import manifest as manifests
from offline_packing.runs.manifest import require_manifest
from offline_packing.runs.run import Run
from offline_packing.storage.files import hash_file, seal, to_json
from offline_packing.storage.receipts import STAGES
from offline_packing.storage.tars import scan_tar
from offline_packing.upkeep.blend import blend
from offline_packing.upkeep.pack import pack
from offline_packing.upkeep.status import status
from offline_packing.verify.verdict import check
from offline_packing.verify.verify import discard
from task_encoders.loading.folder_shards import PackedFolderError
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.packs.manifest import Manifest, ManifestError, read_manifest
from task_encoders.storage.paths import plain_name
from tests.helpers.datasets import captioning_pairs, make_run, write_json
from tests.helpers.outputs import files_of, reopen

OUTPUT = (
    "manifest.json",
    ".nv-meta/.info.json",
    ".nv-meta/split.yaml",
    ".nv-meta/dataset.yaml",
    *(f"_packing/{stage}.json" for stage in STAGES),
    *(f"_packing/copies/{stage}.json" for stage in STAGES),
    "_packing/plan/plan.json",
    "_packing/write/train-000000.json",
    "_packing/report/report.json",
    "_packing/damaged/found.json",
)
#: Of an output whose index is not complete.
UNFINISHED = ("_packing/measure.started.json",)
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
    half = run_of(folder, "half")
    half.drop("plan")
    reopen(half)
    (half.workspace.index / "part-00001.parquet").unlink()
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
            differ = {one for one, _ in found.items() ^ expected.items()}
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


@pytest.mark.parametrize("name", [name for name in OUTPUT if name.startswith(".nv-meta")])
def test_metadata_that_are_nested_deeply(base: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(base / "out", tmp_path / "out")
    for content in NESTED:
        (tmp_path / "out" / name).write_bytes(content)
        with pytest.raises(PackedFolderError, match="cannot be read"):
            PackedFolder(tmp_path / "out")


@pytest.mark.parametrize(
    "first", [pytest.param(i, marks=[pytest.mark.exhaustive] * (i > 0)) for i in range(0, 300, 25)]
)
def test_mutated(first: int, base: Path, tmp_path: Path) -> None:
    for seed in range(first, first + 25):
        check_case(seed, base, tmp_path / f"{seed}")
        shutil.rmtree(tmp_path / f"{seed}")


#: One of each kind, for every place of a name.
FEW = ("../../sitecustomize.py", "/tmp/x", "a/../../x", "", "a\0/../b", "x" * 256)


@given(st.text("./a\0ü", max_size=9) | st.text("./aü", min_size=250, max_size=300))
@settings(max_examples=300)
def test_plain_names_lead_nowhere_else(name: str) -> None:
    """A plain name is a relative path of files in a folder, spelled as pathlib spells it."""
    path = PurePosixPath(name)
    leads_out = path.is_absolute() or not {".", ".."}.isdisjoint({name, *path.parts})
    is_long = any(len(part.encode()) > 255 for part in path.parts)
    if str(path) == name and not (leads_out or is_long or "\0" in name):
        assert plain_name(name) == name
    else:
        with pytest.raises(ValueError, match="is not the name of a file"):
            plain_name(name)


@pytest.fixture
def out(base: Path, tmp_path: Path) -> Iterator[Run]:
    """A copy of an output; nothing beside it may change."""
    shutil.copytree(base / "out", tmp_path / "it" / "out")
    (tmp_path / "x").write_bytes(b"of somebody")
    before = files_of(base)
    yield run_of(tmp_path / "it", "out", base / "data")
    assert files_of(base) == before
    assert {path.name for path in tmp_path.iterdir()} == {"it", "x"}


Content = dict[str, Any]
#: Where a name stands in a manifest, an index, a plan and the record of a shard.
PLACES: dict[str, dict[str, Callable[[Content, str], object]]] = {
    "manifest.json": {
        "shard": lambda content, name: content["shards"][0].update(name=name),
        "split": lambda content, name: content["shards"][0].update(split=f"{name}/"),
        "metadata": lambda content, name: content["metadata"].update({name: "0" * 32}),
        "version": lambda content, name: content.update(version=3),
        "length": lambda content, name: content.update(seq_length=name),
    },
    "_packing/measure.json": {
        "file": lambda content, name: content["files"].update({name: "0" * 32})
    },
    "_packing/plan.json": {"file": lambda content, name: content["files"].update({name: "0" * 32})},
    "_packing/write/train-000000.json": {
        "shard": lambda content, name: content.update(name=name),
        "split": lambda content, name: content.update(split=f"{name}/"),
    },
}


REFUSED = (
    r"manifest\.json is damaged \(.*(is not the name|should match pattern|version: Input should be "
    "1 or 2|seq_length: Input should be a valid integer)"
)
#: What all verbs read them with.
READERS: dict[str, Callable[[Run], Any]] = {
    "manifest.json": lambda run: require_manifest(run.workspace.root),
    "_packing/measure.json": lambda run: IndexInfo.load(run.workspace.packing),
    "_packing/plan.json": lambda run: run.workspace.read_plan(),
    "_packing/write/train-000000.json": lambda run: ShardFragment.load(
        run.workspace.write / "train-000000.json"
    ),
}


@pytest.mark.parametrize("file", PLACES)
def test_names_that_lead_out(file: str, out: Run) -> None:
    path, root = out.workspace.root / file, out.workspace.root
    before = path.read_bytes()
    for (place, put), name in itertools.product(PLACES[file].items(), FEW):
        content = orjson.loads(before)
        put(content, name)
        path.write_bytes(reseal(content, path.name))
        if path.name == "manifest.json":
            with pytest.raises(ManifestError, match=REFUSED):
                read_manifest(root)
        with pytest.raises(DamagedError, match=r"is damaged|is not what was written"):
            READERS[file](out)
        assert f"{file} " in discard(out), (place, name)
        shutil.rmtree(out.workspace.damaged)
    path.write_bytes(before)
    assert READERS[file](out)


def write_tar(path: Path, name: str) -> None:
    """A tar with a member that has this name and, before it, one of a pack."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for one in ("p_ps_00000000.img000.png", name):
            member = tarfile.TarInfo(one)
            member.size = 2
            tar.addfile(member, io.BytesIO(b"{}"))


def test_members_that_lead_out_are_not_exported(out: Run, tmp_path: Path) -> None:
    tar, folder = out.workspace.root / "train-000000.tar", tmp_path / "it" / "raw"
    content = orjson.loads(out.workspace.manifest.read_bytes())
    for name in (*(f"{one}.json" for one in FEW[:3]), "sub/ps_0.json"):
        write_tar(tar, name)
        content["shards"][0]["xxh3_128"] = hash_file(tar)
        out.workspace.manifest.write_bytes(reseal(content, "manifest.json"))
        with pytest.raises(
            StageError, match=r"not the name of a file|no file KEY|no \.json member"
        ):
            export(out.workspace.root, folder, progress=False)
        shutil.rmtree(folder.with_name("raw.partial"))
    # As `tar cf a.tar ./*` writes it.
    write_tar(tmp_path / "it" / "a.tar", "./b.json")
    found = [entry.key for entry in scan_tar(tmp_path / "it" / "a.tar")]
    assert found == ["p_ps_00000000", "./b"]


def test_shards_that_lead_out_are_not_loaded(out: Run) -> None:
    for path in (out.workspace.nv_meta / ".info.json", out.workspace.nv_meta / "split.yaml"):
        before = path.read_bytes()
        for name in FEW:
            content = yaml.safe_load(before)
            if path.suffix == ".json":
                content["shard_counts"][name] = 1
            else:
                content["split_parts"]["train"].append(name)
            path.write_bytes(json.dumps(content).encode())  # which is YAML, too
            with pytest.raises(PackedFolderError, match="is not the name of a file"):
                PackedFolder(out.workspace.root)
        path.write_bytes(before)


def test_a_link_out_of_the_output(out: Run, tmp_path: Path) -> None:
    """The folder that the link leads to belongs to somebody else, and is not moved."""
    index, mine = out.workspace.index, tmp_path / "it" / "mine"
    mine.mkdir()
    for path in index.iterdir():
        (mine / path.name).write_bytes(b"mine")
    shutil.rmtree(index)
    index.symlink_to(mine)
    with pytest.raises(StageError, match=r"index is a link out of the output, to .*; remove it"):
        discard(out)
    assert {path.read_bytes() for path in mine.iterdir()} == {b"mine"}
