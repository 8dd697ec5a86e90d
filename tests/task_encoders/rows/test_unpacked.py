"""Samples that are not packs, through the same encoder and Energon's own loader."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.energon import VQASample, WorkerConfig
from megatron.energon.errors import FatalSampleError

from task_encoders.energon_samples import CrudeRecord, MultiMixQASample, PackedBatch
from task_encoders.loading.packed_dataset import get_packed_loader, get_packed_train_dataset
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.rows.unpacked import unpacked_sub_sample
from task_encoders.sample_encoder import EncodedSample
from task_encoders.samples import SampleError, SourceSample, Turn
from task_encoders.settings import PACKED, PackingSettings, PackingSettingsError
from tests.helpers.datasets import dialogue, image_bytes, make_run, pack_all
from tests.helpers.legacy_packs import CRUDE_YAML, DATASET_YAML, legacy_vqa_folder, vqa_pack
from tests.helpers.unpacked_folders import (
    CAPTIONING_YAML,
    MESSAGES_YAML,
    VQA_YAML,
    blend_of,
    crude_folder,
    folder_of,
    picture,
    words,
)

SEQ_LENGTH = 512
UNPACKED = PackingSettings(packed=False)


def task_encoder(settings: PackingSettings = UNPACKED, **options: Any) -> PackedTaskEncoder:
    defaults: dict[str, Any] = {"seq_length": SEQ_LENGTH, "max_pixels": 28 * 28 * 64}
    return PackedTaskEncoder(settings=settings, **(defaults | options))


def batches(path: Path, encoder: Any = None, **options: Any) -> Iterator[PackedBatch]:
    defaults: dict[str, Any] = {"repeat": False}
    config = WorkerConfig(rank=0, world_size=1, num_workers=options.pop("num_workers", 0))
    dataset = get_packed_train_dataset(
        path, encoder or task_encoder(), worker_config=config, **(defaults | options)
    )
    return iter(get_packed_loader(dataset))


def assert_row_is(batch: PackedBatch, expected: EncodedSample) -> None:
    assert batch.sub_sample_keys == [expected.key]
    assert batch.cu_lengths.tolist() == [[0, len(expected.tokens)]]
    assert batch.tokens[0].tolist() == expected.tokens.tolist()
    assert batch.labels[0].tolist() == expected.labels.tolist()
    assert batch.position_ids[:, 0].tolist() == expected.position_ids.tolist()
    assert batch.image_grid_thw.tolist() == expected.image_grid_thw.tolist()
    if len(expected.image_grid_thw):
        assert np.array_equal(batch.imgs.numpy(), expected.pixel_values)


def energon_types() -> dict[str, tuple[str, dict[str, bytes], SourceSample]]:
    """dataset.yaml, members of a sample, and the sample that they are."""
    rng = np.random.default_rng(0)
    jpg, caption, question = picture(rng), words(rng), words(rng)
    image = ("0.jpg",)
    vqa = {"question": question, "answers": ["no", "yes"], "weights": [0.2, 0.8]}
    talk = {"messages": dialogue("<image>" + question, "a", "b?", "c"), "system": "Be brief."}
    turns = (Turn("<image>" + question, "a"), Turn("b?", "c"))
    conversation = SourceSample("s", "bmr", turns, image, "Be brief.")
    crude = {"messages": talk["messages"], "system": "Be brief.", "images": ["s.jpg"]}

    def members(record: Any) -> dict[str, bytes]:
        return {"jpg": jpg, "json": json.dumps(record).encode()}

    return {
        "captioning": (
            CAPTIONING_YAML,
            {"jpg": jpg, "txt": caption.encode()},
            SourceSample("s", "captioning", (Turn("", caption),), image),
        ),
        "vqa": (VQA_YAML, members(vqa), SourceSample("s", "vqa", (Turn(question, "yes"),), image)),
        "messages": (
            MESSAGES_YAML,
            members(talk),
            SourceSample("s", "bmr", turns, image, "Be brief."),
        ),
        "crude": (CRUDE_YAML, members(crude), conversation),
        "crude caption": (
            CRUDE_YAML,
            {"jpg": jpg, "txt": caption.encode()},
            SourceSample("s", "captioning", (Turn("", caption),), image),
        ),
        "crude text": (
            CRUDE_YAML,
            {"json": json.dumps({"messages": dialogue("a?", "b")}).encode()},
            SourceSample("s", "bmr", (Turn("a?", "b"),)),
        ),
    }


@pytest.mark.parametrize("name", energon_types())
def test_a_sample_of_energons_types_is_a_row_of_its_own(name: str, tmp_path: Path) -> None:
    yaml, members, sample = energon_types()[name]
    encoder = task_encoder()
    images = [members["jpg"]] if sample.images else []
    for workers in (0, 1) if name == "crude" else (0,):
        folder = tmp_path / f"{workers}"
        (batch,) = batches(folder_of(folder, {"s": members}, yaml), encoder, num_workers=workers)
        assert batch.__key__ == ["s"]
        assert_row_is(batch, encoder.encoder.encode(sample, images))


def test_several_images_and_members_named_with_their_key() -> None:
    pictures = {"a.jpg": image_bytes(56, 84), "b.jpg": image_bytes(84, 84)}
    talk = dialogue("<image>and<image>", "so")
    base: dict[str, Any] = {"__key__": "t/k", "__restore_key__": ()}
    typed = MultiMixQASample(**base, messages=talk, image=list(pictures.values()))
    assert unpacked_sub_sample(typed).images == tuple(pictures.values())
    record = {"messages": talk, "images": ["k.b.jpg", "a.jpg"]}
    crude = unpacked_sub_sample(CrudeRecord(**base, parts={**pictures, "json": record}))
    assert crude.images == (pictures["b.jpg"], pictures["a.jpg"])
    gone = {"messages": talk, "images": ["a.jpg", "c.jpg"]}
    lost = unpacked_sub_sample(CrudeRecord(**base, parts={**pictures, "json": gone}))
    assert isinstance(lost.sample, SampleError)
    assert lost.sample.reason == "missing_image"


def test_the_same_rows_as_in_packs(tmp_path: Path) -> None:
    """Measured, written and restored, or read as it is: the same tokens, labels and pixels."""
    folder = crude_folder(tmp_path / "crude", 12, shards=1)
    source = {"format": "energon", "path": str(folder), "task": "bmr"}
    packs = tmp_path / "packs"
    pack_all(make_run(source, packs, pack={"seq_length": SEQ_LENGTH}))
    encoder = task_encoder(PackingSettings(packed=True, bmr=True))
    alone = {batch.sub_sample_keys[0]: batch for batch in batches(folder)}
    seen = []
    for batch in batches(packs, encoder):
        ends = batch.cu_lengths[0].tolist()
        rows = [alone[key.rpartition("/")[2]] for key in batch.sub_sample_keys]
        for name in ("tokens", "labels"):
            expected = torch.cat([getattr(row, name) for row in rows], dim=1)
            assert torch.equal(getattr(batch, name), expected)
        assert ends[1:] == list(itertools.accumulate(row.tokens.shape[1] for row in rows))
        seen += batch.sub_sample_keys
    assert len(seen) == 12


@pytest.mark.parametrize("epochs", [None, 1])
def test_packed_and_unpacked_folders_blend(epochs: int | None, tmp_path: Path) -> None:
    yaml = "subflavors: {offline_packing: vqa}\n"
    packs = legacy_vqa_folder(tmp_path / "packs")
    (packs / ".nv-meta" / "dataset.yaml").open("a").write(yaml)
    crude = crude_folder(tmp_path / "crude", 12)
    blend = blend_of(tmp_path / "blend.yaml", [packs, crude], epochs=epochs)
    encoder = task_encoder(PackingSettings(packed=True), seq_length=2048)
    rows = batches(blend, encoder, repeat=epochs is None)
    keys = [key for batch in itertools.islice(rows, 24) for key in batch.__key__]
    assert {"/ps_" in key for key in keys} == {True, False}
    if epochs:
        assert len(set(keys)) == len(keys) == 24
    with pytest.raises(PackingSettingsError, match=f"set {PACKED}=1 alone"):
        next(batches(blend, task_encoder(seq_length=2048), repeat=epochs is None))


def test_packs_are_refused_while_the_variable_is_unset(tmp_path: Path) -> None:
    typed = legacy_vqa_folder(tmp_path / "typed")
    with pytest.raises(PackingSettingsError, match=f"the dataset holds packs; set {PACKED}=1"):
        next(batches(typed))
    crude = legacy_vqa_folder(tmp_path / "crude", CRUDE_YAML)
    with pytest.raises(FatalSampleError, match=f"the dataset holds packs; set {PACKED}=1"):
        next(batches(crude))


def test_unpacked_data_is_refused_where_packs_are_announced(tmp_path: Path) -> None:
    settings = PackingSettings(packed=True)
    _, members, _ = energon_types()["captioning"]
    typed = folder_of(tmp_path / "typed", {"s": members}, CAPTIONING_YAML)
    with pytest.raises(PackingSettingsError, match=f"{PACKED}=1, but .*typed holds no packs"):
        next(batches(typed, task_encoder(settings)))
    crude = crude_folder(tmp_path / "crude", 2)
    with pytest.raises(FatalSampleError, match=f"sample '0000.' holds no packs; set {PACKED}=0"):
        next(batches(crude, task_encoder(settings)))


def test_decoded_media_are_refused() -> None:
    sample = VQASample(
        __key__="k", __restore_key__=(), image=torch.zeros(3, 8, 8), context="q", answers=["a"]
    )
    with pytest.raises(FatalSampleError, match="'image' of sample 'k' is a Tensor"):
        task_encoder().encode_sample(sample)


def bad_members() -> dict[str, dict[str, bytes]]:
    good = image_bytes()
    record = {"messages": dialogue("<image>What?", "That.")}

    def members(jpg: bytes | None = good, **changes: Any) -> dict[str, bytes]:
        media = {} if jpg is None else {"jpg": jpg}
        return media | {"json": json.dumps(record | changes).encode()}

    return {
        "bad_json": {"jpg": good, "json": b"{"},
        "bad_record": {"jpg": good},
        "bad_roles": members(messages=dialogue("What?", "That.")[::-1]),
        "truncated_image": members(good[:-60]),
        "missing_image": members(None, images=["a.jpg"]),
        "image_count_mismatch": members(messages=dialogue("<image><image>", "a")),
        "overlong": members(messages=dialogue("<image>", "word " * 900)),
    }


@pytest.mark.parametrize("num_workers", [0, 1])
def test_bad_samples_are_listed_in_the_next_row(num_workers: int, tmp_path: Path) -> None:
    _, good, _ = energon_types()["crude"]
    bad = bad_members()
    keyed = {f"bad{i}": members for i, members in enumerate(bad.values())}
    folder = folder_of(tmp_path / "crude", {"a": good, **keyed, "z": good}, CRUDE_YAML)
    first, last = batches(folder, num_workers=num_workers)
    assert (first.__key__, first.dropped) == (["a"], [])
    assert last.__key__ == ["z"]
    said = [line.split(": ")[:2] for line in last.dropped]
    assert said == [[key, reason] for key, reason in zip(keyed, bad, strict=True)]


def test_a_member_that_energon_misses_is_listed_too(tmp_path: Path) -> None:
    _, good, _ = energon_types()["captioning"]
    samples = {"a": good, "b": {"txt": good["txt"]}, "c": good}
    rows = list(batches(folder_of(tmp_path / "typed", samples, CAPTIONING_YAML)))
    assert [row.__key__ for row in rows] == [["a"], ["c"]]
    (line,) = rows[1].dropped
    assert line.startswith("b: bad_record: ")


@pytest.mark.parametrize("yaml", [DATASET_YAML, CRUDE_YAML], ids=["typed", "crude"])
def test_a_pack_that_cannot_be_parsed_is_listed_too(yaml: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    packs = {f"ps_0000000{i}": vqa_pack(rng, "x", 2) for i in range(3)}
    packs["ps_00000001"]["json"] = b"{"
    folder = folder_of(tmp_path / "packs", packs, yaml)
    settings = PackingSettings(packed=True, vqa=True)
    rows = list(batches(folder, task_encoder(settings, seq_length=2048)))
    assert [row.__key__ for row in rows] == [["ps_00000000"], ["ps_00000002"]]
    (line,) = rows[1].dropped
    assert line.startswith("ps_00000001: bad_record: pack 'ps_00000001': JSON cannot be parsed")
