"""Megatron-LM's multimodal example on packs, and against what its own code makes of their samples;
its cut of packs for context parallelism.

It is not a package: MEGATRON_LM names a checkout. Its tiles stand for merged patches here, one
embedding each, and its tokenizer has Qwen2-VL's words, so that rows are of one length in both.
"""
# ruff: noqa: E402  the checkout's folders come first

import io
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image, ImageOps

if not os.environ.get("MEGATRON_LM"):
    pytest.skip("MEGATRON_LM=DIR names no checkout of Megatron-LM", allow_module_level=True)
CHECKOUT = Path(os.environ["MEGATRON_LM"])
EXAMPLE = CHECKOUT / "examples/multimodal"
OWN_PATHS = [str(CHECKOUT), str(EXAMPLE)]  # first, for the core that the example was written for
sys.path[:0] = OWN_PATHS
os.environ["PYTHONPATH"] = os.pathsep.join([*OWN_PATHS, *sys.path])  # of the ranks' server

import dataset_helpers
import energon_util
import train as example
from megatron.core import __version__ as core_version
from megatron.core import parallel_state
from megatron.core import utils as core_utils
from megatron.core.models.multimodal.llava_model import IMAGE_TOKEN, LLaVAModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.tokenizers.vision.libraries import multimodal_tokenizer
from megatron.energon import VQASample
from megatron.training import global_vars
from megatron.training.checkpointing import get_checkpoint_name, maybe_save_dataloader_state
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from launch.loop.parallel import initialize_parallel
from launch.trainers.megatron_lm import build_dataloaders, get_batch
from offline_packing.demo.run import MODEL, SEQ_LENGTH
from task_encoders.energon_samples import PackedBatch
from task_encoders.families.builtin_processor import builtin_processor
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.model_inputs import to_packed_seq_params
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.samples import IGNORE_INDEX, SourceSample, place_media
from task_encoders.settings import PackingSettings
from tests.helpers.context_ranks import (
    boundaries,
    differing_cuts,
    packs_for_ranks,
    use_partitioned_indices,
)
from tests.helpers.peers import assert_same, open_packs, stored_samples
from tests.helpers.prepared_folders import text_folder
from tests.helpers.rank_processes import run_ranks
from tests.peers import Say

VERSION = f"Megatron-LM, core {core_version}"
Batch = dict[str, torch.Tensor]
END, NEWLINE, IMAGE_PAD = 151645, 198, 151655
SYSTEM = "You are a helpful assistant."
#: An image and a caption, without headers: packs of captions are that.
CAPTIONS = (
    "{% for m in messages %}{{ m.content | trim }}"
    "{% if m.role == 'assistant' %}<|im_end|>\n{% endif %}{% endfor %}"
)
NAMES = ("tokens", "labels", "loss_mask", "cu_seqlens", "max_seqlen")
SWITCHED_OFF = (
    "use_area_weighted_aspect_ratio use_tiling use_tile_tags use_thumbnail pixel_shuffle freeze_LM "
    "fp8 use_torch_fsdp2 sequence_parallel"
)
ONE_EMBEDDING = {"img_h": 14, "img_w": 14, "patch_dim": 14, "disable_vision_class_token": True}
ARGS: dict[str, Any] = {
    "prompt_path": EXAMPLE / "manual_prompts.json",
    "tokenizer_prompt_format": "qwen2p0",
    "vision_model_type": "clip",
    **ONE_EMBEDDING,
    **dict.fromkeys(("packing_seq_length", "decoder_seq_length"), 2 * SEQ_LENGTH),  # with newlines
    **dict.fromkeys(("dataloader_seq_length", "packing_buffer_size")),
    **dict.fromkeys(("context_parallel_size", "tensor_model_parallel_size", "max_num_tiles"), 1),
    **dict.fromkeys(SWITCHED_OFF.split(), False),
}


def tiles(image: Image.Image, *_: Any, **__: Any) -> list[torch.Tensor]:
    """In place of its image transform: one per merged patch of Qwen2-VL."""
    limits = {"min_pixels": 3136, "max_pixels": MODEL["max_pixels"]}
    height, width = smart_resize(image.height, image.width, **limits)
    return [torch.zeros(3, 1, 1)] * (height * width // 28**2)


def broadcast_to_one(keys: list[str], data: Any, dtype: torch.dtype) -> Batch:
    """In place of megatron-core's, which goes through a GPU."""
    assert all(data[key].dtype == dtype for key in keys), keys
    return {key: data[key] for key in keys}


@pytest.fixture
def args(monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """The example's arguments, as long as the test lasts."""
    given = Namespace(**ARGS)
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", given)
    return given


@pytest.fixture
def encoder(args: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its task encoder, with the tokenizer of our packs."""
    initialize_parallel()
    builtin_processor(min_pixels=3136, max_pixels=100352).tokenizer.save_pretrained(tmp_path)
    around = {"qwen2_vl": ("<|vision_start|>", "<|vision_end|>")}
    monkeypatch.setattr(multimodal_tokenizer, "IMAGE_TAGS", around)
    tokenizer = multimodal_tokenizer.MegatronMultimodalTokenizer(
        str(tmp_path), "qwen2p0", [IMAGE_TOKEN], "qwen2_vl", force_system_message=True
    )
    monkeypatch.setattr(global_vars, "_GLOBAL_TOKENIZER", tokenizer)
    monkeypatch.setattr(example.tensor_parallel, "broadcast_data", broadcast_to_one)
    made = dataset_helpers.TaskEncoder()
    assert made.num_image_embeddings_per_tile == 1
    made.transform_img = tiles
    return made


def own_sample(sample: SourceSample, media: list[bytes]) -> Any:
    """A sample as its datasets give it out: of a caption, what it knows as LLaVA's pretraining."""
    images = [ImageOps.exif_transpose(Image.open(io.BytesIO(data))) for data in media]
    base: dict[str, Any] = {"__key__": "k", "__restore_key__": (), "__subflavors__": {}}
    if sample.task == "captioning":
        base["__subflavors__"] = {"is_llava_training": True}
        return VQASample(image=images[0], context="", answers=sample.turns[0].answer, **base)
    texts = []
    for turn in place_media(sample):
        texts += [{"from": "human", "value": turn.prompt}, {"from": "gpt", "value": turn.answer}]
    base |= {"__subflavor__": None, "target_aspect_ratio": []}
    return energon_util.OfflineTargetAspectRatioSample(images=images, texts=texts, **base)


def encode(encoder: Any, sample: SourceSample, media: list[bytes]) -> Any:
    """A sample as its task encoder encodes it."""
    own = own_sample(sample, media)
    if sample.task == "captioning":
        return encoder.encode_llava_pretrain(own)
    config = encoder.tokenizer._prompt_config
    config.system_default = {"role": "system", "content": sample.system or SYSTEM}
    return encoder.encode_llava_sft(own, truncate_for_sample_list_packing=True)


def own_batch(encoder: Any, samples: list[Any]) -> Batch:
    """The batch of one pack as its dataloader gives it out."""
    return encoder.encode_batch(encoder.batch([encoder.pack_selected_samples(samples)]))


def given_to_its_model(encoder: Any, batch: Batch) -> Batch:
    """By its get_batch, and then by the model's own code: embeddings in the place of tiles."""
    given = example.get_batch(iter([batch]), encoder.img_token_id, 1)
    tokens, labels, loss_mask, _, _, _, num_tiles, packing = given
    lengths = {"img_seq_len": 1, "_language_max_sequence_length": 2 * SEQ_LENGTH}
    off = ("pre_process", "_dynamic_resolution", "_language_is_pipeline_parallel")
    model: Any = SimpleNamespace(
        add_decoder=True, post_process=True, context_parallel_lm=1, **lengths, **dict.fromkeys(off)
    )
    text = (tokens, loss_mask, labels, False, None, encoder.img_token_id, num_tiles)
    _, labels, loss_mask, tokens, _ = LLaVAModel._preprocess_data(model, None, None, *text)
    trained = labels[0].where(loss_mask[0] > 0, IGNORE_INDEX)
    row = (tokens[0], trained, loss_mask[0], packing.cu_seqlens_q, packing.max_seqlen_q)
    return dict(zip(NAMES, row, strict=True))


def without_newlines(row: Batch) -> Batch:
    """But for the newline after every end token, which its template trains, also the last one."""
    last = row["cu_seqlens"][1:].long() - 1
    assert bool((row["tokens"][last] == NEWLINE).all())
    kept = ~torch.isin(torch.arange(len(row["tokens"])), last)
    trained = (row["tokens"] == END) & (row["labels"] == NEWLINE)
    assert trained.sum() >= len(last)
    return {
        "tokens": row["tokens"][kept],
        "labels": row["labels"].masked_fill(trained, IGNORE_INDEX)[kept],
        "loss_mask": row["loss_mask"].masked_fill(trained, 0)[kept],
        "cu_seqlens": row["cu_seqlens"] - torch.arange(len(last) + 1),
        "max_seqlen": row["max_seqlen"] - 1,
    }


def our_row(folder: PackedFolder, number: int) -> Batch:
    """A pack as our get_batch gives it to a model, except for the id at an image's place."""
    batch = get_batch(iter([folder.batch([number])]), torch.device("cpu"))
    packing = to_packed_seq_params(batch)
    tokens = batch.tokens[0].masked_fill(batch.tokens[0] == IMAGE_PAD, 0)
    row = (tokens, batch.labels[0], batch.loss_mask[0], packing.cu_seqlens_q, packing.max_seqlen_q)
    return dict(zip(NAMES, row, strict=True))


@pytest.mark.parametrize("task", ["captioning", "vqa", "bmr"])
def test_every_demo_pack_is_what_its_task_encoder_makes_of_its_samples(
    task: str, demo: dict[str, Path], encoder: Any, say: Say
) -> None:
    if task == "captioning":
        config = encoder.tokenizer._prompt_config
        config.custom_chat_template, config.assistant_prefix_len = CAPTIONS, 0
        config.force_system_message = False
    num_packs = num_tokens = 0
    for split in ("train", "val"):
        folder = open_packs(demo[task], split)
        for number, pack in enumerate(folder):
            samples = [encode(encoder, *sample) for sample in stored_samples(pack)]
            theirs = given_to_its_model(encoder, own_batch(encoder, samples))
            ours = our_row(folder, number)
            assert_same(ours, without_newlines(theirs), f"{task} {split} {number}")
            num_packs, num_tokens = num_packs + 1, num_tokens + len(ours["tokens"])
    assert num_packs > 2
    say(
        f"{num_packs} packs of {task}, {num_tokens} tokens, are what its "
        "task encoder, get_batch and LLaVAModel make of their samples"
    )


def rest_after_saving(folder: Path, root: Path, count: int, more: int) -> list[list[str]]:
    """Keys that this rank reads after its state was saved, and those after it was read back."""
    initialize_parallel()
    args = Namespace(data_path=str(folder), micro_batch_size=1, num_workers=1, eval_iters=0)
    task_encoder = PackedTaskEncoder(seq_length=64, settings=PackingSettings(True, bmr=True))

    def keys(data: Iterator[Any]) -> list[str]:
        return [key for _ in range(more) for key in next(data).__key__]

    data, _, _ = build_dataloaders(args, task_encoder)
    train = RerunDataIterator(data)
    for _ in range(count):
        next(train)
    maybe_save_dataloader_state(train, count, str(root))
    name = f"train_dataloader_dprank{torch.distributed.get_rank():03d}.pt"
    saved = get_checkpoint_name(str(root), count, pipeline_rank=0, basename=name)
    restored, _, _ = build_dataloaders(args, task_encoder, saved)
    return [keys(train), keys(restored)]


def test_its_saving_of_dataloaders_gives_the_rest(tmp_path: Path, say: Say) -> None:
    folder = text_folder(tmp_path / "packs", 16)
    for world_size in (1, 2, 4):
        root = tmp_path / f"ranks{world_size}"
        share = 16 // world_size
        found = run_ranks(world_size, root, rest_after_saving, folder, root / "out", 2, share)
        for rank, (went_on, restored) in enumerate(found):
            slice_of_rank = list(range(rank * share, (rank + 1) * share))
            expected = [f"{i:02d}" for i in slice_of_rank[2:] + slice_of_rank[:2]]
            assert went_on == restored == expected
    say("maybe_save_dataloader_state restored in an epoch, on 1, 2, 4 ranks")


@pytest.mark.parametrize("size", [2, 4])
def test_its_cut_gives_each_rank_what_it_should(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: Say
) -> None:
    tex = use_partitioned_indices(monkeypatch)
    monkeypatch.setattr(core_utils, "tex", tex, raising=False)

    def cut(row: PackedBatch, params: PackedSeqParams) -> dict[str, torch.Tensor]:
        segments = boundaries(params)[None]
        batch = {
            "tokens": row.tokens,
            "labels": row.labels,
            "loss_mask": row.loss_mask,
            "position_ids": row.position_ids.permute(1, 2, 0),  # along the second axis
            "cu_seqlens": segments,
            "cu_seqlens_padded": segments,
        }
        group = parallel_state.get_context_parallel_group()
        found = core_utils.get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)
        assert torch.equal(found.pop("cu_seqlens"), segments)
        assert torch.equal(found.pop("cu_seqlens_padded"), segments)
        return found | {"position_ids": found["position_ids"].permute(2, 0, 1)}

    packs = packs_for_ranks(tmp_path, size)
    assert differing_cuts(packs, size, cut) == []
    say(f"CP {size} cuts {len(packs)} packs as launch does")
