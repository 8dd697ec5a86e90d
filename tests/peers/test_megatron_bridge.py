"""Megatron-Bridge on packs, and against what its own task encoder packs of the same samples."""

import json
import multiprocessing
import sys
from collections.abc import Mapping, Sequence
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
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.models.qwen_vl import (
    Qwen3VLModelProvider,
    Qwen25VLModelProvider,
    Qwen35VLModelProvider,
)
from megatron.bridge.models.qwen_vl.data import collate_fn
from megatron.bridge.models.qwen_vl.data.energon import QwenVLTaskEncoder, QwenVLTaskSample
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.rope import get_rope_index
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.utils import (
    Qwen3VLVisionPatchMerger,
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
from megatron.core import utils as core_utils
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import RerunDataIterator
from torch import distributed
from transformers import AutoProcessor, Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

from launch.data.packed_data import read_packed_data
from launch.loop.parallel import initialize_parallel
from launch.model.megatron.context_parallel import part_of_rank
from launch.trainers import megatron_bridge
from launch.trainers.megatron_bridge import main, on_packs, to_vlm_batch
from task_encoders.energon_samples import PackedBatch
from task_encoders.families import FAMILIES
from task_encoders.families.builtin_processor import builtin_processor
from task_encoders.model_inputs import MEDIA_INPUTS, to_transformers_kwargs
from task_encoders.samples import SourceSample
from tests.helpers.context_ranks import packs_for_ranks, use_partitioned_indices
from tests.helpers.hf_trainers import number_of, several_packs, with_processor
from tests.helpers.peers import (
    CAPTION_TEMPLATE,
    assert_same,
    check_losses,
    encoded_alone,
    open_packs,
    pack_dialogues,
    refuse_packs_of_few,
    small_checkpoint,
    stored_samples,
)
from tests.helpers.rank_processes import PRELOADED, run_ranks
from tests.helpers.tiny_checkpoints import packed_batch, randomise
from tests.helpers.videos import short_dialogues
from tests.peers import Say, chat_of

END, MEDIA = "<|im_end|>", ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>")
#: Providers of models by the family of packs.
PROVIDERS: dict[str, Any] = {
    "qwen2_vl": Qwen25VLModelProvider,  # of the demo
    "qwen2_5_vl": Qwen25VLModelProvider,
    "qwen3_5": Qwen35VLModelProvider,
}
#: Limits of images in pixels, those of the demo's packs.
LIMITS = {"min_pixels": 3136, "max_pixels": 100352}


def make_model(kind: Any, **changes: Any) -> Any:
    """Bridge's provider, of which packs read a part."""
    return kind(num_layers=1, hidden_size=64, num_attention_heads=4, **changes)


def make_recipe(packed: Path, model: Any = None) -> Any:
    """The beginning of Bridge's recipes for vision models, on packs."""
    recipe = _sft_common_vlm()
    recipe.model = model or make_model(PROVIDERS[read_packed_data(packed).model.family])
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


def own_encoder(
    task: str = "vqa", checkpoint: Path | None = None, **options: Any
) -> QwenVLTaskEncoder:
    """Bridge's, with a template that ends as packed samples do: without a last newline.
    `checkpoint`: one with a processor, instead of the demo's."""
    if checkpoint is None:
        builtin = builtin_processor()
        parts = Qwen2VLImageProcessorPil(**LIMITS), builtin.tokenizer, Qwen2VLVideoProcessor()
        processor = Qwen2_5_VLProcessor(*parts, chat_template=builtin.chat_template)
    else:
        processor = AutoProcessor.from_pretrained(checkpoint)
        processor.image_processor = Qwen2VLImageProcessorPil.from_pretrained(checkpoint)
    whole = f"{{% set whole %}}{processor.chat_template}{{% endset %}}{{{{ whole[:-1] }}}}"
    processor.chat_template = CAPTION_TEMPLATE if task == "captioning" else whole
    return QwenVLTaskEncoder(
        processor.tokenizer,
        processor,
        max_num_images=None,
        max_visual_tokens=None,
        enable_in_batch_packing=True,
        **(LIMITS | options),
    )


def own_sample(sample: SourceSample, media: list[bytes], limits: Mapping[str, int]) -> ChatMLSample:
    """Return a sample as its datasets give it out."""
    chat = chat_of(sample, media)
    parts = [part for turn in chat for part in turn["content"] if part["type"] == "image"]
    images = [part.pop("image") for part in parts]
    for part in parts:
        part |= limits  # else it resizes twice
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
    limits = {"min_pixels": encoder.min_pixels, "max_pixels": encoder.max_pixels}
    encoded = []
    for sample in samples:
        chat = normalize_energon_vlm_sample(own_sample(*sample, limits))
        example = normalized_vlm_sample_to_hf_example(chat)
        encoded.append(QwenVLTaskSample(sample[0].key, {}, example))
    batch: dict[str, Any] = encoder.encode_batch(encoder.batch(encoded))
    end, *ids = (encoder.hf_tokenizer.convert_tokens_to_ids(name) for name in (END, *MEDIA))
    (line_feed,) = encoder.hf_tokenizer.encode("\n")
    newline = (batch["input_ids"] == end) & (batch["labels"] == line_feed)
    batch["labels"][newline], batch["loss_mask"][newline] = -100, 0
    batch["position_ids"] = its_positions(ids, batch["input_ids"], batch)
    return batch


def its_positions(ids: Sequence[int], tokens: torch.Tensor, row: Any) -> torch.Tensor:
    """M-RoPE's positions (3, 1, S) that Bridge's Qwen3-VL would give a row; of images, those of
    Qwen2.5-VL are the same. `ids`: of the tokens MEDIA."""
    grids = row["visual_inputs"].normalized_for_model()
    positions, _ = get_rope_index(
        2,
        *ids,
        tokens,
        image_grid_thw=grids.get("image_grid_thw"),
        video_grid_thw=grids.get("video_grid_thw"),
        packed_seq_params=get_packed_seq_params(row),
    )
    return positions


def check_rows(
    packed: Path, encoder: QwenVLTaskEncoder, split: str = "train", model: Any = None
) -> int:
    """Our rows are what Bridge's task encoder packs of the same samples. Returns their number."""
    rows = make_iterator(packed, model=model, validation=split == "val")
    packs = open_packs(packed, split)
    for pack in packs:
        own = own_batch(encoder, stored_samples(pack))
        assert_equal(as_read(rows), as_read(iter([own])), f"{packed} {split} {pack.number}")
    return len(packs)


def tiny_provider(checkpoint: Path, **options: Any) -> Any:
    """Bridge's provider for a checkpoint, in float32 and without fusions."""
    provider = AutoBridge.from_hf_pretrained(str(checkpoint)).to_megatron_provider(False)
    if isinstance(provider, Qwen25VLModelProvider):
        provider.mrope_section = [2, 3, 3]  # which Bridge does not read
    provider.params_dtype = provider.autocast_dtype = torch.float32
    provider.bf16, provider.use_cpu_initialization = False, True
    fusions = ("gradient_accumulation", "bias_activation", "bias_dropout", "masked_softmax")
    for name in (*fusions, "moe_permute"):
        setattr(provider, f"{name}_fusion", False)
    provider.persist_layer_norm = provider.cross_entropy_loss_fusion = False
    for part in ("language_model", "vision_model", "vision_projection"):
        setattr(provider, f"freeze_{part}", False)
    provider.moe_token_dispatcher_type = "allgather"  # another wants streams of CUDA
    provider.moe_aux_loss_coeff = 0.0  # which transformers does not train by default
    provider.perform_initialization = False
    for name, value in options.items():
        setattr(provider, name, value)
    return provider


def bridge_model(provider: Any, checkpoint: Path) -> Any:
    """The model as Bridge's setup builds it, but for its wrappers. Its mergers take the exact GELU
    as transformers' do, and not the approximate one, which changes losses by up to 2e-3."""
    provider.finalize()
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    model = provider.provide(pre_process=True, post_process=True)
    if provider.pre_wrap_hook is not None:
        (model,) = provider.pre_wrap_hook([model])
    AutoBridge.from_hf_pretrained(str(checkpoint)).load_hf_weights([model])
    for module in model.modules():
        if isinstance(module, Qwen3VLVisionPatchMerger):
            module.activation_func = torch.nn.functional.gelu
    return model


#: Families of Bridge's models, and their mixtures of experts.
TRAINED = ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"]
#: Of AdamW. Gated delta nets have gradients so small that, with torch's, its first step takes their
#: rounding for a direction: losses are then 5e-5 apart.
EPS = 1e-5
VERSION = f"Megatron-Bridge {version('megatron-bridge')}, core {version('megatron-core')}"
multiprocessing.set_forkserver_preload(
    [*PRELOADED, "tests.peers", "launch.trainers.megatron_bridge"]
)


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, whose GPU is the CPU."""
    initialize_parallel(1)
    on_cpu(monkeypatch)


def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is the GPU."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor, **_: tensor)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")


def test_every_demo_pack_is_what_its_task_encoder_packs(
    task: str, demo: dict[str, Path], monkeypatch: pytest.MonkeyPatch, say: Say
) -> None:
    """Bridge's model takes packs of Qwen2-VL's tokenizer, as `make demo` makes them."""
    monkeypatch.setitem(megatron_bridge._FAMILIES, Qwen25VLModelProvider, "qwen2_vl")
    encoder = own_encoder(task)
    if task == "captioning":  # of which it finds no answers, as they have no headers
        with pytest.raises(ValueError, match="did not match any loss-contributing spans"):
            own_batch(encoder, islice(stored_samples(open_packs(demo[task])[0]), 1))
        monkeypatch.setattr(collate_fn, "CHATML_ASSISTANT_START", "<|vision_end|>")
        monkeypatch.setattr(collate_fn, "CHATML_ASSISTANT_END", "<|im_end|>")
    num_packs = sum(check_rows(demo[task], encoder, split) for split in ("train", "val"))
    assert num_packs > 2
    say(f"{num_packs} packs of {task} are what its task encoder packs")


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"], indirect=True)
def test_packs_are_what_its_task_encoder_packs(family: str, case: Any, say: Say) -> None:
    checkpoint, packed = case
    options = open_packs(packed).task_encoder.encoder.options.model_dump()
    limits = {name: options[name] or 1 << 24 for name in LIMITS}
    encoder = own_encoder(checkpoint=with_processor(checkpoint, **limits), patch_size=16, **limits)
    num_packs = check_rows(packed, encoder, model=tiny_provider(checkpoint))
    assert num_packs > 5
    say(f"{num_packs} packs are what its task encoder packs")


def test_pixels_become_values_after_its_step_has_copied_them(
    case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values as of its task encoder, see above."""
    copied: list[torch.dtype] = []
    monkeypatch.setattr(torch.Tensor, "cuda", lambda one, **_: copied.append(one.dtype) or one)
    rows = make_iterator(case[1])
    has_images = ["pixel_values" in as_read(rows) for _ in open_packs(case[1])]
    assert copied.count(torch.uint8) == sum(has_images) > 1


@pytest.mark.parametrize("size", [2, 4])
def test_its_split_gives_each_rank_what_it_should(size: int, tmp_path: Path, say: Say) -> None:
    """Bridge's zigzag split of each segment gives the tokens that `part_of_rank` says; its split of
    pictures by count gives each to one rank, whole and in order."""
    packs, num_media, num_videos = packs_for_ranks(tmp_path, size), 0, 0
    for number in range(len(packs)):
        batch = packs.batch([number])
        row, lengths = to_vlm_batch(batch), batch.cu_lengths[0].diff().tolist()
        params = get_packed_seq_params(row)
        for rank in range(size):
            own = part_of_rank(params, size, rank).own
            for name in ("tokens", "labels", "loss_mask", "position_ids"):
                pieces = row[name].split(lengths, dim=-1)
                axis = row[name].ndim - 1
                given = [split_data_cp_rank(piece, size, axis, rank) for piece in pieces]
                assert torch.equal(torch.cat(given, dim=-1), row[name][..., own]), (number, name)
        media = to_transformers_kwargs(batch)
        media = {name: media[name] for name in MEDIA_INPUTS if name in media}
        if not media:
            continue
        num_media, num_videos = num_media + 1, num_videos + len(batch.video_grid_thw)
        stored, whole, _ = reorganize_inputs(batch.tokens, **media)
        pixels, grids, *counts = qwen3vl_cp_split(size, stored, whole)
        shares = [get_vision_cp_data(pixels, grids, 4, *counts, rank, size) for rank in range(size)]
        assert all(len(share[1]) for share in shares) == (len(grids) >= size)
        assert torch.equal(torch.cat([share[0] for share in shares]), stored)
        assert torch.equal(torch.cat([share[1] for share in shares]), expand_thw(whole))
    assert 2 < num_media < len(packs)
    assert num_videos > 20
    say(f"CP {size} cuts {len(packs)} packs as launch does, and gives each picture to one rank")


def numbers_read(packed: Path) -> list[int]:
    """Numbers of the packs that this rank trains on in an epoch."""
    initialize_parallel(1)
    packs = open_packs(packed)
    rows = make_iterator(packed)
    share = len(packs) // distributed.get_world_size()
    return [number_of(next(rows)["tokens"], packs) for _ in range(share)]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5"], indirect=True)
def test_order(family: str, case: Any, tmp_path: Path, say: Say) -> None:
    _, packed = case
    for world_size in (1, 2, 4):
        read = run_ranks(world_size, tmp_path / f"ranks{world_size}", numbers_read, packed)
        for numbers in read:  # a slice each, as Energon deals
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        every = [number for numbers in read for number in numbers]
        assert sorted(set(every)) == sorted(every)
    say("order of packs kept on 1, 2 and 4 ranks")


@pytest.mark.parametrize(
    ("family", "num_workers"), [("qwen2_5_vl", 0), ("qwen3_5", 2)], indirect=["family"]
)
def test_its_checkpoint_keeps_the_place(
    family: str, num_workers: int, case: Any, tmp_path: Path, say: Say
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
    say(f"its checkpoint keeps the place of {num_workers} workers")


def two_steps(checkpoint: Path, packed: Path, *, eps: float = 1e-8, **options: Any) -> list[float]:
    """Losses before and after a step with Bridge's recipe, model, weights, step and loss, on this
    rank's part of a row; its training loop needs a GPU."""
    state = GlobalState()
    state.cfg = make_recipe(packed, tiny_provider(checkpoint, **options))
    provider = state.cfg.model
    model = bridge_model(provider, checkpoint)
    rows = make_iterator(packed, model=provider)
    options = {"betas": (0.9, 0.95), "weight_decay": 0.0, "eps": eps}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, **options)
    losses = []
    for _ in range(2):
        output, loss_function = forward_step(state, rows, model)
        loss, count, _ = loss_function(output)
        total = torch.stack([loss.detach(), count.float()])
        distributed.all_reduce(total)
        losses.append(float(total[0] / total[1]))
        (loss / total[1]).backward()
        for parameter in model.parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            distributed.all_reduce(gradient)
            parameter.grad = gradient
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("family", TRAINED)
def test_steps_are_those_of_the_samples(family: str, tmp_path: Path, say: Say) -> None:
    """Of images and videos; and, where it has the model, those of `launch.train`. Its Qwen3-VL and
    Qwen3.5 would place the tokens as packs do."""
    checkpoint, packed = several_packs(family, tmp_path, 48, 512)
    packs = open_packs(packed)
    batches = [packs.batch([number]) for number in range(len(packs))]
    assert sum(len(batch.video_grid_thw) for batch in batches[:2])
    ids = packs.task_encoder.encoder.media_token_ids
    ids = [ids[f"{name}_token_id"] for name in ("image", "video", "vision_start")]
    for row in map(to_vlm_batch, batches if family != "qwen2_5_vl" else ()):
        assert torch.equal(its_positions(ids, row["tokens"], row), row["position_ids"])
    is_ours = family in FAMILIES and FAMILIES[family].megatron_core
    options = {} if is_ours else {"eps": EPS}
    losses = two_steps(checkpoint, packed, **options)
    ours = tmp_path / "ours" if is_ours else None
    say(check_losses(packed, checkpoint, losses, ours, **options))


def test_multi_token_prediction_stays_in_its_sample(tmp_path: Path, say: Say) -> None:
    """Bridge's recipes for Qwen3.5 train it: gradients of a pack are the sum of its samples'."""
    checkpoint = small_checkpoint("qwen3_5", tmp_path / "checkpoint")
    packed = pack_dialogues(
        short_dialogues(tmp_path / "source", 24), "qwen3_5", checkpoint, tmp_path
    )
    state = GlobalState()
    provider = tiny_provider(checkpoint, mtp_num_layers=1, mtp_loss_scaling_factor=1.0)
    state.cfg = make_recipe(packed, provider)
    model = bridge_model(provider, checkpoint)
    randomise(model)

    def gradients(*batches: PackedBatch) -> dict[str, torch.Tensor]:
        model.zero_grad()
        for batch in batches:
            output, loss_function = forward_step(state, iter([to_vlm_batch(batch)]), model)
            loss_function(output)[0].backward()
        named = model.language_model.named_parameters()
        return {name: one.grad for name, one in named if name.startswith("mtp.")}

    packs = open_packs(packed)
    refuse_packs_of_few(packs, [0])
    samples = encoded_alone(packs, 0)
    alone = gradients(*(packed_batch([sample]) for sample in samples))
    assert len(alone) > 10
    for name, found in gradients(packs.batch([0])).items():
        torch.testing.assert_close(found, alone[name], rtol=1e-3, atol=1e-5, msg=name)
    mixed = gradients(packed_batch(samples, cross_sample_attention=True))
    away = [float((mixed[name] - one).norm() / one.norm()) for name, one in alone.items()]
    assert max(away) > 0.1
    say("qwen3_5: gradients of MTP in a pack are those of the samples alone")


def steps_of_two_ranks(checkpoint: Path, packed: Path) -> list[float]:
    """`two_steps` of rows that go over this rank and another."""
    initialize_parallel(1, 2)
    with pytest.MonkeyPatch.context() as patch:
        on_cpu(patch)
        tex = use_partitioned_indices(patch)
        patch.setattr(core_utils, "tex", tex, raising=False)
        return two_steps(checkpoint, packed, eps=EPS, context_parallel_size=2)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_steps_under_context_parallelism(family: str, tmp_path: Path, say: Say) -> None:
    """Attention gathers keys here, where TransformerEngine passes them round; recurrent layers
    exchange tokens for heads, as on a GPU."""
    checkpoint, packed = several_packs(family, tmp_path, 48, 512, context_parallel=2)
    losses, others = run_ranks(2, tmp_path / "ranks", steps_of_two_ranks, checkpoint, packed)
    assert losses == others
    say(f"on two context ranks, {check_losses(packed, checkpoint, losses, eps=EPS)}")


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
    with pytest.raises(ValueError, match="is of family qwen2_5_vl, not qwen3_vl"):
        make_iterator(packed, model=make_model(Qwen3VLModelProvider))
    with pytest.raises(ValueError, match=r"GPTModelProvider does not take packs; .* Qwen25VL"):
        make_iterator(packed, model=make_model(GPTModelProvider))
    batch = open_packs(packed).batch([0])
    with pytest.raises(ValueError, match="does not support collate-time in-batch packing"):
        qwen3_vl_get_batch(
            iter([to_vlm_batch(batch)]),
            SimpleNamespace(dataset=None),
            is_first_pp_stage=True,
            is_last_pp_stage=True,
        )
