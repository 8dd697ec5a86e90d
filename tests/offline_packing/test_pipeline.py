"""The whole mode on real files: bytes that stay, what is done again, what changed is refused; and
faults of the machine and its users."""

import errno
import hashlib
import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offline_packing.engines.local import LocalEngine
from offline_packing.errors import ConfigError, DiskFullError, StageError
from offline_packing.layouts import container
from offline_packing.layouts.shards import ShardTask
from offline_packing.measure import measure as measure_module
from offline_packing.measure.measure import measure
from offline_packing.measure.measure_part import MeasureTask, PartResult, measure_part
from offline_packing.runs.artifacts import config_fingerprint
from offline_packing.runs.run import Run, open_encoder
from offline_packing.storage import files
from offline_packing.storage.files import remove_temporaries, write_atomically
from offline_packing.verify.verify import verify
from offline_packing.write import write as write_module
from tests.helpers.command import Command, invoke
from tests.helpers.datasets import (
    captioning_pairs,
    config_file,
    make_run,
    pack_all,
    packed_run,
    plan_index,
    plan_summary,
    png,
    write_planned,
)
from tests.helpers.faults import KilledError, killing
from tests.helpers.outputs import files_of, reopen, repair
from tests.world import World, copy_of

STAGES = (measure, plan_index, write_planned)


@pytest.fixture
def packed(world: World, tmp_path: Path) -> Run:
    """40 captions in three parts and shards."""
    return copy_of(world.run("captioning"), tmp_path / "out")


@pytest.fixture
def planned(packed: Run) -> Run:
    """The same, without what `write` made."""
    packed.drop("write")
    return packed


@pytest.fixture
def own(tmp_path: Path) -> Run:
    """A run that is ready to write, from a source that a test may change."""
    run = make_run(captioning_pairs(tmp_path / "data"), tmp_path / "own")
    measure(run)
    plan_index(run)
    return run


def changed(run: Run, **sections: dict[str, Any]) -> Run:
    """Return a run over the same source and output under another configuration."""
    return make_run(run.config.source[0].model_dump(), run.workspace.root, **sections)


def test_what_is_complete_is_not_done_again(
    packed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither whole stages nor, after a kill, the parts that are there."""
    before = files_of(packed.workspace.root)
    run = make_run(packed.config.source[0].model_dump(), tmp_path / "killed")
    with monkeypatch.context() as patch:
        patch.setattr(measure_module, "measure_part", killing(measure_part, 2))
        patch.setattr(write_module, "write_shard", killing(lambda task: task, 0))
        pack_all(packed)
        with pytest.raises(KilledError):
            measure(run)
    assert files_of(packed.workspace.root) == before
    measured: list[int] = []

    def counted(task: MeasureTask) -> PartResult:
        measured.append(task.number)
        return measure_part(task)

    monkeypatch.setattr(measure_module, "measure_part", counted)
    measure(run)
    assert measured == [2]


@pytest.mark.parametrize(
    ("section", "name", "value", "stages"),
    [
        ("engine", "samples_per_part", 4, ()),
        ("pack", "seed", 1, STAGES[1:]),
        ("pack", "strategy", "best_fit_decreasing", STAGES[1:]),
        ("output", "packs_per_shard", 3, STAGES[2:]),
        ("output", "key_prefix", "x", STAGES[2:]),
        ("output", "media", "refer", STAGES[2:]),
    ],
)
def test_changed_config_is_named(
    packed: Run, section: str, name: str, value: Any, stages: tuple[Callable[[Run], object], ...]
) -> None:
    """On resuming: a stage that the field takes part in refuses it by name, the others go on."""
    packed.workspace.manifest.unlink()
    (packed.workspace.write / "train-000001.json").unlink()
    other = changed(packed, **{section: {name: value}})
    for verb in STAGES:
        if verb in stages:
            with pytest.raises(StageError, match=rf"{section}\.{name} was "):
                verb(other)
        else:
            verb(other)


def test_changed_model_is_refused_by_name(packed: Run) -> None:
    smaller = {"model": {"max_pixels": 28 * 28 * 32}}
    run = changed(packed, **smaller)
    for verb in (*STAGES, verify):
        with pytest.raises(StageError, match=r"model\.max_pixels was 50176, is 25088"):
            verb(run)
    was, now = (
        f"the tokenizer of model.family={name} and model.processor=builtin"
        for name in ("qwen2_vl", "qwen2_5_vl")
    )
    for verb in (measure, plan_index, verify):
        with pytest.raises(StageError, match=f"model.tokenizer was {was}, is {now}; "):
            verb(changed(packed, model={"family": "qwen2_5_vl"}))
    accepting = Run(run.config, LocalEngine(0), frozenset({"model.max_pixels"}))
    pack_all(accepting)
    assert not verify(accepting, deep=True).ok  # larger pictures now encode to fewer tokens
    with pytest.raises(ConfigError, match=r"model\.maxpixels: no such field; valid: model\."):
        measure(Run(run.config, LocalEngine(0), frozenset({"model.maxpixels"})))
    overwriting = changed(packed, output={"overwrite": True}, **smaller)
    pack_all(overwriting)
    assert verify(overwriting).ok


def test_changed_source_is_refused_by_name(tmp_path: Path) -> None:
    root = captioning_pairs(tmp_path / "data", 8)
    run = make_run(root, tmp_path / "out", engine={"samples_per_part": 2})
    measure(run)
    (root / "part0" / "000000.json").write_text('{"caption": "another length"}')
    (root / "part0" / "000002.json").unlink()
    for i in range(4):
        (root / "part1" / f"new{i}.jpg").write_bytes(b"")
    changes = (
        r"source\.0\.listing: the files of .*/data changed: 4 added \('part1/new0\.jpg', "
        r"'part1/new1\.jpg', 'part1/new2\.jpg', …\), 1 removed \('part0/000002\.json'\), "
        r"1 of another size \('part0/000000\.json'\); set output\.overwrite"
    )
    with pytest.raises(StageError, match=changes):
        measure(run)
    reopen(run)
    with pytest.raises(StageError, match=r"unfinished index .* source\.0\.listing"):
        measure(run)


def test_plans_are_free_until_shards_are_written(planned: Run) -> None:
    runs = {n: changed(planned, pack={"seq_length": n}) for n in (256, 512)}
    for length, run in runs.items():
        assert f"of {length} tokens" in plan_summary(run)
    with pytest.raises(StageError, match=r"pack\.seq_length was 512, is 256"):
        write_planned(runs[256])
    write_planned(runs[512])
    with pytest.raises(StageError, match=r"pack\.seq_length was 512, is 256"):
        plan_index(runs[256])
    output = {"packs_per_shard": 4, "overwrite": True}
    other = changed(planned, output=output, pack={"seq_length": 256})
    pack_all(other)
    assert verify(other).ok
    strict = changed(planned, output=output, pack={"seq_length": 60, "on_overlong": "error"})
    with pytest.raises(StageError, match=r"sample 'part\S+' has \d+ tokens > seq_length 60 .*set_"):
        plan_index(strict)


def test_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    message = "is not empty and does not hold an earlier run"
    workspace = make_run(tmp_path / "data", tmp_path).workspace
    with pytest.raises(StageError, match=message), workspace.lock():
        pytest.fail("the folder was taken")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_shards_of_one_pack_are_a_warning(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for limit in (80_000, 1):
        assert not caplog.text
        output = {"packs_per_shard": 1000, "max_shard_bytes": limit}
        run = make_run(world.source("captioning"), tmp_path / f"{limit}", output=output)
        assert [shard.packs for shard in pack_all(run).shards] != [1] * 5 or limit == 1
    assert "5 of 5 shards hold one pack: output.max_shard_bytes 1 is " in caplog.text


#: sha256, first 16 digits. What depends on versions of libraries is left out.
GOLDEN = {
    ".nv-meta/dataset.yaml": "b274b7e830ff943e",
    ".nv-meta/index.uuid": "4d8ca2186d2b67e7",
    ".nv-meta/split.yaml": "af17d213ca390955",
    "_packing/plan/pack_offsets.npy": "987f7ffca1011253",
    "_packing/plan/sample_ids.npy": "b3c1086c254557c6",
    "_packing/plan/set_aside_ids.npy": "e734dac55ea9fbbe",
    "_packing/plan/set_aside_reasons.npy": "4ca930d4c39dd441",
    "train-000000.tar": "7d1567ef18706a6f",
    "train-000000.tar.idx": "eccb0a4a1a2183b4",
    "train-000001.tar": "c769748b5123e29c",
    "train-000001.tar.idx": "e408e726d438517e",
    "val-000000.tar": "e376605bea360925",
    "val-000000.tar.idx": "d2bd358ac2e8c451",
}


def write_source(root: Path) -> None:
    root.mkdir()
    for i in range(24):
        caption = " ".join(f"word{i * j % 17}" for j in range(2 + i * 7 % 40))
        width, height = 28 * (2 + i % 5), 28 * (2 + i % 3)
        rows = (b"\0" + bytes((x * y) % 251 for x in range(width)) for y in range(height))
        (root / f"{i:03d}.png").write_bytes(png(width, height, b"".join(rows)))
        (root / f"{i:03d}.json").write_text(json.dumps({"captions": [{"content": caption}]}))
    (root / "023.json").write_text("{")


def digests(root: Path) -> dict[str, str]:
    patterns = ("*.tar", "*.tar.idx", "_packing/plan/*.npy", ".nv-meta/*.yaml", ".nv-meta/*.uuid")
    paths = sorted(path for pattern in patterns for path in root.glob(pattern))
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in paths
    }


def test_bytes_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a path is part of the manifest, whose hash is the dataset's uuid
    write_source(Path("data"))
    output = {"key_prefix": "", "packs_per_shard": 4, "split": {"train": 0.8, "val": 0.2}}
    run = packed_run(Path("data"), Path("out"), pack={"seq_length": 192}, output=output)
    assert digests(Path("out")) == GOLDEN
    assert verify(run, deep=True).ok


def test_a_default_and_its_value_written_out_are_the_same(tmp_path: Path) -> None:
    """Or an output could not be used any more once a configuration says what was the default."""
    default = make_run(tmp_path / "data", tmp_path / "out")
    options = default.config.model
    written = {"max_aspect_ratio": options.max_aspect_ratio, "video_fps": options.video_fps}
    same = make_run(tmp_path / "data", tmp_path / "out", model=written)
    expected = config_fingerprint(default.config)
    open_encoder.cache_clear()  # 200 and 200.0 are one key of it
    assert config_fingerprint(same.config) == expected


def test_write_that_the_system_refuses(planned: Run, tmp_path: Path, command: Command) -> None:
    """A real failure of the system call, as a disk that is full gives it."""
    run = changed(planned, output={"packs_per_shard": 1000})
    config = config_file(tmp_path / "a.yaml", run.config)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
    try:
        code, _, error = command("run", config, "--quiet")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 1
    assert error.startswith(f"error: {tmp_path}/out/train-000000.tar cannot be written: ")
    assert error.endswith("; free some space and run again\n")
    assert error.count("\n") == 1
    assert not list((tmp_path / "out").glob("*.tar*"))
    assert "problems        0" in invoke("run", config).output
    assert not list((tmp_path / "out").rglob("*.tmp"))


@pytest.mark.parametrize("is_moved", [True, False])
def test_output_moved_or_removed_while_it_is_written(
    planned: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_moved: bool
) -> None:
    """It vanishes in the middle of a shard: both remedies work, and nothing takes its place."""
    root, true_write = planned.workspace.root, container.write_shard

    def write(task: ShardTask) -> Any:
        fragment = true_write(task)
        if task.shard.name.startswith("train-000001"):
            root.rename(tmp_path / "elsewhere") if is_moved else shutil.rmtree(root)
        return fragment

    with monkeypatch.context() as patch:
        patch.setattr(container, "write_shard", write)
        with pytest.raises(StageError, match="was moved or removed while it was written; move it"):
            write_planned(planned)
    assert not root.exists()
    if is_moved:
        (tmp_path / "elsewhere").rename(root)
        write_planned(planned)
    else:
        pack_all(planned)
    assert verify(planned).ok


@pytest.mark.parametrize(("number", "after"), [(errno.EDQUOT, 0), (errno.ENOSPC, 6)])
def test_disk_full_at_any_file(
    planned: Run, monkeypatch: pytest.MonkeyPatch, number: int, after: int
) -> None:
    true_sync = os.fsync
    calls: list[int] = []

    def sync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > after:
            raise OSError(number, os.strerror(number))
        true_sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", sync)
        with pytest.raises(DiskFullError, match=r"cannot be written: .*; free some space"):
            write_planned(planned)
    assert not planned.workspace.manifest.exists()
    assert not [*planned.workspace.root.rglob("*.tmp")]
    write_planned(planned)
    assert verify(planned).ok


def test_failing_disk_of_the_source(planned: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    true_read = os.pread
    calls: list[int] = []

    def read(descriptor: int, size: int, offset: int) -> bytes:
        calls.append(descriptor)
        if len(calls) == 21:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return true_read(descriptor, size, offset)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "pread", read)
        message = r"1 of 3 shards could not be written; .*cannot be read: Input/output error"
        with pytest.raises(StageError, match=message):
            write_planned(planned)
    assert len(calls) > 21  # the other shards were written
    assert not planned.workspace.manifest.exists()
    repair(planned)
    assert verify(planned, deep=True).ok


@pytest.mark.parametrize(("suffix", "later"), [(".jpg", 1), (".json", 1), (".json", 0)])
def test_edit_of_the_same_size(own: Run, tmp_path: Path, suffix: str, later: int) -> None:
    path = min((tmp_path / "data").rglob(f"*{suffix}"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1  # of a JSON: a letter of the caption
    times = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + later))  # however coarse the clock is
    with pytest.raises(StageError, match=rf"{path.parent.name}/{path.stem}.* changed since"):
        write_planned(own)
    assert not own.workspace.manifest.exists()


def test_moved_source_is_the_same(own: Run, tmp_path: Path) -> None:
    """Modification times move with the files; names of folders do not count."""
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    (tmp_path / "data").symlink_to(tmp_path / "elsewhere")
    write_planned(own)
    assert verify(own, deep=True).ok


def test_temporaries_of_living_writers_stay(tmp_path: Path) -> None:
    with files.atomic_file(tmp_path / "a") as file:
        file.write(b"being written")
        (tmp_path / "b.0123.tmp").write_bytes(b"left by a killed process")
        remove_temporaries(tmp_path)
        assert [path.name[:2] for path in tmp_path.iterdir()] == ["a."]
    assert (tmp_path / "a").read_bytes() == b"being written"
    write_atomically(tmp_path / "a", b"again")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_lock_of_an_output_that_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever only looks can hold it, and others see that; nobody holds a folder in its place."""
    path = tmp_path / "lock"
    path.mkdir()
    with pytest.raises(StageError, match="lock is a folder; remove it"):
        files.hold_lock(path, "output").__enter__()
    path.rmdir()
    path.touch()

    def open_to_read(name: Path, mode: str) -> Any:
        if mode != "rb":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return name.open("rb")

    monkeypatch.setattr(files, "open", open_to_read, raising=False)
    with (
        files.hold_lock(path, "output"),
        pytest.raises(StageError, match="another run is working on output"),
        files.hold_lock(path, "output"),
    ):
        pass
