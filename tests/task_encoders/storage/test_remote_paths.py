"""Objects appear whole or not at all; requests that fail are repeated, refused ones are not."""

import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from s3fs import S3FileSystem

from offline_packing.storage.files import (
    atomic_file,
    hash_bytes,
    hash_file,
    load_array,
    remove_folder,
    scratch_folder,
    write_atomically,
)
from offline_packing.storage.key_set import KeySet, hash_keys, sort_hashes
from task_encoders.storage import remote_paths, remote_requests
from task_encoders.storage.paths import StorageError, path_of, read_range
from task_encoders.storage.remote_requests import RemoteError
from tests.helpers.object_store import PART_BYTES, Faults, ObjectStore

#: Bytes that are sent in several parts.
LARGE = bytes(range(256)) * (5 * PART_BYTES // 256) + b"end"


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_requests, "WAITS", (0.01,) * 5)


@pytest.fixture(params=["s3", "memory", "msc"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An empty folder of a storage."""
    if request.param == "s3":
        return path_of(f"{request.getfixturevalue('bucket')}/a")
    if request.param == "msc":
        return path_of(f"msc://__filesystem__{tmp_path}/a")
    return path_of(f"memory://{tmp_path.name}/a")


def test_paths_are_read_and_written_as_local_ones(folder: Path) -> None:
    assert not folder.exists()
    assert list(folder.iterdir()) == []
    assert not (folder / "x.bin").is_file()
    with pytest.raises(FileNotFoundError):
        (folder / "x.bin").read_bytes()
    with atomic_file(folder / "x.bin") as file:
        file.write(b"abc")
        file.seek(0)
        file.write(LARGE)
    write_atomically(folder / "b/y.json", b"small")
    assert folder.is_dir()
    assert [path.name for path in folder.iterdir()] == ["b", "x.bin"]
    assert [str(path) for path in folder.glob("*.bin")] == [f"{folder}/x.bin"]
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == ["x.bin", "y.json"]
    assert (folder / "b/y.json").read_text() == "small"
    assert str((folder / "b/y.json").relative_to(folder)) == "b/y.json"
    assert (folder / "x.bin").stat().st_size == len(LARGE)
    assert hash_file(folder / "x.bin") == hash_bytes(LARGE)
    assert list((folder / "nothing").rglob("*")) == []
    with (folder / "x.bin").open("rb") as file:
        assert file.seek(-3, 2) == len(LARGE) - 3
        assert file.read() == b"end"
        file.seek(100)
        assert file.read(1000) == LARGE[100:1100]
    write_atomically(folder / "b/y.json", b"other")
    assert pickle.loads(pickle.dumps(folder / "b/y.json")).read_bytes() == b"other"
    (folder / "b/y.json").replace(folder / "z.json")
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == ["x.bin", "z.json"]
    (folder / "z.json").unlink()
    (folder / "z.json").unlink(missing_ok=True)
    remove_folder(folder)
    remove_folder(folder)
    assert not folder.exists()


def test_arrays_and_key_sets_are_mapped(folder: Path) -> None:
    with atomic_file(folder / "a.npy") as file:
        np.save(file, np.arange(7))
    assert load_array(folder / "a.npy").tolist() == list(range(7))
    keys = KeySet(folder / "skip/keys.npy")
    keys.save(sort_hashes([hash_keys(["a", "b"])]))
    assert pickle.loads(pickle.dumps(keys)).find(["b", "c"]).tolist() == [True, False]
    scratch = scratch_folder(folder / "skip")
    assert any(scratch.iterdir())
    remove_folder(scratch)


@pytest.mark.parametrize("content", [b"", b"small"])
def test_a_small_object_is_opened_by_two_requests(
    object_store: ObjectStore, bucket: str, content: bytes
) -> None:
    path = path_of(f"{bucket}/a")
    write_atomically(path, content)
    object_store.set_faults()
    with path.open("rb") as file:
        assert file.read() == content
    counts = object_store.counts()
    assert (counts["HEAD"], counts.get("GET", 0)) == (1, bool(content))


def test_large_objects_are_sent_in_parts_or_not_at_all(
    object_store: ObjectStore, bucket: str
) -> None:
    with suppress(KeyboardInterrupt), atomic_file(path_of(f"{bucket}/a")) as file:
        file.write(LARGE)
        raise KeyboardInterrupt
    assert object_store.keys(bucket) == []
    assert object_store.counts().get("PUT", 0) == 0
    write_atomically(path_of(f"{bucket}/a"), LARGE)
    assert object_store.counts()["PUT"] == len(LARGE) // PART_BYTES + 1
    assert object_store.objects(bucket) == {"a": LARGE}


@pytest.mark.usefixtures("no_waiting")
def test_failed_requests_are_repeated_and_counted(object_store: ObjectStore, bucket: str) -> None:
    folder: Any = path_of(f"{bucket}/a")
    before = remote_requests.REPEATS["requests"]
    object_store.fail(0.15)
    for i in range(6):
        with atomic_file(folder / f"{i}.bin") as file:
            file.write(LARGE[i:])
        assert (folder / f"{i}.bin").read_bytes() == LARGE[i:]
    assert object_store.counts()["failed"] > 3
    assert remote_requests.REPEATS["requests"] > before
    assert len(list(folder.iterdir())) == 6
    object_store.set_faults()
    folder.abort_uploads()
    assert object_store.unfinished_uploads(bucket.removeprefix("s3://")) == []


@pytest.mark.usefixtures("no_waiting")
def test_a_storage_that_goes_on_failing_ends_the_run(
    object_store: ObjectStore, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path: Any = path_of(f"{bucket}/a")
    calls: list[Any] = []

    def fail(*arguments: Any, **options: Any) -> None:
        calls.append(arguments)
        raise ConnectionResetError("told to")

    monkeypatch.setattr(path.fs, "put_file", fail)
    with pytest.raises(RemoteError, match=r"s3://.*/a cannot be written: .*told to; run again"):
        write_atomically(path, b"x")
    assert len(calls) == 6


def test_a_refused_write_is_one_line(object_store: ObjectStore, bucket: str) -> None:
    object_store.set_faults(Faults(writes_allowed=2))
    with (
        pytest.raises(RemoteError, match=r"cannot be written: .*; check that the bucket exists"),
        atomic_file(path_of(f"{bucket}/a")) as file,
    ):
        file.write(LARGE)
    assert object_store.counts()["denied"] <= len(LARGE) // PART_BYTES + 1
    assert object_store.keys(bucket) == []
    assert object_store.unfinished_uploads(bucket.removeprefix("s3://")) == []
    object_store.set_faults()
    with pytest.raises(RemoteError, match=r"s3://no-such-bucket/a cannot be written: .*check that"):
        write_atomically(path_of("s3://no-such-bucket/a"), b"x")


def test_uploads_that_kills_left_are_aborted(object_store: ObjectStore, bucket: str) -> None:
    name = bucket.removeprefix("s3://")
    for key in (*(f"mine/{i}" for i in range(3)), "mine-too/a"):
        object_store.client.create_multipart_upload(Bucket=name, Key=key)
    remote: Any = path_of(f"{bucket}/mine")
    assert remote.abort_uploads() == 3
    assert object_store.unfinished_uploads(name) == ["mine-too/a"]
    assert remote.abort_uploads() == 0


def test_other_processes_writes_are_seen(object_store: ObjectStore, bucket: str) -> None:
    folder = path_of(f"{bucket}/a")
    write_atomically(folder / "x", b"1")
    assert [path.name for path in folder.iterdir()] == ["x"]
    name = bucket.removeprefix("s3://")
    object_store.client.put_object(Bucket=name, Key="a/y", Body=b"2")
    object_store.client.delete_object(Bucket=name, Key="a/x")
    assert [path.name for path in folder.iterdir()] == ["y"]
    assert not (folder / "x").exists()


def test_half_a_key_is_one_line(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setattr(remote_paths, "_FILESYSTEMS", {})
    S3FileSystem.clear_instance_cache()
    with pytest.raises(RemoteError, match=r"AWS_SECRET_ACCESS_KEY; check that the bucket exists"):
        path_of(f"{bucket}/a").exists()


@pytest.mark.usefixtures("no_waiting")
def test_ranges(folder: Path) -> None:
    """Bytes after the end are not there; no request for them is repeated."""
    write_atomically(folder / "a", b"0123456789")
    before = remote_requests.REPEATS["requests"]
    assert read_range(folder / "a", 2, 5) == b"234"
    assert read_range(folder / "a", 8, 15) == b"89"
    with suppress(OSError):  # so S3
        assert read_range(folder / "a", 20, 25) == b""
    with pytest.raises(FileNotFoundError):
        read_range(folder / "b", 0, 1)
    assert remote_requests.REPEATS["requests"] == before


def test_unknown_storages_are_refused() -> None:
    with pytest.raises(StorageError, match=r"'nowhere://a' cannot be opened: .*pip install"):
        path_of("nowhere://a")
    with pytest.raises(StorageError, match=r"'s3:/b/x' lacks a slash; write s3://b/x"):
        path_of("s3:/b/x")
    for url in ("s3://", "s3:///x", "msc:///"):  # they would be local folders
        with pytest.raises(StorageError, match=r"names no bucket; write (s3|msc)://BUCKET/FOLDER"):
            path_of(url)
    assert path_of("C:\\packs") == Path("C:\\packs")
