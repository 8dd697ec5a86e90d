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


UNPACKED = PackingSettings(packed=False)


def task_encoder(settings: PackingSettings | None = PACKED_VQA, **options: Any) -> Any:
    own = {"seq_length": 2048, "max_pixels": 28 * 28 * 64, "settings": settings}
    return PackedTaskEncoder(**own | options)


def batches(
    path: Path, encoder: Any = None, workers: int = 0, **options: Any
) -> Iterator[PackedBatch]:
    with loading(path, encoder or task_encoder(), workers, **options) as loader:
        yield from loader


def test_a_batch_has_the_documented_shapes(folder: Path) -> None:
    batch = next(batches(folder))
    num_segments = batch.cu_lengths.shape[1] - 1
    num_tokens, num_patches = batch.cu_lengths[0, -1], batch.image_grid_thw.prod(1).sum()
    sizes = {"S": int(num_tokens), "P+1": num_segments + 1, "P|0": 0, "R": 3, "M": 0, "C": 0}
    sizes |= {"N": num_segments, "L": int(num_patches), "D": 1176, "K": 1}
    for name, (dtype, letters) in BATCH_TENSORS.items():
        tensor = getattr(batch, name)
        shape = [int(one) if one.isdigit() else sizes[one] for one in letters]
        if name == "pixel_values_videos":  # [[0.]] without videos
            shape = [1, 1]
        assert (tensor.dtype, list(tensor.shape)) == (dtype, shape), name
    assert batch.__key__ == ["ps_00000000"]
    assert batch.max_lengths == batch.cu_lengths.diff().max()
    assert batch.sub_sample_keys == [f"ps_00000000/{i}" for i in range(num_segments)]
    assert torch.equal(batch.loss_mask[0].bool(), batch.labels[0] != IGNORE_INDEX)


@pytest.mark.parametrize("dataset_yaml", [DATASET_YAML, CRUDE_YAML], ids=["typed", "crude"])
def test_the_layout_people_already_have_loads(dataset_yaml: str, tmp_path: Path) -> None:
    encoder = task_encoder()
    tokenizer, keys = encoder.encoder.tokenizer, []
    for batch in batches(legacy_vqa_folder(tmp_path / "vqa", dataset_yaml), encoder):
        assert not batch.dropped
        keys += batch.__key__
        expected: list[int] = []
        for i in range(len(batch.sub_sample_keys)):
            expected += tokenizer.encode(f"It is {i} in {batch.__key__[0]}.")
            expected.append(tokenizer.special_id("<|im_end|>"))
        assert batch.tokens[batch.labels != IGNORE_INDEX].tolist() == expected
    assert keys == [f"ps_{i:08d}" for i in range(12)]


def test_one_sample_can_be_restored_by_its_key(folder: Path) -> None:
    with loading(folder, task_encoder(), loader_of=get_savable_loader, repeat=True) as loader:
        third = list(itertools.islice(iter(loader), 3))[2]
        again = loader.restore_sample(third.__restore_key__)
    assert again.__key__ == third.__key__
    assert torch.equal(again.tokens, third.tokens)


def one_pack(folder: Path, change: Callable[[Any, Any], object], yaml: str = DATASET_YAML) -> Path:
    """A folder of a pack of three questions; `change` its members, or its JSON."""
    members: dict[str, bytes] = vqa_pack(np.random.default_rng(0), "x", 3)
    record = json.loads(members["json"])
    change(members, record)
    members["json"] = json.dumps(record).encode()
    return write_folder(folder / "packs", [{"ps_00000000": members}], yaml)


def test_packs_that_are_not_as_they_were_measured_stop(tmp_path: Path) -> None:
    meta = {"task": "vqa", "keys": ["x", "y", "z"], "num_tokens": [7] * 3}
    for changes, said in (
        ({"prompts": []}, "3 of 3 sub-samples have no prompt under task vqa"),
        ({"meta": meta}, "measured with 7"),
    ):
        own = changes.copy()
        path = one_pack(tmp_path / said, lambda members, record, own=own: record.update(own))
        with pytest.raises(FatalSampleError, match=said):
            next(batches(path))
    unchecked = next(batches(path, task_encoder(check_lengths=False)))
    assert unchecked.sub_sample_keys == meta["keys"]


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


def test_rows_can_be_padded_to_the_sequence_length(folder: Path) -> None:
    for batch in itertools.islice(batches(folder, task_encoder(pad_to_seq_length=True)), 3):
        assert batch.tokens.shape == (1, 2048)
        used = int((~batch.attn_mask).sum())
        assert batch.cu_lengths[0, -2:].tolist() == [used, 2048]


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
    vqa = {"question": question, "answers": ["no", "yes"], "weights": [0.2, 0.8]}
    talk = {"messages": dialogue("<image>" + question, "a", "b?", "c"), "system": "Be brief."}
    turns = (Turn("<image>" + question, "a"), Turn("b?", "c"))
    captioned = {"jpg": jpg, "txt": caption.encode()}

    def members(record: Any) -> dict[str, bytes]:
        return {"jpg": jpg, "json": json.dumps(record).encode()}

    def sample(task: str, *turns: Turn, system: str | None = None) -> SourceSample:
        return SourceSample("s", task, turns, ("0.jpg",), system)

    caption_of = sample("captioning", Turn("", caption))
    talk_of = sample("bmr", *turns, system="Be brief.")
    text = {"json": json.dumps({"messages": dialogue("a?", "b")}).encode()}
    return {
        "captioning": (CAPTIONING_YAML, captioned, caption_of),
        "vqa": (VQA_YAML, members(vqa), sample("vqa", Turn(question, "yes"))),
        "messages": (MESSAGES_YAML, members(talk), talk_of),
        "crude": (CRUDE_YAML, members({**talk, "images": ["s.jpg"]}), talk_of),
        "crude caption": (CRUDE_YAML, captioned, caption_of),
        "crude text": (CRUDE_YAML, text, SourceSample("s", "bmr", (Turn("a?", "b"),))),
    }


@pytest.mark.parametrize("name", energon_types())
def test_a_sample_of_energons_types_is_a_row_of_its_own(name: str, tmp_path: Path) -> None:
    yaml, members, sample = energon_types()[name]
    encoder = task_encoder(UNPACKED)
    images = [members["jpg"]] if sample.images else []
    for workers in (0, 1) if name == "crude" else (0,):
        folder = tmp_path / f"{workers}"
        (batch,) = batches(folder_of(folder, {"s": members}, yaml), encoder, workers)
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


def test_data_that_contradict_the_variable_are_refused(tmp_path: Path) -> None:
    packed, packs = PackingSettings(packed=True), f"the dataset holds packs; set {PACKED}=1"
    _, members, _ = energon_types()["captioning"]
    questions, declared = f"set {PACKED}=1 {VQA}=1", "subflavors: {offline_packing: vqa}\n"
    meta = {"meta": {"task": "vqa"}}
    for path, settings, said in (
        (one_pack(tmp_path / "meta", lambda _, record: record.update(meta)), packed, questions),
        (
            one_pack(tmp_path / "declared", lambda *_: None, DATASET_YAML + declared),
            packed,
            questions,
        ),
        (legacy_vqa_folder(tmp_path / "packs"), UNPACKED, packs),
        (legacy_vqa_folder(tmp_path / "crude packs", CRUDE_YAML), UNPACKED, packs),
        (
            folder_of(tmp_path / "typed", {"s": members}, CAPTIONING_YAML),
            packed,
            f"{PACKED}=1, but .*typed holds no packs",
        ),
        (crude_folder(tmp_path / "crude", 2), packed, f"'0000.' holds no packs; set {PACKED}=0"),
    ):
        with pytest.raises((PackingSettingsError, FatalSampleError), match=said):
            next(batches(path, task_encoder(settings)))


def test_decoded_media_are_refused() -> None:
    sample = VQASample(
        __key__="k", __restore_key__=(), image=torch.zeros(3, 8, 8), context="q", answers=["a"]
    )
    with pytest.raises(FatalSampleError, match="'image' of sample 'k' is a Tensor"):
        task_encoder(UNPACKED).encode_sample(sample)


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
        "overlong": members(messages=dialogue("<image>", "word " * 3_000)),
    }


@pytest.mark.parametrize("num_workers", [0, 1])
def test_bad_samples_are_listed_in_the_next_row(num_workers: int, tmp_path: Path) -> None:
    _, good, _ = energon_types()["crude"]
    bad = bad_members()
    keyed = {f"bad{i}": members for i, members in enumerate(bad.values())}
    folder = folder_of(tmp_path / "crude", {"a": good, **keyed, "z": good}, CRUDE_YAML)
    first, last = batches(folder, task_encoder(UNPACKED), num_workers)
    assert (first.__key__, first.dropped) == (["a"], [])
    assert last.__key__ == ["z"]
    said = [line.split(": ")[:2] for line in last.dropped]
    assert said == [[key, reason] for key, reason in zip(keyed, bad, strict=True)]


@pytest.mark.parametrize("yaml", [CAPTIONING_YAML, DATASET_YAML, CRUDE_YAML])
def test_what_cannot_be_read_is_listed_too(yaml: str, tmp_path: Path) -> None:
    """A member that Energon misses, or a pack whose JSON is damaged."""
    samples = {f"{i}": vqa_pack(np.random.default_rng(0), "x", 2) for i in range(3)}
    settings, said = PACKED_VQA, "1: bad_record: pack '1': JSON cannot be parsed"
    if yaml == CAPTIONING_YAML:
        samples = {f"{i}": {**energon_types()["captioning"][1]} for i in range(3)}
        settings, said = UNPACKED, "1: bad_record: "
        del samples["1"]["jpg"]
    else:
        samples["1"]["json"] = b"{"
    rows = list(batches(folder_of(tmp_path / "data", samples, yaml), task_encoder(settings)))
    assert [row.__key__ for row in rows] == [["0"], ["2"]]
    assert [line.startswith(said) for line in rows[1].dropped] == [True]


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
        *(({name: value}, name) for name in (PACKED, VQA, BMR) for value in ("true", " 1", "2")),
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
