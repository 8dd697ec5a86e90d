"""Outputs that are written again, and media that are damaged, while packs are read."""

import itertools
import multiprocessing
import pickle
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from megatron.energon.errors import FatalSampleError

from offline_packing.runs.run import Run
from task_encoders.energon_samples import PackedBatch
from task_encoders.loading.packed_folder import PackedFolder, PackedFolderError
from task_encoders.loading.schedule import InTurn, ScheduledLoader
from task_encoders.media.image import decode_image
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.packs.manifest import read_manifest
from task_encoders.packs.pack import PackFormatError
from task_encoders.packs.pack_format import PREFIX
from task_encoders.samples import SampleError
from task_encoders.settings import PackingSettings
from tests.helpers.datasets import captioning_pairs, image_bytes, make_run, pack_all, write_json
from tests.helpers.energon_batches import loading
from tests.helpers.object_store import ObjectStore

SEQ_LENGTH = 96
STOPPED = r"written again while it was read; start this run again, and write to another output"
#: Errors of readers.
ERRORS = (FatalSampleError, PackFormatError, PackedFolderError)


def alike(root: Path) -> Path:
    """Captions and pictures of one size, so that packs of another order lie at the same offsets."""
    for i in range(64):
        write_json(root / f"{i:02d}.json", {"caption": f"a picture of {chr(97 + i % 26)} {i:02d}"})
        (root / f"{i:02d}.jpg").write_bytes(image_bytes())
    return root


#: With sizes of their own, packs lie elsewhere when they are written again.
SOURCES: dict[str, Callable[[Path], Path]] = {"alike": alike, "mixed": captioning_pairs}


def run_of(root: Path, source: str, seed: int = 0, **output: Any) -> Run:
    data = root / source
    pack = {"seq_length": SEQ_LENGTH if source == "alike" else 256, "seed": seed}
    sections = {"pack": pack, "output": {"packs_per_shard": 2, "overwrite": True, **output}}
    return make_run(data if data.exists() else SOURCES[source](data), root / "out", **sections)


def write_again(run: Run) -> None:
    """In another process, which has written everything when this returns."""
    writer = multiprocessing.get_context("fork").Process(target=pack_all, args=(run,))
    writer.start()
    writer.join()
    assert writer.exitcode == 0


def task_encoder() -> PackedTaskEncoder:
    settings = PackingSettings(packed=True)
    return PackedTaskEncoder(seq_length=512, max_pixels=28 * 28 * 64, settings=settings)


def by_energon(path: Any, workers: int = 0) -> Iterator[PackedBatch]:
    with loading(path, task_encoder(), workers) as loader:
        yield from loader


def by_number(path: Any, workers: int = 0) -> Iterator[PackedBatch]:
    folder = PackedFolder(path, task_encoder())
    return iter(ScheduledLoader(folder, InTurn.of(folder), 0, num_workers=workers))


READERS: dict[str, Callable[..., Iterator[PackedBatch]]] = {
    "Energon": by_energon,
    "folder": by_number,
}


@pytest.mark.parametrize(
    ("reader", "workers", "source", "layout"),
    [
        ("Energon", 0, "alike", "energon"),
        ("Energon", 1, "mixed", "energon"),
        ("folder", 0, "alike", "energon"),
        ("folder", 1, "mixed", "energon"),
        ("folder", 0, "alike", "references"),
    ],
)
def test_a_reader_stops_at_packs_of_another_plan(
    reader: str, workers: int, source: str, layout: str, tmp_path: Path
) -> None:
    """Until then it gives what it opened."""
    run = run_of(tmp_path, source, layout=layout)
    pack_all(run)
    expected = [batch.sub_sample_keys for batch in READERS[reader](run.workspace.root)]
    assert len(expected) > 6
    batches = READERS[reader](run.workspace.root, workers)
    found = [batch.sub_sample_keys for batch in itertools.islice(batches, 3)]
    write_again(run_of(tmp_path, source, seed=1, layout=layout))
    with pytest.raises(ERRORS, match=STOPPED) as stopped:
        found.extend(batch.sub_sample_keys for batch in batches)
    assert found == expected[: len(found)]
    assert len(found) < len(expected)
    assert workers or "\n" not in str(stopped.value).partition("MapDataset")[0]
    again = [batch.sub_sample_keys for batch in READERS[reader](run.workspace.root)]
    assert sorted(itertools.chain(*again)) == sorted(itertools.chain(*expected))
    assert again != expected


def test_references_that_are_written_again_are_read_as_they_were_opened(tmp_path: Path) -> None:
    """Energon keeps their file open."""
    run = run_of(tmp_path, "mixed", layout="references")
    pack_all(run)
    expected = [batch.sub_sample_keys for batch in by_energon(run.workspace.root)]
    batches = by_energon(run.workspace.root)
    found = [next(batches).sub_sample_keys]
    write_again(run_of(tmp_path, "mixed", seed=1, layout="references"))
    found += [batch.sub_sample_keys for batch in batches]
    assert found == expected
    assert found != [batch.sub_sample_keys for batch in by_energon(run.workspace.root)]


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_names_an_output_that_is_being_written_again(reader: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, "alike")
    pack_all(run)
    batches = READERS[reader](run.workspace.root)
    next(batches)
    run.discard_shards()
    named = r"has no manifest\.json: the output was removed, or is being written again"
    with pytest.raises(ERRORS, match=named):
        list(batches)


@pytest.mark.parametrize("layout", ["energon", "indexed"])
def test_a_folder_is_opened_in_other_processes_as_it_was(layout: str, tmp_path: Path) -> None:
    """Files of token ids stay open here; another process opens the new ones."""
    run = run_of(tmp_path, "alike", layout=layout)
    pack_all(run)
    path = run.workspace.root / PREFIX if layout == "indexed" else run.workspace.root
    packs = PackedFolder(path, task_encoder())
    pickled, records = pickle.dumps(packs), [pack.record for pack in packs]
    assert [pack.record for pack in pickle.loads(pickled)] == records
    write_again(run_of(tmp_path, "alike", seed=1, layout=layout))
    assert layout == "energon" or [pack.record for pack in packs] == records
    with pytest.raises(PackedFolderError, match=STOPPED):
        pickle.loads(pickled)


@pytest.mark.parametrize("layout", ["energon", "indexed"])
def test_remote_packs_that_are_written_again(
    layout: str, tmp_path: Path, object_store: ObjectStore, bucket: str
) -> None:
    run = run_of(tmp_path, "mixed", layout=layout)
    pack_all(run)
    object_store.put_folder(run.workspace.root, f"{bucket}/packs")
    packs = PackedFolder(f"{bucket}/packs", task_encoder())
    assert packs.batch([0]).sub_sample_keys
    pack_all(run_of(tmp_path, "mixed", seed=1, layout=layout))
    object_store.put_folder(run.workspace.root, f"{bucket}/packs")
    for number in range(1, len(packs)):
        with pytest.raises(ERRORS, match=STOPPED):
            packs.batch([number])


def test_a_generation_is_of_plan_and_layout(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [{}, {"packs_per_shard": 4}, {"key_prefix": "a_"}]
    found = []
    for seed, output in [*((0, change) for change in changes), (1, {}), (0, {})]:
        manifest = pack_all(run_of(tmp_path, "alike", seed, **output))
        found.append(manifest.generation)
        assert manifest == read_manifest(tmp_path / "out")
    assert found[0] == found[-1]
    assert len(set(found)) == len(found) - 1


def zeroed(data: bytes) -> bytes:
    """The picture with twenty bytes zeroed, where it still decodes, to other pixels."""
    pixels = decode_image(data).tobytes()
    for start in range(len(data) // 2, len(data) - 20):
        damaged = data[:start] + bytes(20) + data[start + 20 :]
        with suppress(SampleError):
            if decode_image(damaged).tobytes() != pixels:
                return damaged
    raise AssertionError("no such place")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packs of JPEGs and PNGs."""
    root = tmp_path_factory.mktemp("pictures")
    for i in range(12):
        write_json(root / f"data/{i:02d}.json", {"caption": "a picture " * (1 + i % 3)})
        image_format, extension = ("PNG", "png") if i % 2 else ("JPEG", "jpg")
        picture = image_bytes(112, 56 + 28 * (i % 3), image_format)
        (root / f"data/{i:02d}.{extension}").write_bytes(picture)
    pack_all(make_run(root / "data", root / "out", pack={"seq_length": SEQ_LENGTH}))
    return root / "out"


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("extension", ["jpg", "png"])
def test_a_picture_with_zeroed_bytes_is_left_out_and_named(
    reader: str, extension: str, pictures: Path, tmp_path: Path
) -> None:
    """It decodes, to other pixels, and was trained on."""
    whole = {key for batch in READERS[reader](pictures) for key in batch.sub_sample_keys}
    (folder := tmp_path / "out").symlink_to(pictures)
    shard = pictures / "train-000000.tar"
    stored = shard.read_bytes()
    with tarfile.open(shard) as tar:
        member = next(one for one in tar if one.name.endswith(f".{extension}"))
    content = stored[member.offset_data : member.offset_data + member.size]
    start, damaged = member.offset_data, zeroed(content)
    try:
        shard.write_bytes(stored[:start] + damaged + stored[start + len(damaged) :])
        batches = list(READERS[reader](folder))
    finally:
        shard.write_bytes(stored)
    dropped = [line for batch in batches for line in batch.dropped]
    left = {key for batch in batches for key in batch.sub_sample_keys}
    assert len(dropped) == 1
    key, _, said = dropped[0].partition(": ")
    assert whole - left == {key}
    part = member.name.partition(".")[2]
    assert said.startswith(f"truncated_image: {part} has the xxh3_64 ")
    assert "offline-packing verify --discard, then run" in said
