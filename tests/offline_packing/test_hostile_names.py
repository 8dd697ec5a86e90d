"""Names in somebody else's output that lead out of it: every reader refuses them in one line, and
no file outside is written, moved or removed."""

import contextlib
import io
import itertools
import json
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from offline_packing.errors import StageError
from offline_packing.export.raw_packs import export
from offline_packing.measure.measure import measure
from offline_packing.report.preview import preview
from offline_packing.report.report import report
from offline_packing.runs import manifest as manifests
from offline_packing.runs.run import Run
from offline_packing.storage.files import hash_file, seal, to_json
from offline_packing.storage.tars import scan_tar
from offline_packing.upkeep.blend import blend
from offline_packing.upkeep.status import status
from offline_packing.verify.verify import discard, verify
from task_encoders.loading.folder_shards import PackedFolderError
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.packs.manifest import Manifest, ManifestError, read_manifest
from task_encoders.storage.paths import plain_name
from tests.helpers.datasets import captioning_pairs, make_run, packed_run
from tests.helpers.outputs import files_of

_WAYS = "../ ../../ / /tmp/ // a/../ a/../../ a/b/../../../ a// a/./ /../ ./../ ./ ../a/".split()
_ENDS = ("x", "x.tar", ".x", "sitecustomize.py", ".ssh/keys", "a b/c", "ü", "%2e%2e", "...", "a\\b")
NAMES = [
    *dict.fromkeys(way + end for way, end in itertools.product(_WAYS, _ENDS)),
    *("", ".", "..", "/", "//", "a/", "a/.", "a/..", "../", "\0", "a\0", "a/\0", "a\0/../b", "./"),
    *(f"{way}{end}/" for way, end in itertools.product(_WAYS[:5], _ENDS)),
    *("x" * 256, "a/" + "x" * 300, "ü" * 128, "x" * 10_000),
]
PLAIN = (
    "a",
    "a.tar",
    "train-0000/train-000000.tar",
    ".nv-meta/.info.json",
    "..a",
    "a..b",
    "ü" * 127,
)


def test_there_are_enough() -> None:
    assert len({*NAMES}) >= 200
    for name in PLAIN:
        assert plain_name(name) == name


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An output in two splits."""
    folder = tmp_path_factory.mktemp("packed")
    output = {"split": {"train": 0.7, "val": 0.3}, "packs_per_shard": 1, "key_prefix": "p_"}
    return packed_run(captioning_pairs(folder / "data", 8), folder / "out" / "it", output=output)


@contextlib.contextmanager
def kept(run: Run) -> Iterator[None]:
    """Undo changes of the output; nothing beside it may change."""
    root, copy = run.workspace.root, run.workspace.root.parent.parent / "copy"
    shutil.copytree(root, copy, dirs_exist_ok=True)
    before = files_of(copy.parent)
    yield
    shutil.rmtree(root)
    copy.rename(root)
    after = files_of(root.parent.parent)
    assert {name for name, _ in after.items() ^ before.items()} <= {
        name for name in before if name.startswith("copy/")
    }


def write_manifest(run: Run, change: Callable[[Any], None]) -> None:
    """Change a manifest; its hashes fit."""
    content = json.loads(run.workspace.manifest.read_bytes())
    change(content)
    made = Manifest.model_construct(**content)
    with contextlib.suppress(ValueError):
        made = Manifest.model_validate(content)
        content = made.model_copy(update={"content_hash": manifests._hash(made)}).model_dump()
    content.pop("xxh3_128_of_this", None)
    run.workspace.manifest.write_bytes(to_json(seal(content)))


def in_shard(content: Any, name: str) -> None:
    content["shards"][0]["name"] = name


def in_split(content: Any, name: str) -> None:
    content["shards"][0]["split"] = name
    content["counts"]["packs"][name] = 1


def in_metadata(content: Any, name: str) -> None:
    content["metadata"][name] = "0" * 32


def beside(run: Run, **options: Any) -> Run:
    """A run over the same data that reads the output."""
    source = {"format": "pairs", "path": run.config.source[0].path, "task": "captioning"}
    return make_run({**source, **options}, run.workspace.root.parent / "beside")


VERBS: dict[str, Callable[[Run], Any]] = {
    "verify": verify,
    "status": status,
    "report": report,
    "measure": measure,
    "preview": lambda run: list(preview(run, num_packs=1)),
    "blend": lambda run: blend([run.workspace.root]),
    "export": lambda run: export(run.workspace.root, run.workspace.root.parent / "raw" / "it"),
    "discard": discard,
    "stage": lambda run: measure(beside(run, format="index", path=str(run.workspace.root))),
    "skip": lambda run: measure(beside(run, skip=[str(run.workspace.root)])),
}


def refuses(verb: Callable[[Run], Any], run: Run) -> bool:
    """Whether a verb names damage, by an error or in its result."""
    try:
        found = verb(run)
    except StageError as error:
        return "damaged" in str(error) or "is not what was written" in str(error)
    return "is not what was written" in str(getattr(found, "problems", found))


@pytest.mark.parametrize(
    "verb", ["verify", "status", "report", "preview", "blend", "export", "discard"]
)
def test_of_a_manifest(packed: Run, verb: str) -> None:
    places = itertools.cycle((in_shard, in_split, in_metadata))
    for name, place in zip(NAMES, places, strict=False):
        before = packed.workspace.manifest.read_bytes()
        write_manifest(packed, lambda content, at=place, one=name: at(content, one))  # type: ignore[misc]
        with pytest.raises(ManifestError, match=r"is not the name of|should match pattern"):
            read_manifest(packed.workspace.root)
        assert refuses(VERBS[verb], packed), name
        shutil.rmtree(packed.workspace.damaged, ignore_errors=True)
        packed.workspace.manifest.write_bytes(before)
    with kept(packed):
        write_manifest(packed, lambda content: in_shard(content, "../../data/part0/000000.json"))
        assert refuses(VERBS[verb], packed)


@pytest.mark.parametrize("verb", ["status", "report", "measure", "discard", "stage", "skip"])
def test_of_an_index(packed: Run, verb: str) -> None:
    path = packed.workspace.index_info
    before = path.read_bytes()
    for number, name in enumerate(NAMES):
        content = json.loads(before)
        del content["xxh3_128_of_this"]
        hashes = content["hashes"]
        if number % 2:
            hashes["index"][name] = "0" * 32
        else:
            hashes[name] = hashes.pop("files")
        path.write_bytes(to_json(seal(content)))
        if verb == "discard":
            assert "_packing/index.json cannot be used" in discard(packed)
            shutil.rmtree(packed.workspace.damaged)
        else:
            assert refuses(VERBS[verb], packed), name
    path.write_bytes(before)


def test_of_a_plan_and_of_fragments(packed: Run) -> None:
    workspace = packed.workspace
    for path in (workspace.plan_info, workspace.fragment("train-000000")):
        before = path.read_bytes()
        for name in NAMES:
            content = json.loads(before)
            del content["xxh3_128_of_this"]
            if path == workspace.plan_info:
                content["files"][name] = "0" * 32
            else:
                content["split" if "/" in name else "name"] = name
            path.write_bytes(to_json(seal(content)))
            assert refuses(status, packed), (path, name)
        path.write_bytes(before)


def write_tar(path: Path, name: str) -> None:
    """A tar with a member that has this name and, before it, one of a pack."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for one in ("p_ps_00000000.img000.png", name):
            member = tarfile.TarInfo(one)
            member.size = 2
            tar.addfile(member, io.BytesIO(b"{}"))


def test_of_members_that_are_exported(packed: Run) -> None:
    root, folder = packed.workspace.root, packed.workspace.root.parent / "raw"
    tar, manifest = root / "train-000000.tar", packed.workspace.manifest.read_bytes()
    with kept(packed):
        names = [f"{name}.json" for name in NAMES if "\0" not in name and len(name) < 100]
        for name in (*names, "../../sitecustomize.py", "/etc/x.json", "sub/ps_0.json"):
            write_tar(tar, name)
            found = hash_file(tar)
            write_manifest(
                packed, lambda content, one=found: content["shards"][0].update(xxh3_128=one)
            )  # type: ignore[misc]
            with pytest.raises(StageError, match=r"not the name of a file|no file KEY|in a folder"):
                export(root, folder, progress=False)
            packed.workspace.manifest.write_bytes(manifest)
            shutil.rmtree(folder.with_name("raw.partial"))


def test_a_name_that_begins_with_a_dot_is_read(tmp_path: Path) -> None:
    """As `tar cf a.tar ./*` writes it."""
    write_tar(tmp_path / "a.tar", "./b.json")
    assert [entry.key for entry in scan_tar(tmp_path / "a.tar")] == ["p_ps_00000000", "./b"]


def test_of_shards_that_are_loaded(packed: Run) -> None:
    meta = packed.workspace.nv_meta
    for path in (meta / ".info.json", meta / "split.yaml"):
        before = path.read_bytes()
        for name in NAMES:
            content = yaml.safe_load(before)
            if path.suffix == ".json":
                content["shard_counts"][name] = 1
            else:
                content["split_parts"]["train"].append(name)
            path.write_bytes(to_json(content) if path.suffix == ".json" else _yaml(content))
            with pytest.raises(PackedFolderError, match="is not the name of a file"):
                PackedFolder(packed.workspace.root)
        path.write_bytes(before)


def _yaml(content: object) -> bytes:
    return yaml.safe_dump(content).encode()


def test_a_link_out_of_the_output(packed: Run, tmp_path: Path) -> None:
    """The folder that the link leads to belongs to somebody else, and is not moved."""
    with kept(packed):
        index = packed.workspace.index
        (tmp_path / "mine").mkdir()
        for path in index.iterdir():
            (tmp_path / "mine" / path.name).write_bytes(b"mine")
        shutil.rmtree(index)
        index.symlink_to(tmp_path / "mine")
        with pytest.raises(
            StageError, match=r"index is a link out of the output, to .*; remove it"
        ):
            discard(packed)
        assert {path.read_bytes() for path in (tmp_path / "mine").iterdir()} == {b"mine"}
        index.unlink()
