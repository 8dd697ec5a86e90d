"""Packs made while training, through Energon's own loader and workers."""

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.energon.errors import FatalSampleError

from offline_packing.online.energon import OnlineTaskEncoder, get_online_train_dataset
from offline_packing.online.pools import PackingPool
from offline_packing.planner.windows import WindowOptions
from task_encoders.energon_samples import MultiMixQASample, PackedBatch
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.settings import PackingSettings
from tests.helpers import energon_batches
from tests.helpers.datasets import dialogue, image_bytes
from tests.helpers.prepared_folders import (
    CRUDE_YAML,
    blend_of,
    crude_folder,
    folder_of,
    legacy_vqa_folder,
)
from tests.helpers.videos import make_video

SEQ_LENGTH = 512
NUM_SAMPLES = 70
UNPACKED = PackingSettings(packed=False)
KEYS = [f"{number:05d}" for number in range(NUM_SAMPLES)]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dialogues with no picture, one, or two."""
    return crude_folder(tmp_path_factory.mktemp("texts") / "crude", NUM_SAMPLES, shards=3)


@functools.cache
def task_encoder(**options: Any) -> OnlineTaskEncoder:
    defaults: dict[str, Any] = {"seq_length": SEQ_LENGTH, "settings": UNPACKED}
    return OnlineTaskEncoder(**(defaults | options))


def loading(folder: Path, *, encoder: OnlineTaskEncoder | None = None, **options: Any) -> Any:
    defaults: dict[str, Any] = {"buffer": 16, "dataset_of": get_online_train_dataset}
    return energon_batches.loading(folder, encoder or task_encoder(), **(defaults | options))


def batches(folder: Path, count: int | None = None, **options: Any) -> list[PackedBatch]:
    with loading(folder, **options) as loader:
        return list(itertools.islice(loader, count))


def keys_of(rows: list[PackedBatch]) -> list[list[str]]:
    return [row.sub_sample_keys for row in rows]


def test_packs_are_the_planners_and_samples_are_encoded_as_alone(texts: Path) -> None:
    """With the first samples in one window, and all in the order of the files."""
    encoder = PackedTaskEncoder(seq_length=SEQ_LENGTH, settings=UNPACKED)
    alone = energon_batches.batches_of(texts, encoder)
    pool = PackingPool[int](WindowOptions(seq_length=SEQ_LENGTH, window=64, seed=3))
    ready = [pool.add(number, row.tokens.shape[1]) for number, row in enumerate(alone)]
    expected = [*itertools.chain(*ready), *pool.finish()]
    assert sorted(itertools.chain(*expected)) == list(range(NUM_SAMPLES))
    in_order: dict[str, Any] = {
        "max_samples_per_sequence": None,
        "shuffle_over_epochs_multiplier": None,
        "parallel_shard_iters": 1,
    }
    rows = batches(texts, buffer=64, seed=3, **in_order)
    for row, numbers in zip(rows, expected, strict=True):
        parts = [alone[number] for number in numbers]
        assert row.sub_sample_keys == [part.sub_sample_keys[0] for part in parts]
        assert row.tokens.shape[1] <= SEQ_LENGTH
        for name in ("tokens", "labels", "position_ids"):
            whole = torch.cat([getattr(part, name) for part in parts], dim=-1)
            assert torch.equal(getattr(row, name), whole)
        pictures = [part.imgs for part in parts if len(part.image_grid_thw)]
        assert torch.equal(row.imgs, torch.cat(pictures) if pictures else torch.zeros(1, 1))
        ends = itertools.accumulate(part.tokens.shape[1] for part in parts)
        assert row.cu_lengths[0].tolist() == [0, *ends]


def test_a_state_is_keys_and_numbers(texts: Path, tmp_path: Path) -> None:
    """It holds no sample, and goes only with the same windows and workers."""
    with loading(texts, buffer=60) as loader:
        row = next(iter(loader))
        again = loader.restore_sample(row.__restore_key__)  # for debugging, as Energon does it
        assert torch.equal(again.tokens, row.tokens)
        state = loader.save_state_rank()
    torch.save(state, tmp_path / "state.pt")
    assert (tmp_path / "state.pt").stat().st_size < 60 * 500
    with pytest.raises(ValueError, match=r"window=60.*window=16.*resume with the same"):
        batches(texts, state=state)
    with pytest.raises(ValueError, match="of 0 loader workers, and now there are 1; resume"):
        batches(texts, buffer=60, workers=1, state=state)


def test_epochs_are_whole_and_come_in_another_order(texts: Path) -> None:
    epoch = batches(texts)
    rows = keys_of(batches(texts, 2 * len(epoch) + 5, repeat=True))
    stream = list(itertools.chain(*rows))
    epochs = [stream[i : i + NUM_SAMPLES] for i in range(0, 2 * NUM_SAMPLES, NUM_SAMPLES)]
    assert [sorted(one) for one in epochs] == [KEYS, KEYS]
    assert epochs[0] != epochs[1]


def test_budgets_and_strategies(texts: Path) -> None:
    budgets, strategy = {"images": 2, "vision_patches": 400}, "first_fit_decreasing"
    rows = batches(texts, budgets=budgets, strategy=strategy)
    assert max(len(row.image_grid_thw) for row in rows) == 2
    assert sorted(itertools.chain(*keys_of(rows))) == KEYS


def test_bad_samples_are_told_of_and_counted(tmp_path: Path) -> None:
    good = {"json": json.dumps({"messages": dialogue("What?", "That.")}).encode()}
    long = {"json": json.dumps({"messages": dialogue("What?", "That. " * 600)}).encode()}
    record = {"messages": dialogue("<image>", "It."), "images": ["a.jpg"]}
    shown = {"json": json.dumps(record).encode()}
    damaged = bytearray(image_bytes(image_format="PNG"))
    damaged[damaged.index(b"IDAT") + 20] ^= 0xFF
    bad = {
        "bad_json": {"json": b"{"},
        "overlong": long,
        "over_budget": {"jpg": image_bytes(28 * 8, 28 * 8)} | shown,
        "missing_image": shown,
        # Its header and its end are fine: that it cannot be decoded shows when its pack is final.
        "truncated_image": {"jpg": bytes(damaged)} | shown,
    }
    samples = {f"good{i}": good for i in range(4)} | bad
    folder = folder_of(tmp_path / "crude", samples, CRUDE_YAML)
    rows = batches(folder, budgets={"vision_patches": 100})
    said = [line.split(": ")[:2] for row in rows for line in row.dropped]
    assert sorted(said) == sorted([reason, reason] for reason in bad)
    assert sorted(itertools.chain(*keys_of(rows))) == [f"good{i}" for i in range(4)]


def test_a_blend_with_packs(texts: Path, tmp_path: Path) -> None:
    packs = legacy_vqa_folder(tmp_path / "packs", packs=5)
    blend = blend_of(tmp_path / "blend.yaml", [texts, packs], epochs=1)
    encoder = task_encoder(settings=PackingSettings(packed=True, vqa=True))
    keys = list(itertools.chain(*keys_of(batches(blend, encoder=encoder))))
    assert len(keys) == len(set(keys))
    assert len(keys) > NUM_SAMPLES + 5
    assert set(KEYS) < set(keys)


def test_a_blend_by_weights_never_ends(texts: Path, tmp_path: Path) -> None:
    other = crude_folder(tmp_path / "crude", 20)
    blend = blend_of(tmp_path / "blend.yaml", [texts, other])
    options: dict[str, Any] = {"repeat": True}
    with loading(blend, **options) as loader:
        rows = iter(loader)
        first = keys_of(list(itertools.islice(rows, 20)))
        state = loader.save_state_rank()
        rest = keys_of(list(itertools.islice(rows, 20)))
    assert keys_of(batches(blend, 20, state=state, **options)) == rest
    assert sum(map(len, first + rest)) > 2 * 20  # the smaller comes again


def test_measured_is_encoded() -> None:
    """Pictures, a video, padding: what is planned is what the row takes."""
    encoder = task_encoder(pad_multiple=16, seq_length=4096, max_pixels=28 * 28 * 64)
    media: dict[str, Any] = {"image": [image_bytes(56, 140), image_bytes(90, 84)]}
    media["video"] = make_video(8, 4)
    sample = MultiMixQASample(
        __key__="s",
        __restore_key__=(),
        messages=dialogue("<image>and<image>, then <video>?", "So.", "Why?", "Thus."),
        **media,
    )
    taken, row = encoder.measure(sample), encoder.encode_sample(sample).row
    assert taken["tokens"] == len(row.tokens)
    assert taken["vision_patches"] == len(row.pixel_values) + len(row.pixel_values_videos)
    assert (taken["images"], taken["videos"]) == (2, 1)


def test_nothing_usable_is_one_error(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "crude", {f"{i}": {"json": b"{"} for i in range(5)}, CRUDE_YAML)
    for repeat in (False, True):
        with pytest.raises(FatalSampleError, match="none of the 5 samples of a loader worker can"):
            batches(folder, repeat=repeat)
