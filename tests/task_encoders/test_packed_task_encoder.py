"""The task encoder through the real Energon loader, of packs and of samples that are not; the three
environment variables, and what contradicts the data."""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.energon import VQASample, get_savable_loader
from megatron.energon.errors import FatalSampleError

from task_encoders.energon_samples import BATCH_TENSORS, CrudeRecord, MultiMixQASample, PackedBatch
from task_encoders.model_inputs import normalise_pixels
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.rows.unpacked import unpacked_sub_sample
from task_encoders.sample_encoder import EncodedSample
from task_encoders.samples import IGNORE_INDEX, SampleError, SourceSample, Turn
from task_encoders.settings import BMR, PACKED, VQA, PackingSettings, PackingSettingsError
from tests.helpers.datasets import dialogue, image_bytes
from tests.helpers.energon_batches import loading
from tests.helpers.prepared_folders import (
    CAPTIONING_YAML,
    CRUDE_YAML,
    DATASET_YAML,
    MESSAGES_YAML,
    VQA_YAML,
    blend_of,
    crude_folder,
    folder_of,
    legacy_vqa_folder,
    picture,
    vqa_pack,
    words,
    write_folder,
)

PACKED_VQA = PackingSettings(packed=True, vqa=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return legacy_vqa_folder(tmp_path_factory.mktemp("legacy") / "vqa")


def task_encoder(settings: PackingSettings | None = PACKED_VQA, **options: Any) -> Any:
    return PackedTaskEncoder(**{"seq_length": 2048, "settings": settings} | options)


def batches(path: Path, encoder: Any = None, **options: Any) -> Iterator[PackedBatch]:
    return unpacked_batches(path, encoder or task_encoder(), **options)


def test_a_batch_has_the_documented_shapes(folder: Path) -> None:
    batch = next(batches(folder))
    seq = batch.tokens.shape[1]
    subs = batch.cu_lengths.shape[1] - 1
    assert batch.__key__ == ["ps_00000000"]
    assert batch.tokens.shape == batch.labels.shape == batch.attn_mask.shape == (1, seq)
    assert batch.loss_mask.shape == (1, seq)
    assert batch.position_ids.shape == (3, 1, seq)
    assert int(batch.cu_lengths[0, -1]) == seq
    assert int(batch.max_lengths) == int(batch.cu_lengths.diff().max())
    assert batch.image_grid_thw.shape == (subs, 3)
    assert batch.imgs.shape == (int(batch.image_grid_thw.prod(1).sum()), 1176)
    assert batch.sub_sample_keys == [f"ps_00000000/{i}" for i in range(subs)]
    dtypes = [t.dtype for t in (batch.tokens, batch.labels, batch.attn_mask, batch.cu_lengths)]
    assert dtypes == [torch.int64, torch.int64, torch.bool, torch.int32]
    assert torch.equal(batch.loss_mask[0].bool(), batch.labels[0] != IGNORE_INDEX)


@pytest.mark.parametrize("dataset_yaml", [DATASET_YAML, CRUDE_YAML], ids=["typed", "crude"])
def test_the_layout_people_already_have_loads(dataset_yaml: str, tmp_path: Path) -> None:
    encoder = task_encoder()
    tokenizer_text = []
    for batch in batches(legacy_vqa_folder(tmp_path / "vqa", dataset_yaml), encoder):
        assert not batch.dropped
        tokenizer_text += batch.__key__
        labelled = batch.tokens[batch.labels != IGNORE_INDEX].tolist()
        expected = [
            token
            for i in range(len(batch.sub_sample_keys))
            for token in [
                *encoder.encoder.tokenizer.encode(f"It is {i} in {batch.__key__[0]}."),
                encoder.encoder.tokenizer.special_id("<|im_end|>"),
            ]
        ]
        assert labelled == expected
    assert tokenizer_text == [f"ps_{i:08d}" for i in range(12)]


def test_one_sample_can_be_restored_by_its_key(folder: Path) -> None:
    with loading(folder, task_encoder(), loader_of=get_savable_loader, repeat=True) as loader:
        third = list(itertools.islice(iter(loader), 3))[2]
        again = loader.restore_sample(third.__restore_key__)
    assert again.__key__ == third.__key__
    assert torch.equal(again.tokens, third.tokens)


@pytest.mark.parametrize("where", ["subflavors", "meta"])
def test_an_environment_that_contradicts_the_shards_stops(where: str, tmp_path: Path) -> None:
    yaml = "subflavors: {offline_packing: vqa}\n" * (where == "subflavors")
    meta = {"meta": {"task": "vqa"}} if where == "meta" else {}
    path = one_pack(tmp_path, lambda members, record: record.update(meta), DATASET_YAML + yaml)
    assert next(batches(path)).__key__ == ["ps_00000000"]
    with pytest.raises((PackingSettingsError, FatalSampleError), match=rf"set {PACKED}=1 {VQA}=1"):
        next(batches(path, task_encoder(PackingSettings(packed=True))))


def one_pack(folder: Path, change: Callable[[Any, Any], object], yaml: str = DATASET_YAML) -> Path:
    """A folder of a pack of three questions; `change` its members, or its JSON."""
    members: dict[str, bytes] = vqa_pack(np.random.default_rng(0), "x", 3)
    record = json.loads(members["json"])
    change(members, record)
    members["json"] = json.dumps(record).encode()
    return write_folder(folder / "packs", [{"ps_00000000": members}], yaml)


def test_vqa_packs_that_lost_their_prompts_stop(tmp_path: Path) -> None:
    path = one_pack(tmp_path, lambda members, record: record.update(prompts=[]))
    with pytest.raises(FatalSampleError, match=r"3 of 3 sub-samples have no prompt under task vqa"):
        next(batches(path))


#: What becomes of the second sub-sample, by the reason.
FAULTS: dict[str, Callable[[Any, Any], object]] = {
    "missing_image": lambda members, _: members.pop("img1.jpg"),
    "truncated_image": lambda members, _: members.update({"img1.jpg": members["img1.jpg"][:-100]}),
    "empty_answer": lambda _, record: record["captions"].__setitem__(1, "  "),
    "image_count_mismatch": lambda _, record: record["prompts"].__setitem__(1, "<image><image>"),
    "overlong": lambda _, record: record["captions"].__setitem__(1, "word " * 3_000),
}


@pytest.mark.parametrize("reason", FAULTS)
def test_a_bad_sub_sample_is_dropped_and_its_pack_goes_on(reason: str, tmp_path: Path) -> None:
    batch = next(batches(one_pack(tmp_path, FAULTS[reason])))
    assert batch.sub_sample_keys == ["ps_00000000/0", "ps_00000000/2"]
    assert len(batch.dropped) == 1
    assert batch.dropped[0].startswith(f"ps_00000000/1: {reason}")
    assert len(batch.image_grid_thw) == 2


def test_lengths_that_differ_from_the_measured_ones_stop(tmp_path: Path) -> None:
    meta = {"task": "vqa", "keys": ["x", "y", "z"], "num_tokens": [7] * 3}
    path = one_pack(tmp_path, lambda members, record: record.update(meta=meta))
    with pytest.raises(FatalSampleError, match="measured with 7"):
        next(batches(path))
    unchecked = next(batches(path, task_encoder(check_lengths=False)))
    assert unchecked.sub_sample_keys == ["x", "y", "z"]


def test_pixels_sent_as_bytes_become_the_same_values(folder: Path) -> None:
    """They come through shared memory from a worker process, as a trainer's do."""
    sent = (
        batches(folder, task_encoder(pixel_transport=transport), workers=1, micro_batch_size=2)
        for transport in ("float32", "uint8")
    )
    for values, as_bytes in zip(*sent, strict=True):
        assert as_bytes.imgs.dtype == torch.uint8
        assert values.imgs.nbytes >= 7 * as_bytes.imgs.nbytes
        same = normalise_pixels(as_bytes)
        assert normalise_pixels(values) is values
        assert normalise_pixels(same) is same
        for name in BATCH_TENSORS:
            assert torch.equal(getattr(same, name), getattr(values, name)), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pixel_transport": "float16"}, "pixel_transport is 'float16'; it must be 'float32'"),
        ({"encode_threads": 0}, "encode_threads is 0; it must be at least 1"),
        (
            {"pad_to_seq_length": True, "pad_multiple": 24},
            "2048 is not a multiple of pad_multiple 24; set",
        ),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task_encoder(**options)


def test_rows_can_be_padded_to_the_sequence_length(folder: Path) -> None:
    for batch in itertools.islice(batches(folder, task_encoder(pad_to_seq_length=True)), 3):
        assert batch.tokens.shape == (1, 2048)
        used = int((~batch.attn_mask).sum())
        assert batch.cu_lengths[0, -2:].tolist() == [used, 2048]


SEQ_LENGTH = 512
UNPACKED = PackingSettings(packed=False)


def unpacked_encoder(settings: PackingSettings = UNPACKED, **options: Any) -> Any:
    return task_encoder(
        settings, **{"seq_length": SEQ_LENGTH, "max_pixels": 28 * 28 * 64} | options
    )


def unpacked_batches(
    path: Path, encoder: Any = None, workers: int = 0, **options: Any
) -> Iterator[PackedBatch]:
    with loading(path, encoder or unpacked_encoder(), workers, **options) as loader:
        yield from loader


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
    encoder = unpacked_encoder()
    images = [members["jpg"]] if sample.images else []
    for workers in (0, 1) if name == "crude" else (0,):
        folder = tmp_path / f"{workers}"
        (batch,) = unpacked_batches(folder_of(folder, {"s": members}, yaml), encoder, workers)
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


@pytest.mark.parametrize("epochs", [None, 1])
def test_packed_and_unpacked_folders_blend(epochs: int | None, tmp_path: Path) -> None:
    yaml = "subflavors: {offline_packing: vqa}\n"
    packs = legacy_vqa_folder(tmp_path / "packs")
    (packs / ".nv-meta" / "dataset.yaml").open("a").write(yaml)
    crude = crude_folder(tmp_path / "crude", 12)
    blend = blend_of(tmp_path / "blend.yaml", [packs, crude], epochs=epochs)
    encoder = unpacked_encoder(PackingSettings(packed=True), seq_length=2048)
    rows = unpacked_batches(blend, encoder, repeat=epochs is None)
    keys = [key for batch in itertools.islice(rows, 24) for key in batch.__key__]
    assert {"/ps_" in key for key in keys} == {True, False}
    if epochs:
        assert len(set(keys)) == len(keys) == 24
    with pytest.raises(PackingSettingsError, match=f"set {PACKED}=1 alone"):
        next(unpacked_batches(blend, unpacked_encoder(seq_length=2048), repeat=epochs is None))


def test_packs_are_refused_while_the_variable_is_unset(tmp_path: Path) -> None:
    typed = legacy_vqa_folder(tmp_path / "typed")
    with pytest.raises(PackingSettingsError, match=f"the dataset holds packs; set {PACKED}=1"):
        next(unpacked_batches(typed))
    crude = legacy_vqa_folder(tmp_path / "crude", CRUDE_YAML)
    with pytest.raises(FatalSampleError, match=f"the dataset holds packs; set {PACKED}=1"):
        next(unpacked_batches(crude))


def test_unpacked_data_is_refused_where_packs_are_announced(tmp_path: Path) -> None:
    settings = PackingSettings(packed=True)
    _, members, _ = energon_types()["captioning"]
    typed = folder_of(tmp_path / "typed", {"s": members}, CAPTIONING_YAML)
    with pytest.raises(PackingSettingsError, match=f"{PACKED}=1, but .*typed holds no packs"):
        next(unpacked_batches(typed, unpacked_encoder(settings)))
    crude = crude_folder(tmp_path / "crude", 2)
    with pytest.raises(FatalSampleError, match=f"sample '0000.' holds no packs; set {PACKED}=0"):
        next(unpacked_batches(crude, unpacked_encoder(settings)))


def test_decoded_media_are_refused() -> None:
    sample = VQASample(
        __key__="k", __restore_key__=(), image=torch.zeros(3, 8, 8), context="q", answers=["a"]
    )
    with pytest.raises(FatalSampleError, match="'image' of sample 'k' is a Tensor"):
        unpacked_encoder().encode_sample(sample)


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
    first, last = unpacked_batches(folder, workers=num_workers)
    assert (first.__key__, first.dropped) == (["a"], [])
    assert last.__key__ == ["z"]
    said = [line.split(": ")[:2] for line in last.dropped]
    assert said == [[key, reason] for key, reason in zip(keyed, bad, strict=True)]


def test_a_member_that_energon_misses_is_listed_too(tmp_path: Path) -> None:
    _, good, _ = energon_types()["captioning"]
    samples = {"a": good, "b": {"txt": good["txt"]}, "c": good}
    rows = list(unpacked_batches(folder_of(tmp_path / "typed", samples, CAPTIONING_YAML)))
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
    rows = list(unpacked_batches(folder, unpacked_encoder(settings, seq_length=2048)))
    assert [row.__key__ for row in rows] == [["ps_00000000"], ["ps_00000002"]]
    (line,) = rows[1].dropped
    assert line.startswith("ps_00000001: bad_record: pack 'ps_00000001': JSON cannot be parsed")


#: Variables that mean something, and the task of packs that says nothing itself.
TASKS: list[tuple[dict[str, str], str | None]] = [
    ({PACKED: "1"}, "captioning"),
    ({PACKED: "1", VQA: "0", BMR: ""}, "captioning"),
    ({PACKED: "1", VQA: "1"}, "vqa"),
    ({PACKED: "1", BMR: "1"}, "bmr"),
    ({PACKED: "0", VQA: "0"}, None),
    ({}, None),
]


@pytest.mark.parametrize(("environ", "task"), TASKS)
def test_what_the_variables_mean(environ: dict[str, str], task: str | None) -> None:
    settings = PackingSettings.from_env(environ)
    assert settings.packed == (task is not None)
    if task is not None:
        assert settings.resolve_task(None) == settings.resolve_task(task) == task
        assert settings.resolve_task(None, task) == task  # of subflavors
        assert settings.resolve_task(task, "bmr" if task == "vqa" else "vqa") == task


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        *(
            ({PACKED: "1", name: value}, name)
            for name in (PACKED, VQA, BMR)
            for value in ("true", "yes", " ", " 1", "2", "True", "on")
        ),
        ({PACKED: "1", VQA: "1", BMR: "1"}, VQA),
        ({VQA: "1"}, PACKED),
        ({BMR: "1"}, PACKED),
    ],
)
def test_other_values_and_contradictions_stop(environ: dict[str, str], named: str) -> None:
    with pytest.raises(PackingSettingsError, match=named) as error:
        PackingSettings.from_env(environ)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "declared", "blend", "message"),
    [
        ((True,), "vqa", False, f"set {PACKED}=1 {VQA}=1"),
        ((True,), "bmr", False, f"set {PACKED}=1 {BMR}=1"),
        ((True, True), "captioning", False, rf"{PACKED}=1 \(and neither"),
        ((True, False, True), "captioning", False, rf"{PACKED}=1 \(and neither"),
        ((True, True), "bmr", True, f"set {PACKED}=1 alone"),
        ((True,), "ocr", False, "declare task 'ocr'; valid: captioning"),
        *(((False,), one, True, f"set {PACKED}=1") for one in (None, "captioning", "vqa", "bmr")),
    ],
)
def test_variables_that_contradict_the_data_stop(
    settings: tuple[bool, ...], declared: str | None, blend: bool, message: str
) -> None:
    with pytest.raises(PackingSettingsError, match=message):
        PackingSettings(*settings).resolve_task(declared, blend=blend)
    for task in ("captioning", "vqa", "bmr"):  # in a blend that they are packs is enough
        assert PackingSettings(packed=True).resolve_task(task, blend=True) == task
