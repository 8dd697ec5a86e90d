"""The task encoder through the real Energon loader."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.energon import WorkerConfig, get_loader, get_savable_loader
from megatron.energon.errors import FatalSampleError

from task_encoders.energon_samples import BATCH_TENSORS, PackedBatch
from task_encoders.loading.packed_dataset import get_packed_train_dataset
from task_encoders.model_inputs import normalise_pixels
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.packs.tokenized import IGNORE_INDEX
from task_encoders.settings import PACKED, VQA, PackingSettings, PackingSettingsError
from tests.helpers.legacy_packs import (
    CRUDE_YAML,
    DATASET_YAML,
    legacy_vqa_folder,
    vqa_pack,
    write_folder,
)

PACKED_VQA = PackingSettings(packed=True, vqa=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return legacy_vqa_folder(tmp_path_factory.mktemp("legacy") / "vqa")


def task_encoder(settings: PackingSettings | None = PACKED_VQA, **options: Any) -> Any:
    return PackedTaskEncoder(**{"seq_length": 2048, "settings": settings} | options)


def batches(
    path: Path, encoder: Any = None, *, num_workers: int = 0, micro_batch_size: int = 1
) -> Iterator[PackedBatch]:
    dataset = get_packed_train_dataset(
        path,
        encoder or task_encoder(),
        micro_batch_size=micro_batch_size,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=num_workers),
        repeat=False,
    )
    return iter(get_loader(dataset))


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


def test_micro_batches_merge_packs_into_one_row(folder: Path) -> None:
    singles = list(batches(folder))
    doubles = list(batches(folder, micro_batch_size=2))
    assert len(doubles) == 6
    for first, second, double in zip(singles[::2], singles[1::2], doubles, strict=True):
        assert torch.equal(double.tokens, torch.cat([first.tokens, second.tokens], dim=1))
        ends = second.cu_lengths[:, 1:] + first.tokens.shape[1]
        assert torch.equal(double.cu_lengths, torch.cat([first.cu_lengths, ends], dim=1))
        assert torch.equal(double.imgs, torch.cat([first.imgs, second.imgs]))


def test_one_sample_can_be_restored_by_its_key(folder: Path) -> None:
    dataset = get_packed_train_dataset(
        folder, task_encoder(), worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0)
    )
    loader = get_savable_loader(dataset)
    third = list(itertools.islice(iter(loader), 3))[2]
    again = loader.restore_sample(third.__restore_key__)
    assert again.__key__ == third.__key__
    assert torch.equal(again.tokens, third.tokens)


@pytest.mark.parametrize("where", ["subflavors", "meta"])
def test_an_environment_that_contradicts_the_shards_stops(where: str, tmp_path: Path) -> None:
    pack = vqa_pack(np.random.default_rng(0), "x", 2)
    yaml = DATASET_YAML
    if where == "meta":
        record = json.loads(pack["json"])
        record["meta"] = {"task": "vqa"}
        pack["json"] = json.dumps(record).encode()
    else:
        yaml += "subflavors: {offline_packing: vqa}\n"
    path = write_folder(tmp_path / "packs", [{"ps_00000000": pack}], yaml)
    assert next(batches(path)).__key__ == ["ps_00000000"]
    with pytest.raises((PackingSettingsError, FatalSampleError), match=rf"set {PACKED}=1 {VQA}=1"):
        next(batches(path, task_encoder(PackingSettings(packed=True))))


def test_vqa_packs_that_lost_their_prompts_stop(tmp_path: Path) -> None:
    pack = vqa_pack(np.random.default_rng(0), "x", 3)
    pack["json"] = json.dumps({**json.loads(pack["json"]), "prompts": []}).encode()
    path = write_folder(tmp_path / "packs", [{"ps_00000000": pack}], DATASET_YAML)
    with pytest.raises(FatalSampleError, match=r"3 of 3 sub-samples have no prompt under task vqa"):
        next(batches(path))


def sub_sample_faults() -> dict[str, Any]:
    def drop_image(pack: dict[str, bytes], record: dict[str, Any]) -> None:
        del pack["img1.jpg"]

    def truncate_image(pack: dict[str, bytes], record: dict[str, Any]) -> None:
        pack["img1.jpg"] = pack["img1.jpg"][:-100]

    def empty_answer(pack: dict[str, bytes], record: dict[str, Any]) -> None:
        record["captions"][1] = "  "

    def two_placeholders(pack: dict[str, bytes], record: dict[str, Any]) -> None:
        record["prompts"][1] = "<image><image>"

    def too_long(pack: dict[str, bytes], record: dict[str, Any]) -> None:
        record["captions"][1] = "word " * 3_000

    return {
        "missing_image": drop_image,
        "truncated_image": truncate_image,
        "empty_answer": empty_answer,
        "image_count_mismatch": two_placeholders,
        "overlong": too_long,
    }


@pytest.mark.parametrize("reason", sub_sample_faults())
def test_a_bad_sub_sample_is_dropped_and_its_pack_goes_on(reason: str, tmp_path: Path) -> None:
    pack = vqa_pack(np.random.default_rng(0), "x", 3)
    record = json.loads(pack["json"])
    sub_sample_faults()[reason](pack, record)
    pack["json"] = json.dumps(record).encode()
    path = write_folder(tmp_path / "packs", [{"ps_00000000": pack}], DATASET_YAML)
    batch = next(batches(path))
    assert batch.sub_sample_keys == ["ps_00000000/0", "ps_00000000/2"]
    assert len(batch.dropped) == 1
    assert batch.dropped[0].startswith(f"ps_00000000/1: {reason}")
    assert len(batch.image_grid_thw) == 2


def test_lengths_that_differ_from_the_measured_ones_stop(tmp_path: Path) -> None:
    pack = vqa_pack(np.random.default_rng(0), "x", 1)
    record = json.loads(pack["json"])
    record["meta"] = {"task": "vqa", "keys": ["x"], "num_tokens": [7]}
    pack["json"] = json.dumps(record).encode()
    path = write_folder(tmp_path / "packs", [{"ps_00000000": pack}], DATASET_YAML)
    with pytest.raises(FatalSampleError, match="measured with 7"):
        next(batches(path))
    unchecked = next(batches(path, task_encoder(check_lengths=False)))
    assert unchecked.sub_sample_keys == ["x"]


def test_a_row_that_its_padding_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="2048 is not a multiple of pad_multiple 24; set"):
        task_encoder(pad_to_seq_length=True, pad_multiple=24)


@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_pixels_sent_as_bytes_become_the_same_values(folder: Path, micro_batch_size: int) -> None:
    """They come through shared memory from a worker process, as a trainer's do."""
    sent = {
        transport: list(
            batches(
                folder,
                task_encoder(pixel_transport=transport),
                num_workers=1,
                micro_batch_size=micro_batch_size,
            )
        )
        for transport in ("float32", "uint8")
    }
    for values, as_bytes in zip(sent["float32"], sent["uint8"], strict=True):
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
