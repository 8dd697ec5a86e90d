"""Packs by their number, here and in object storage, equal those of Energon's loader, bytes and
tensors; and how often the packs of a folder or a metadataset come in an epoch."""

import dataclasses
import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.energon.epathlib import EPath
from torch.utils.data import DataLoader

from launch.data.packed_data import read_packed_data
from offline_packing.errors import StageError
from offline_packing.runs.run import Run
from task_encoders.loading.packed_dataset import get_packed_train_dataset, get_packed_val_dataset
from task_encoders.loading.packed_folder import PackedFolder, PackedFolderError
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.settings import PackingSettings, PackingSettingsError
from task_encoders.storage.energon_paths import energon_url
from task_encoders.storage.paths import StorageError, path_of
from task_encoders.storage.remote_requests import RemoteError
from tests.helpers.energon_batches import assert_same, batches_of, loading
from tests.helpers.object_store import ObjectStore
from tests.helpers.packed_runs import SEQ_LENGTH
from tests.helpers.prepared_folders import blend_of, legacy_vqa_folder, text_folder
from tests.world import World, task_encoder


@pytest.fixture
def run(world: World) -> Run:
    """Packed dialogues; packs with one sample, and with several."""
    return world.run("bmr", output={"split": {"train": 0.8, "val": 0.2}})


def test_numbers(run: Run) -> None:
    folder = PackedFolder(run.workspace.root)
    packs = list(folder)
    assert [pack.number for pack in packs] == list(range(len(folder)))
    assert folder[-1] == packs[-1]
    for number in (len(packs), -len(packs) - 1):
        with pytest.raises(IndexError, match=f"has {len(packs)} packs, no number {number}"):
            folder[number]
    assert type(folder[np.int64(1)].number) is int
    with pytest.raises(PackedFolderError, match="need a task_encoder"):
        folder.row(0)
    with pytest.raises(PackingSettingsError, match="holds bmr packs"):
        PackedFolder(folder.path, task_encoder(run, settings=PackingSettings(packed=True)))


def test_a_dataloader_reads_it(run: Run) -> None:
    """torch's map-style protocol: the folder travels to the workers, which encode rows of several
    packs as Energon's loader does. Without its collation, records of other keys would end in a bare
    KeyError."""
    folder: Any = PackedFolder(run.workspace.root, task_encoder(run))
    numbers = [[i, i + 1][: len(folder) - i] for i in range(0, len(folder), 2)]
    options: dict[str, Any] = {"batch_sampler": numbers, "num_workers": 1}
    found = list(DataLoader(folder, collate_fn=folder.collate, **options))
    assert_same(found, [folder.batch(own) for own in numbers])
    assert_same(found, batches_of(folder.path, folder.task_encoder, micro_batch_size=2))
    with pytest.raises(PackedFolderError, match=r"give the DataLoader collate_fn=folder\.collate"):
        list(DataLoader(folder, **options))


def test_a_blend(run: Run, world: World, tmp_path: Path) -> None:
    """Each pack once, and the datasets mixed; one of them refers to its media."""
    runs = (run, world.run("captioning", output={"media": "refer"}))
    single = {one.config.task: batches_of(one.workspace.root, task_encoder(one)) for one in runs}
    path = blend_of(tmp_path / "blend.yaml", [one.workspace.root for one in runs], epochs=1)
    folder = PackedFolder(path, task_encoder(run, settings=PackingSettings(packed=True)))
    found = [folder.batch([number]) for number in range(len(folder))]
    origins = [batch.__subflavors__[0]["offline_packing"] for batch in found]
    assert len(found) == sum(map(len, single.values()))
    for task, own in single.items():
        assert_same([b for b, o in zip(found, origins, strict=True) if o == task], own)
        assert task in origins[: len(origins) // 2]
        assert task in origins[len(origins) // 2 :]


def test_folders_of_others(run: Run, tmp_path: Path) -> None:
    """Prepared by Energon itself; with shards left out."""
    settings = PackingSettings(packed=True, vqa=True)
    encoder = task_encoder(run, seq_length=2048, check_lengths=False, settings=settings)
    legacy = legacy_vqa_folder(tmp_path / "legacy", packs=4)
    folder = PackedFolder(legacy, encoder)
    batches = batches_of(legacy, encoder)
    assert_same([folder.batch([number]) for number in range(4)], batches)
    assert len(folder) == 4
    split = legacy / ".nv-meta" / "split.yaml"
    text = split.read_text()
    split.write_text(text.replace("exclude: []", "exclude: [shard_0.tar]"))
    assert [pack.key for pack in PackedFolder(legacy)] == ["ps_00000002", "ps_00000003"]
    split.write_text(text.replace("exclude: []", "exclude: [shard_0.tar/ps_00000000]"))
    with pytest.raises(PackedFolderError, match="excludes single packs"):
        PackedFolder(legacy)


def test_what_is_damaged_is_named(tmp_path: Path) -> None:
    texts = text_folder(tmp_path / "packs", 5)
    tar, index = texts / "shard_0.tar", texts / "shard_0.tar.idx"
    whole, offsets = tar.read_bytes(), np.fromfile(index, "<u8")
    folder, start = PackedFolder(texts), int(offsets[2])
    for number, damaged, said in (
        (4, whole[: int(offsets[4]) + 700], " .* ends 324 bytes early"),
        (2, whole[:start] + b"x" + whole[start + 1 :], ""),
        (0, None, " .* verify --discard, then run"),
    ):
        tar.unlink() if damaged is None else tar.write_bytes(damaged)
        with pytest.raises(PackedFolderError, match=rf"shard_0\.tar, bytes{said}"):
            folder[number]
        assert damaged is None or folder[3].key == "03"
    for wrong in (offsets[:-1], np.append(offsets[:-1], offsets[3])):
        wrong.tofile(index)
        with pytest.raises(PackedFolderError, match=r"shard_0\.tar\.idx does not index the 5"):
            PackedFolder(texts)
    index.unlink()
    with pytest.raises(PackedFolderError, match=r"shard_0\.tar\.idx is missing"):
        PackedFolder(texts)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a with packs 00 to 02, b with 00 to 05."""
    root = tmp_path_factory.mktemp("folders")
    for name, size in (("a", 3), ("b", 6)):
        text_folder(root / name, size)
    return root


def keys(path: Path | str, split: str = "train") -> list[str]:
    """Each pack, as 'folder/number'."""
    folder = PackedFolder(path, split=split)
    root = [shard.path.parent.name for shard in folder.shards for _ in range(shard.num_packs)]
    return [f"{root[folder.order[i]]}{int(pack.key)}" for i, pack in enumerate(folder)]


def blend(folders: Path, *entries: str, split: str = "train") -> Path:
    return blend_of(folders / "blend.yaml", entries, splits=(split,))


def test_packs_of_an_epoch(folders: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By weight it is as long as each pack needs to come once; what comes more often is said."""
    each: list[tuple[list[str], str, str]] = [
        (["a, weight: 3", "b, weight: 6"], "b0 a0 b1 b2 a1 b3 b4 a2 b5", ""),
        (
            ["a, weight: 1", "b, weight: 1"],
            "a0 b0 a1 b1 a2 b2 a0 b3 a1 b4 a2 b5",
            "an epoch has 12 packs: 6 of the 3 of {}/a, 6 of the 6 of",
        ),
        (
            ["b, repetitions: 2, subset: {range: [1, 4]}", "a, subset: {range: [1, end]}"],
            "b1 b2 a1 b3 b1 b2 a2 b3",
            "an epoch has 8 packs",
        ),
        (["a, repetitions: 1.34"], "a0 a1 a2 a0", "an epoch has 4 packs"),
    ]
    for entries, expected, said in each:
        caplog.clear()
        assert keys(blend(folders, *(f"path: {one}" for one in entries))) == expected.split()
        assert said.format(folders) in caplog.text
        assert bool(caplog.records) == bool(said)
    parts = (f"path: {name}, weight: 1, split_part: train" for name in "ba")
    validated = keys(blend(folders, *parts, split="val"), "val")  # one after the other
    assert validated == "b0 b1 b2 b3 b4 b5 a0 a1 a2".split()


def test_what_is_no_folder_is_named(folders: Path, tmp_path: Path) -> None:
    packs, bare = (shutil.copytree(folders / "a", tmp_path / name) for name in ("a", "bare"))
    (packs / ".nv-meta" / "split.yaml").write_text("split_parts: [")
    shutil.rmtree(bare / ".nv-meta")
    (tmp_path / "lines.jsonl").write_bytes(b"{}\n")
    (tmp_path / "lines.jsonl.idx").write_bytes(np.array([0, 3], "<u8").tobytes())
    for path, split, said in (
        (folders / "a", "dev", "no split 'dev', only train"),
        (packs, "train", r"\.nv-meta cannot be read .*verify --discard, then run"),
        (bare, "train", "neither a packed folder nor a metadataset"),
        (bare / "nothing", "train", "neither a packed folder nor a metadataset"),
        (["path: nowhere, weight: 1"], "train", r"Energon cannot read it .*nowhere"),
        (["path: lines.jsonl, weight: 1"], "train", r"lines\.jsonl is no folder of shards"),
        (
            [f"path: {folders}/a, weight: 1", f"path: {folders}/b, weight: 0.001"],
            "train",
            "by weight, an epoch would have 6006 packs",
        ),
    ):
        given = blend(tmp_path, *path) if isinstance(path, list) else path
        with pytest.raises(PackedFolderError, match=said):
            PackedFolder(given, split=split)


SETTINGS = PackingSettings(packed=True, bmr=True)


@pytest.fixture
def layouts(world: World) -> Callable[[str], Path]:
    """Return the same dialogues with media that are copied or referred to."""
    pack = {"seq_length": SEQ_LENGTH, "max_samples": 2}
    return lambda media: world.packed("short", pack=pack, output={"media": media})


@pytest.fixture
def store(
    object_store: ObjectStore, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Path, str], str]:
    """Stores a folder; its URL, of the storage or of a profile of multi-storage-client."""
    options = {"base_path": bucket.removeprefix("s3://"), "endpoint_url": object_store.endpoint}
    provider = {"type": "s3", "options": {**options, "region_name": "us-east-1"}}
    config = {"profiles": {bucket[5:]: {"storage_provider": provider}}}
    (tmp_path / "msc.json").write_text(json.dumps(config))
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.json"))

    def stored(folder: Path, protocol: str) -> str:
        object_store.put_folder(folder, f"{bucket}/out/packs")
        return f"{protocol}://{bucket[5:]}/out/packs"

    return stored


def make_encoder(settings: PackingSettings = SETTINGS) -> PackedTaskEncoder:
    return PackedTaskEncoder(seq_length=SEQ_LENGTH, max_pixels=50176, settings=settings)


@pytest.mark.parametrize(("media", "protocol"), [("copy", "s3"), ("refer", "msc")])
def test_remote_packs_are_those_that_are_here(
    media: str, protocol: str, layouts: Any, store: Any
) -> None:
    """By Energon's loader, saved in the middle, and by number; also in a forked process, which has
    connections of its own."""
    url, encoder = store(layouts(media), protocol), make_encoder()
    workers = int(protocol == "s3")
    with loading(url, encoder, workers) as loader:
        found = list(itertools.islice(loader, 5))
        state = loader.save_state_rank()
    found += batches_of(url, encoder, workers, state=state)
    local = PackedFolder(layouts(media), encoder)
    expected = [local.batch([number]) for number in range(len(local))]
    assert_same(found, expected)
    assert not any(secret in repr(vars(state)) for secret in ("test-key", "test-secret"))
    folder: Any = PackedFolder(url, encoder)
    options: dict[str, Any] = {"collate_fn": folder.collate, "num_workers": 1 - workers}
    assert_same(list(DataLoader(folder, **options)), expected)


def test_a_blend_of_here_and_there(world: World, layouts: Any, store: Any, tmp_path: Path) -> None:
    captions = world.packed("few captions", pack={"seq_length": SEQ_LENGTH})
    url = energon_url(store(layouts("copy"), "s3"))
    found = []
    encoder = make_encoder(PackingSettings(packed=True))
    for number, other in enumerate((url, layouts("copy"))):
        entries = f"path: {captions}, repetitions: 1", f"path: '{other}', repetitions: 2"
        blend = blend_of(tmp_path / f"{number}.yaml", entries)
        batches = batches_of(blend, encoder)
        assert len(PackedFolder(blend, encoder)) == len(batches)
        found.append([dataclasses.replace(one, __key__=[]) for one in batches])
    assert_same(*found)


def test_a_blend_that_names_a_url_as_it_is(layouts: Any, store: Any, tmp_path: Path) -> None:
    blend = tmp_path / "blend.yaml"
    blend.write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n"
        f"    path: '{store(layouts('copy'), 's3')}'\n"
    )
    remedy = r"Energon reads s3://BUCKET/\.\.\. as msc://_s3-BUCKET/\.\.\."
    for read in (PackedFolder, read_packed_data):
        with pytest.raises((PackedFolderError, StageError), match=remedy):
            read(blend)


def test_forked_workers_have_connections_of_their_own(bucket: str) -> None:
    path = EPath(energon_url(bucket))
    inherited = path.fs.delegate  # what holds the connections
    child = os.fork()
    if not child:
        os._exit(int(path.fs.delegate is inherited))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert path.fs.delegate is inherited


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s3://no-such-bucket/packs", "(check that the bucket exists|does not exist)"),
        ("{}/nothing", "does not exist; check the address"),
        ("msc://no-such-profile/packs", 'Profile "no-such-profile"'),
        ("gopher://packs", "(Unsupported filesystem|by a profile of multi-storage-client)"),
    ],
)
def test_a_url_that_leads_nowhere(url: str, why: str, bucket: str) -> None:
    url, encoder = url.format(bucket), make_encoder()
    for read in (
        PackedFolder,
        lambda path: get_packed_train_dataset(path, encoder),
        lambda path: get_packed_val_dataset(path, encoder),
    ):
        with pytest.raises((StorageError, RemoteError), match=why) as caught:
            read(url)
        text = str(caught.value)
        assert url in text
        assert text.count("\n") == 0


def test_one_name_for_one_place() -> None:
    assert str(path_of("msc://_s3-packs/out")) == "s3://packs/out"
    assert energon_url("s3://packs/out") == "msc://_s3-packs/out"
    assert path_of("out/packed") == Path("out/packed")
    assert energon_url("out/packed") == "out/packed"
    with pytest.raises(StorageError, match=r"Energon reads az:// by a profile .* as msc://PROFILE"):
        energon_url("az://packs/out")
