"""Order, checks and states of loaders over packs, with Energon's real workers; outputs that are
written again, and media that are damaged, while packs are read."""

import collections
import functools
import itertools
import pickle
import re
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.energon import WorkerConfig, get_train_dataset, get_val_dataset, get_val_datasets
from megatron.energon.errors import FatalSampleError

from offline_packing.runs.run import Run
from task_encoders.energon_samples import PackedBatch
from task_encoders.loading.packed_dataset import get_packed_train_dataset, get_packed_val_dataset
from task_encoders.loading.packed_folder import PackedFolder, PackedFolderError
from task_encoders.loading.schedule import InTurn, ScheduledLoader
from task_encoders.media.image import decode_image
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.packs.manifest import read_manifest
from task_encoders.packs.pack import PackFormatError
from task_encoders.samples import SampleError
from task_encoders.settings import PackingSettings, PackingSettingsError
from tests.helpers.datasets import captioning_pairs, image_bytes, make_run, pack_all, write_json
from tests.helpers.energon_batches import batches_of, loading
from tests.helpers.object_store import ObjectStore
from tests.helpers.prepared_folders import blend_of, text_folder
from tests.world import World, copy_of

NUM_PACKS = 9
EVERY_STEP = range(NUM_PACKS + 2)
SEQ_LENGTH = 512


@pytest.fixture(scope="module")
def text_packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_folder(tmp_path_factory.mktemp("texts") / "packs", NUM_PACKS)


@pytest.fixture(scope="module")
def encoder() -> PackedTaskEncoder:
    return PackedTaskEncoder(seq_length=64, settings=PackingSettings(packed=True, bmr=True))


def keys_of(batches: Any, count: int | None = None) -> list[str]:
    """Keys of the samples of each batch."""
    return [" ".join(batch.sub_sample_keys) for batch in itertools.islice(batches, count)]


def states_of(loader: Any, count: int) -> tuple[list[str], list[Any]]:
    """The first batches, and the loader's state before the first and after each."""
    states, keys = [loader.save_state_rank()], []
    for batch in itertools.islice(iter(loader), count):
        keys += keys_of([batch])
        states.append(loader.save_state_rank())
    return keys, states


@pytest.mark.parametrize(
    ("num_workers", "repeat", "steps", "ranks"),
    [
        (0, False, EVERY_STEP, 1),
        (0, True, EVERY_STEP, 1),
        # At the end, where workers have ended and others not, packs came twice, and others never.
        (2, False, (1, 8), 1),
        (2, True, (3, 6), 2),
        pytest.param(4, False, (8,), 1, marks=pytest.mark.exhaustive),
        pytest.param(2, False, EVERY_STEP, 2, marks=pytest.mark.exhaustive),
        pytest.param(8, True, (1, 5, 8), 1, marks=pytest.mark.exhaustive),
    ],
)
def test_a_restored_loader_gives_the_rest_and_nothing_else(
    num_workers: int, repeat: bool, steps: Any, ranks: int, text_packs: Path, encoder: Any
) -> None:
    """On the last rank, which has a pack less than the first of two."""
    options: dict[str, Any] = {"rank": ranks - 1, "world_size": ranks, "repeat": repeat}
    own = NUM_PACKS // ranks
    with loading(text_packs, encoder, num_workers, **options) as loader:
        keys, states = states_of(loader, own + (1 if repeat else 0))
        keys += keys_of(iter(loader), 3) if repeat else []
    assert len(states) == own + (2 if repeat else 1)
    assert repeat or len(set(keys)) == own
    assert ranks > 1 or sorted(keys[:own]) == [f"{i:02d}/0" for i in range(NUM_PACKS)]
    for step, state in enumerate(states):
        if step not in steps:
            continue
        with loading(text_packs, encoder, num_workers, state=state, **options) as restored:
            rest = keys[step:][: 3 if repeat else None]
            assert keys_of(iter(restored), 3 if repeat else None) == rest, step


def test_workers_that_begin_late_lose_nothing(
    text_packs: Path, encoder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for its state before it had read anything, a worker skipped a pack when restored."""
    start = threading.Thread.start

    def start_late(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "command_thread":
            info = torch.utils.data.get_worker_info()
            time.sleep(0 if info is None or info.id == 0 else 0.3)

    monkeypatch.setattr(threading.Thread, "start", start_late)
    keys, state = list[str](), None
    for left in (NUM_PACKS, NUM_PACKS - 1, NUM_PACKS - 2):
        with loading(text_packs, encoder, 2, state=state) as loader:
            own, states = states_of(loader, 1)
            own += keys_of(iter(loader))
        assert len(own) == left
        assert not keys or own == keys[1:]
        keys, state = own, states[1]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_second_pass_is_whole_and_can_be_restored(
    num_workers: int, text_packs: Path, encoder: Any
) -> None:
    with loading(text_packs, encoder, num_workers) as loader:
        assert len(keys_of(loader)) == NUM_PACKS
        between = loader.save_state_rank()
        batches = iter(loader)
        first = keys_of(batches, 1)
        state = loader.save_state_rank()  # with two workers, one has given nothing of this pass
        rest = keys_of(batches)
    assert len({*first, *rest}) == len(first + rest) == NUM_PACKS
    for saved, expected in ((between, []), (state, rest)):
        with loading(text_packs, encoder, num_workers, state=saved) as restored:
            assert keys_of(restored) == expected
            assert len(keys_of(restored)) == NUM_PACKS


@pytest.mark.parametrize(
    ("ranks", "workers"), [(8, 0), pytest.param(2, 2, marks=pytest.mark.exhaustive)]
)
def test_packs_come_equally_often_over_epochs(
    ranks: int, workers: int, tmp_path: Path, encoder: Any
) -> None:
    """12 packs on 8 ranks: 4 of them came twice as often as the others."""
    folder = text_folder(tmp_path / "packs", 12)
    taken = []
    for rank in range(ranks):
        options: dict[str, Any] = {"rank": rank, "world_size": ranks, "repeat": True}
        with loading(folder, encoder, workers, **options) as loader:
            taken.append(keys_of(loader, 60 // ranks))
    for step in range(1, 60 // ranks + 1):
        given = collections.Counter(key for keys in taken for key in keys[:step])
        counts = [given[f"{i:02d}/0"] for i in range(12)]
        assert max(counts) - min(counts) <= 1, (step, counts)


def blend_yaml(path: Path, folders: Sequence[Path], *, version: int = 2) -> Path:
    """A metadataset of equal weights over train and val splits."""
    blend_of(path, folders, splits=("train", "val"))
    if version == 1:
        text = path.read_text().replace("MetadatasetV2", "Metadataset")
        path.write_text(text.replace("blend:", "datasets:"))
    return path


@pytest.fixture(scope="module")
def measured(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packs with a manifest, in a folder of their own and inside blends."""
    root = tmp_path_factory.mktemp("measured")
    output = {"packs_per_shard": 8, "split": {"train": 0.7, "val": 0.3}}
    packed = world.packed("captioning", pack={"pad_multiple": 2}, output=output)
    (root / "packed").symlink_to(packed)
    blend = blend_yaml(root / "v2.yaml", [root / "packed", root / "packed"])
    blend_yaml(root / "nested.yaml", [blend, root / "packed"])
    blend_yaml(root / "v1.yaml", [root / "packed", root / "packed"], version=1)
    return root


def plain(get: Callable[..., Any], **options: Any) -> Callable[[Path, Any], Any]:
    """Return a function of Energon that is not given our options."""
    options["worker_config"] = WorkerConfig(rank=0, world_size=1, num_workers=0)
    return lambda path, encoder: get(path, task_encoder=encoder, batch_size=1, **options)


MODES = {
    "train": plain(get_train_dataset, shuffle_buffer_size=None, max_samples_per_sequence=None),
    "val": plain(get_val_dataset),
    "vals": lambda path, encoder: plain(get_val_datasets)(path, encoder)[0][0],
    "packed_train": get_packed_train_dataset,
    "packed_val": get_packed_val_dataset,
    "numbers": PackedFolder,
}


@functools.cache
def captions_encoder(**options: int) -> PackedTaskEncoder:
    """Packs as `measured`, except for `options`."""
    packed_with = {"seq_length": SEQ_LENGTH, "max_pixels": 28 * 28 * 64, "pad_multiple": 2}
    return PackedTaskEncoder(settings=PackingSettings(packed=True), **(packed_with | options))


@pytest.mark.parametrize(
    ("mode", "name"),
    [*((mode, "nested.yaml") for mode in MODES), ("train", "packed"), ("packed_train", "v1.yaml")],
)
def test_every_way_checks_every_dataset(mode: str, name: str, measured: Path) -> None:
    MODES[mode](measured / name, captions_encoder())
    for option, value, said in (
        ("seq_length", SEQ_LENGTH // 2, "seq_length 512 tokens > the task encoder's seq_length"),
        ("pad_multiple", 4, "multiples of 4"),
        ("max_pixels", 28 * 28 * 32, "max_pixels"),
    ):
        with pytest.raises(PackingSettingsError) as error:
            MODES[mode](measured / name, captions_encoder(**{option: value}))
        assert said in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["packed", "v2.yaml", "v1.yaml", "train.yaml"])
def test_no_val_split_is_said(name: str, tmp_path: Path, encoder: PackedTaskEncoder) -> None:
    path, packed = tmp_path / name, text_folder(tmp_path / "packed", 3)
    if name != "packed":
        blend_yaml(path, [packed, packed], version=1 if name == "v1.yaml" else 2)
    if name == "train.yaml":
        path.write_text(path.read_text().partition("  val:")[0])
    said = re.escape(f"{path} has no packs in its val split; pack with a share of val in")
    with pytest.raises(PackedFolderError, match=said):
        get_packed_val_dataset(path, encoder)
    with pytest.raises(PackedFolderError, match=f"{said}|no split 'val', only train"):
        PackedFolder(path, split="val")
    with pytest.raises(PackedFolderError, match="no packs in its test split"):
        get_packed_val_dataset(path, encoder, split_part="test")


DAMAGE: dict[str, Callable[[bytearray, Any], None]] = {
    "header": lambda tar, offsets: tar.__setitem__(slice(offsets[2], offsets[2] + 512), bytes(512)),
    "end": lambda tar, offsets: tar.__delitem__(slice(offsets[2] + 600, None)),
    "offset": lambda tar, offsets: offsets.__setitem__(2, offsets[2] + 1024),
    "order": lambda tar, offsets: offsets.__setitem__(2, offsets[3]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_tar_or_index_is_named(tmp_path: Path, encoder: Any, damage: str) -> None:
    folder = text_folder(tmp_path / "packs", 5)
    tar, index = folder / "shard_0.tar", folder / "shard_0.tar.idx"
    data, offsets = bytearray(tar.read_bytes()), np.fromfile(index, "<u8")
    DAMAGE[damage](data, offsets)
    tar.write_bytes(data)
    offsets.tofile(index)
    named = (
        rf"{re.escape(str(tar))}: .*; the tar or its \.idx is damaged .*verify --discard, then run"
    )
    with pytest.raises(FatalSampleError, match=named):
        batches_of(folder, encoder)


CAPTION_LENGTH = 96
STOPPED = r"written again,? while it was read; .*start this run again, and write to another output"
#: Errors of readers.
ERRORS = (FatalSampleError, PackFormatError, PackedFolderError)


def alike(root: Path) -> Path:
    """Captions and pictures of one size, so that packs of another order lie at the same offsets."""
    for i in range(40):
        write_json(root / f"{i:02d}.json", {"caption": f"a picture of {chr(97 + i % 26)} {i:02d}"})
        (root / f"{i:02d}.jpg").write_bytes(image_bytes())
    return root


#: With sizes of their own, packs lie elsewhere when they are written again.
SOURCES: dict[str, Callable[[Path], Path]] = {"alike": alike, "mixed": captioning_pairs}


def run_of(root: Path, source: str, seed: int = 0, **output: Any) -> Run:
    data = root / source
    pack = {"seq_length": CAPTION_LENGTH if source == "alike" else 256, "seed": seed}
    sections = {"pack": pack, "output": {"packs_per_shard": 2, "overwrite": True, **output}}
    return make_run(data if data.exists() else SOURCES[source](data), root / "out", **sections)


def by_energon(path: Any, workers: int = 0) -> Iterator[PackedBatch]:
    with loading(path, captions_encoder(pad_multiple=1), workers) as loader:
        yield from loader


def by_number(path: Any, workers: int = 0) -> Iterator[PackedBatch]:
    folder = PackedFolder(path, captions_encoder(pad_multiple=1))
    return iter(ScheduledLoader(folder, InTurn.of(folder), 0, num_workers=workers))


READERS = {"Energon": by_energon, "folder": by_number}


@pytest.mark.parametrize(
    ("reader", "workers", "source", "media"),
    [
        ("Energon", 0, "alike", "copy"),
        ("folder", 1, "mixed", "copy"),
        ("folder", 0, "alike", "refer"),
        ("Energon", 1, "mixed", "refer"),
    ],
)
def test_a_reader_stops_at_packs_of_another_plan(
    reader: str, workers: int, source: str, media: str, tmp_path: Path
) -> None:
    """Read what was opened, until then; without a manifest, the output is being written."""
    run = run_of(tmp_path, source, media=media)
    pack_all(run)
    root = run.workspace.root
    expected = keys_of(READERS[reader](root))
    assert len(expected) > 6
    batches = READERS[reader](root, workers)
    found = keys_of(batches, 3)
    sent = pickle.dumps(PackedFolder(root))
    assert len(pickle.loads(sent)) == len(expected)
    other = READERS[reader](root)
    next(other)
    run.drop("write")
    named = r"has no manifest\.json: the output was removed, or is being written again"
    with pytest.raises(ERRORS, match=named):
        list(other)
    pack_all(run_of(tmp_path, source, seed=1, media=media))
    with pytest.raises(ERRORS, match=STOPPED) as stopped:
        found.extend(" ".join(batch.sub_sample_keys) for batch in batches)
    assert found == expected[: len(found)]
    assert len(found) < len(expected)
    assert workers or "\n" not in str(stopped.value).partition("MapDataset")[0]
    with pytest.raises(PackedFolderError, match=STOPPED):
        pickle.loads(sent)
    again = keys_of(READERS[reader](root))
    assert sorted(" ".join(again).split()) == sorted(" ".join(expected).split())
    assert again != expected


def test_remote_packs_that_are_written_again(
    tmp_path: Path, object_store: ObjectStore, bucket: str
) -> None:
    run = run_of(tmp_path, "mixed")
    pack_all(run)
    object_store.put_folder(run.workspace.root, f"{bucket}/packs")
    packs = PackedFolder(f"{bucket}/packs", captions_encoder(pad_multiple=1))
    assert packs.batch([0]).sub_sample_keys
    pack_all(run_of(tmp_path, "mixed", seed=1))
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


@pytest.mark.parametrize(("reader", "extension"), [("Energon", "jpg"), ("folder", "png")])
def test_a_picture_with_zeroed_bytes_is_left_out_and_named(
    reader: str, extension: str, world: World, tmp_path: Path
) -> None:
    """It decodes, to other pixels, and was trained on."""
    run = copy_of(world.run("captioning"), tmp_path / "out")
    folder, shard = run.workspace.root, run.workspace.root / "train-000000.tar"
    whole = " ".join(keys_of(READERS[reader](folder))).split()
    with tarfile.open(shard) as tar:
        member = next(one for one in tar if one.name.endswith(f".{extension}"))
    stored, start, end = shard.read_bytes(), member.offset_data, member.offset_data + member.size
    shard.write_bytes(stored[:start] + zeroed(stored[start:end]) + stored[end:])
    batches = list(READERS[reader](folder))
    (dropped,) = (line for batch in batches for line in batch.dropped)
    key, _, said = dropped.partition(": ")
    assert {*whole} - {*" ".join(keys_of(batches)).split()} == {key}
    part = member.name.partition(".")[2]
    assert said.startswith(f"truncated_image: {part} has the xxh3_64 ")
    assert "offline-packing verify --discard, then run" in said
