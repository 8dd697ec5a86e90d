"""Megatron-Bridge on packs, and against what its own task encoder packs of the same samples."""

import io
import json
import multiprocessing
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from megatron.bridge import AutoBridge, recipes
from megatron.bridge.data.base import DatasetBuildContext
from megatron.bridge.data.conversation_processing import (
    normalize_energon_vlm_sample,
    normalized_vlm_sample_to_hf_example,
)
from megatron.bridge.data.energon.task_encoder_utils import ChatMLSample
from megatron.bridge.models.qwen_vl.data import collate_fn
from megatron.bridge.models.qwen_vl.data.energon import QwenVLTaskEncoder, QwenVLTaskSample
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.rope import get_rope_index
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.utils import (
    expand_thw,
    get_vision_cp_data,
    qwen3vl_cp_split,
    reorganize_inputs,
    split_data_cp_rank,
)
from megatron.bridge.models.qwen_vl.qwen3_vl_step import get_batch as qwen3_vl_get_batch
from megatron.bridge.recipes.common import _sft_common_vlm
from megatron.bridge.training.checkpointing import (
    maybe_load_dataloader_state,
    maybe_save_dataloader_state,
)
from megatron.bridge.training.state import GlobalState
from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides
from megatron.bridge.training.utils.packed_seq_utils import get_packed_seq_params
from megatron.bridge.training.vlm_step import forward_step, get_batch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import RerunDataIterator
from PIL import Image, ImageOps
from torch import distributed
from transformers import AutoConfig, Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

from launch.loop.parallel import initialize_parallel
from launch.model.context_parallel import part_of_rank
from launch.model.megatron_model import layer_spec
from launch.trainers.megatron_bridge import VLMIterator, main, on_packs, to_vlm_batch
from offline_packing.demo.run import MODEL
from task_encoders.families import model_cost
from task_encoders.families.builtin_processor import builtin_processor
from task_encoders.model_inputs import MEDIA_INPUTS, to_transformers_kwargs
from task_encoders.samples import SourceSample
from task_encoders.text.pieces import to_chat
from tests.helpers.context_ranks import packs_for_ranks
from tests.helpers.datasets import make_run, mixed_pairs, pack_all
from tests.helpers.hf_trainers import number_of
from tests.helpers.parity import check_losses
from tests.helpers.peers import (
    assert_same,
    open_packs,
    small_checkpoint,
    small_packs,
    stored_samples,
)
from tests.helpers.rank_processes import PRELOADED, run_ranks

END, NEWLINE = 151645, 198
#: A caption after its images, without the headers of a dialogue.
CAPTION_TEMPLATE = (
    "{% for part in messages[0].content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}"
    "{{ part.text }}{% endif %}{% endfor %}<|im_end|>"
)
#: Limits of images in pixels, those of the demo's packs.
LIMITS = {"min_pixels": 3136, "max_pixels": 100352}


def make_model(**changes: Any) -> Any:
    """The part of a model that packs read."""
    given = {"vision_config": SimpleNamespace(patch_size=14), "context_parallel_size": 1}
    given |= {"tensor_model_parallel_size": 1, "sequence_parallel": False}
    return SimpleNamespace(**(given | changes))


def make_recipe(packed: Path, model: Any = None) -> Any:
    """The beginning of Bridge's recipes for vision models, on packs."""
    recipe = _sft_common_vlm()
    recipe.model = model or make_model()
    return on_packs(recipe, packed)


def make_iterator(
    packed: Path, num_workers: int = 0, *, model: Any = None, validation: bool = False
) -> Any:
    """Rows as Bridge's setup makes them of a recipe."""
    config = make_recipe(packed, model).dataset
    config.num_workers = num_workers
    context = DatasetBuildContext(
        train_samples=int(not validation),
        valid_samples=int(validation),
        test_samples=0,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    (iterator,) = (one for one in config.build_datasets(context) if one is not None)
    return RerunDataIterator(iterator)


def as_read(rows: Any) -> dict[str, Any]:
    """The next row as `vlm_step` hands it to its model."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    names = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
    *tensors, boundaries, visual = get_batch(
        rows, SimpleNamespace(dataset=None), pg_collection=groups
    )
    assert all(value.dtype == torch.int32 for value in boundaries.values())
    return dict(zip(names, tensors, strict=True)) | boundaries | visual.normalized_for_model()


def assert_equal(ours: Mapping[str, Any], theirs: Mapping[str, Any], where: str) -> None:
    given = {name: value for name, value in theirs.items() if value is not None}
    assert given.keys() == {name for name, value in ours.items() if value is not None}, where
    assert_same(ours, given, where)


def own_encoder(task: str = "vqa", **options: Any) -> QwenVLTaskEncoder:
    """Bridge's, with a template that ends as packed samples do: without a last newline."""
    builtin = builtin_processor()
    end, last = "<|im_end|>\n{% endfor %}", "<|im_end|>{{ '' if loop.last else '\n' }}{% endfor %}"
    dialogue = builtin.chat_template.replace(end, last)
    assert dialogue != builtin.chat_template
    processor = Qwen2_5_VLProcessor(
        Qwen2VLImageProcessorPil(**LIMITS),
        builtin.tokenizer,
        Qwen2VLVideoProcessor(),
        chat_template=CAPTION_TEMPLATE if task == "captioning" else dialogue,
    )
    return QwenVLTaskEncoder(
        builtin.tokenizer,
        processor,
        max_num_images=None,
        max_visual_tokens=None,
        enable_in_batch_packing=True,
        **(LIMITS | options),
    )


def own_sample(sample: SourceSample, media: list[bytes]) -> ChatMLSample:
    """Upright, as Bridge does not turn images by their EXIF orientation."""
    images = [ImageOps.exif_transpose(Image.open(io.BytesIO(data))) for data in media]
    chat = to_chat(sample)
    if sample.task == "captioning":
        text = {"type": "text", "text": sample.turns[0].answer}
        chat = [{"role": "assistant", "content": [*({"type": "image"} for _ in media), text]}]
    for part in (part for turn in chat for part in turn["content"] if part in ({"type": "image"},)):
        part |= LIMITS  # else it resizes twice
    return ChatMLSample(
        __key__=sample.key,
        __restore_key__=(),
        __subflavors__={},
        conversation=json.dumps(chat),
        imgs=images,
    )


def own_batch(encoder: QwenVLTaskEncoder, samples: Any) -> dict[str, Any]:
    """The samples as Bridge packs them, with two changes: images stay where they are in their turn,
    and the newline after every answer is not trained."""
    encoded = []
    for sample in samples:
        chat = normalize_energon_vlm_sample(own_sample(*sample))
        example = normalized_vlm_sample_to_hf_example(chat)
        encoded.append(QwenVLTaskSample(sample[0].key, {}, example))
    batch: dict[str, Any] = encoder.encode_batch(encoder.batch(encoded))
    newline = (batch["input_ids"] == END) & (batch["labels"] == NEWLINE)
    batch["labels"][newline], batch["loss_mask"][newline] = -100, 0
    return batch


def tiny_provider(checkpoint: Path) -> Any:
    """Bridge's provider for a checkpoint; local modules stand in for those of TransformerEngine."""
    provider = AutoBridge.from_hf_pretrained(str(checkpoint)).to_megatron_provider(False)
    provider.transformer_layer_spec = layer_spec(backend="sdpa", recompute=False, qk_norm=False)
    provider.mrope_section = [2, 3, 3]  # which Bridge does not read
    provider.params_dtype = provider.autocast_dtype = torch.float32
    provider.bf16, provider.use_cpu_initialization = False, True
    for name in ("gradient_accumulation", "bias_activation", "bias_dropout", "masked_softmax"):
        setattr(provider, f"{name}_fusion", False)
    provider.persist_layer_norm = provider.cross_entropy_loss_fusion = False
    return provider


def qwen3_vl_positions(checkpoint: Path, row: Mapping[str, Any]) -> torch.Tensor:
    """Those that Bridge's Qwen3-VL gives a row."""
    config = AutoConfig.from_pretrained(checkpoint)
    positions, _ = get_rope_index(
        config.vision_config.spatial_merge_size,
        config.image_token_id,
        config.video_token_id,
        config.vision_start_token_id,
        row["tokens"],
        image_grid_thw=row["visual_inputs"].image_grid_thw,
        packed_seq_params=get_packed_seq_params(row),
    )
    return positions


Say = Callable[[str], None]
VERSION = f"Megatron-Bridge {version('megatron-bridge')}, core {version('megatron-core')}"
multiprocessing.set_forkserver_preload(
    [*PRELOADED, "tests.peers", "launch.trainers.megatron_bridge"]
)


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, whose GPU is the CPU."""
    initialize_parallel(1)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor, **_: tensor)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")


def test_every_demo_pack_is_what_its_task_encoder_packs(
    task: str, demo: dict[str, Path], monkeypatch: pytest.MonkeyPatch, say: Say
) -> None:
    encoder = own_encoder(task)
    if task == "captioning":  # of which it finds no answers, as they have no headers
        with pytest.raises(ValueError, match="did not match any loss-contributing spans"):
            own_batch(encoder, islice(stored_samples(open_packs(demo[task])[0]), 1))
        monkeypatch.setattr(collate_fn, "CHATML_ASSISTANT_START", "<|vision_end|>")
        monkeypatch.setattr(collate_fn, "CHATML_ASSISTANT_END", "<|im_end|>")
    num_packs = 0
    for split in ("train", "val"):
        rows = make_iterator(demo[task], validation=split == "val")
        for pack in open_packs(demo[task], split):
            own = own_batch(encoder, stored_samples(pack))
            assert_equal(as_read(rows), as_read(iter([own])), f"{task} {split} {pack.number}")
            num_packs += 1
    assert num_packs > 2
    say(f"{VERSION}: {num_packs} packs of {task} are what its task encoder packs")


def test_its_qwen3_vl_places_packs_as_we_do(tmp_path: Path, say: Say) -> None:
    checkpoint = small_checkpoint("qwen3_vl", tmp_path / "checkpoint")
    packs = open_packs(small_packs("qwen3_vl", checkpoint, tmp_path))
    for number in range(len(packs)):
        batch = packs.batch([number])
        found = qwen3_vl_positions(checkpoint, to_vlm_batch(batch))
        assert torch.equal(found, batch.position_ids), number
    say(f"{VERSION}: its Qwen3-VL gives {len(packs)} packs our M-RoPE positions")


def test_pixels_become_values_after_its_step_has_copied_them(
    case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    packs, copied = open_packs(case[1]), []
    monkeypatch.setattr(torch.Tensor, "cuda", lambda one, **_: copied.append(one.dtype) or one)
    rows, num_images = make_iterator(case[1]), 0
    for number in range(len(packs)):
        expected = to_transformers_kwargs(packs.batch([number]))
        copied.clear()
        found = as_read(rows)
        assert {name for name in MEDIA_INPUTS if name in found} == expected.keys() & {*MEDIA_INPUTS}
        for name in expected.keys() & {*MEDIA_INPUTS}:
            assert torch.equal(found[name], expected[name]), (number, name)
        num_images += "pixel_values" in found
        assert (torch.uint8 in copied) == ("pixel_values" in found)
    assert num_images > 1


def test_rows_padded_for_context_parallelism(tmp_path: Path, say: Say) -> None:
    """Bridge pads with token 0, packs with the tokenizer's own; nothing else differs."""
    source = {"format": "pairs", "path": str(mixed_pairs(tmp_path / "source", 30)), "task": "bmr"}
    options = {"seq_length": 512, "pad_multiple": 4}
    pack_all(make_run(source, tmp_path / "packed", model=dict(MODEL), pack=options))
    packs = open_packs(tmp_path / "packed")
    rows = make_iterator(tmp_path / "packed", model=make_model(context_parallel_size=2))
    encoder = own_encoder(in_batch_packing_pad_to_multiple_of=4)
    for pack in packs:
        ours, own = as_read(rows), as_read(iter([own_batch(encoder, stored_samples(pack))]))
        padding = ours["tokens"] == encoder.hf_tokenizer.pad_token_id
        assert padding.any()
        own["tokens"][padding] = encoder.hf_tokenizer.pad_token_id
        assert_equal(ours, own, str(pack.number))
    assert len(packs) > 2
    say(f"{VERSION}: {len(packs)} packs padded to multiples of 4 are what its task encoder packs")


@pytest.mark.parametrize("size", [2, 4])
def test_its_split_gives_each_rank_what_it_should(size: int, tmp_path: Path, say: Say) -> None:
    """Bridge's zigzag split of each segment gives the tokens that `part_of_rank` says; its split of
    pictures by count gives each to one rank, whole and in order."""
    packs, shares_of_work, num_videos = packs_for_ranks(tmp_path, size), [], 0
    for number in range(len(packs)):
        batch = packs.batch([number])
        row, lengths = to_vlm_batch(batch), batch.cu_lengths[0].diff().tolist()
        params = get_packed_seq_params(row)
        for rank in range(size):
            own = part_of_rank(params, size, rank).own
            for name in ("tokens", "labels", "loss_mask", "position_ids"):
                pieces = row[name].split(lengths, dim=-1)
                given = [split_data_cp_rank(piece, size, 1, rank) for piece in pieces]
                assert torch.equal(torch.cat(given, dim=1), row[name][:, own]), (number, name)
        media = to_transformers_kwargs(batch)
        media = {name: media[name] for name in MEDIA_INPUTS if name in media}
        if not media:
            continue
        num_videos += len(batch.video_grid_thw)
        stored, whole, _ = reorganize_inputs(batch.tokens, **media)
        pixels, grids, *counts = qwen3vl_cp_split(size, stored, whole)
        shares = [get_vision_cp_data(pixels, grids, 4, *counts, rank, size) for rank in range(size)]
        assert all(len(share[1]) for share in shares) == (len(grids) >= size)
        assert torch.equal(torch.cat([share[0] for share in shares]), stored)
        assert torch.equal(torch.cat([share[1] for share in shares]), expand_thw(whole))
        work = model_cost(packs.task_encoder.encoder.options).tower_flops
        shares_of_work.append([float(work(share[1].prod(1).double()).sum()) for share in shares])
    spent = torch.tensor(shares_of_work)
    idle = 1 - spent.sum() / (size * spent.amax(dim=1).sum())
    assert 2 < len(spent) < len(packs)
    assert num_videos > 20
    say(
        f"{VERSION}: CP {size} cuts {len(packs)} packs as launch does; the pictures of "
        f"{len(spent)} go to one rank each, whose towers idle {idle:.1%} of the time"
    )


def numbers_read(packed: Path) -> list[int]:
    """Numbers of the packs that this rank trains on in an epoch."""
    initialize_parallel(1)
    packs = open_packs(packed)
    rows = make_iterator(packed)
    share = len(packs) // distributed.get_world_size()
    return [number_of(next(rows)["tokens"], packs) for _ in range(share)]


def test_order(case: Any, tmp_path: Path, say: Say) -> None:
    _, packed = case
    for world_size in (1, 2, 4):
        read = run_ranks(world_size, tmp_path / f"ranks{world_size}", numbers_read, packed)
        for numbers in read:  # a slice each, as Energon deals
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        every = [number for numbers in read for number in numbers]
        assert sorted(set(every)) == sorted(every)
    say(f"{VERSION}: order of packs kept on 1, 2 and 4 ranks")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_its_checkpoint_keeps_the_place(
    num_workers: int, case: Any, tmp_path: Path, say: Say
) -> None:
    """As Bridge saves and restores it, in the middle of the first epoch and of the second."""
    _, packed = case
    groups = ProcessGroupCollection.use_mpu_process_groups()
    options: dict[str, Any] = {"pg_collection": groups}
    whole = make_iterator(packed, num_workers)
    rows = []
    size = len(open_packs(packed))
    for step in range(size + 5):
        rows.append(next(whole))
        maybe_save_dataloader_state(None, whole, step, str(tmp_path), **options)
    for step in (2, size + 1):
        resumed = make_iterator(packed, num_workers)
        maybe_load_dataloader_state(resumed, step, str(tmp_path), **options)
        for number in range(step + 1, step + 4):
            assert_equal(as_read(resumed), as_read(iter([rows[number]])), f"row {number}")
    say(f"{VERSION}: its checkpoint, with {num_workers} workers, goes on in the middle of an epoch")


def test_steps_are_those_of_our_own_trainer(case: Any, tmp_path: Path, say: Say) -> None:
    """With Bridge's recipe, model, weights, step and loss; its training loop needs a GPU."""
    checkpoint, packed = case
    state = GlobalState()
    state.cfg = make_recipe(packed, tiny_provider(checkpoint))
    provider = state.cfg.model
    provider.finalize()
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    model = provider.provide(pre_process=True, post_process=True)
    AutoBridge.from_hf_pretrained(str(checkpoint)).load_hf_weights([model])
    rows = make_iterator(packed, model=provider)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for _ in range(2):
        output, loss_function = forward_step(state, rows, model)
        loss, count, _ = loss_function(output)
        losses.append(float(loss.detach() / count))
        (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    difference = check_losses(packed, checkpoint, losses, tmp_path / "ours")
    say(f"{VERSION}: loss before and after a step as launch.train's (to {difference:.0e})")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.seq_length=4096", "model.seq_length is 4096; set 512"),
        ("train.micro_batch_size=2", "train.micro_batch_size is 2; set 1: a pack is a full row"),
        ("model.calculate_per_token_loss=false", "set True: rows differ in their number of labels"),
        ("ddp.average_in_collective=true", "ddp.average_in_collective is True; set False"),
        ("model.context_parallel_size=2", "set 1: Bridge's Qwen2.5-VL does not cut rows"),
        ("validation.eval_iters=4", "validation.eval_iters is 4; set 0: .* has no val split"),
    ],
)
def test_settings_against_packs_are_refused(override: str, message: str, case: Any) -> None:
    """By Bridge's own validation, after overrides of the command line."""
    recipe = make_recipe(case[1], tiny_provider(case[0]))
    recipe.data_parallel_size = 1
    process_config_with_overrides(recipe, cli_overrides=["train.train_iters=9"])
    recipe.dataset.finalize()
    process_config_with_overrides(recipe, cli_overrides=[override])
    with pytest.raises(ValueError, match=message):
        recipe.validate()


def test_command(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to Bridge's training loop, which needs a GPU."""
    given: list[Any] = []
    loop = SimpleNamespace(finetune=lambda *arguments: given.extend(arguments))
    monkeypatch.setitem(sys.modules, "megatron.bridge.training.finetune", loop)
    recipe = make_recipe(case[1], tiny_provider(case[0]))
    monkeypatch.setattr(recipes, "tiny_config", lambda: recipe, raising=False)
    arguments = ["tiny_config", str(case[1]), "train.train_iters=7", "dataset.num_workers=1"]
    assert CliRunner().invoke(main, arguments, catch_exceptions=False).exit_code == 0
    config, step = given
    assert (config.train.train_iters, config.dataset.num_workers) == (7, 1)
    config.dataset.finalize()
    assert step is forward_step
    assert "has no nothing" in CliRunner().invoke(main, ["nothing", str(case[1])]).output
    assert callable(recipes.qwen25_vl_7b_sft_config)
    assert callable(recipes.qwen3_vl_8b_sft_config)


def test_data_against_the_model_is_refused(case: Any) -> None:
    _, packed = case
    with pytest.raises(ValueError, match="qwen2_5_vl does not fit the model's patches of 16"):
        make_iterator(packed, model=make_model(vision_config=SimpleNamespace(patch_size=16)))
    batch = open_packs(packed).batch([0])
    video = replace(batch, video_grid_thw=torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"places Qwen2\.5-VL's videos by seconds"):
        next(VLMIterator([video], places_videos=False))
    with pytest.raises(ValueError, match="does not support collate-time in-batch packing"):
        qwen3_vl_get_batch(
            iter([to_vlm_batch(batch)]),
            SimpleNamespace(dataset=None),
            is_first_pp_stage=True,
            is_last_pp_stage=True,
        )
