"""VeOmni on packs, and against what its own transform and collator make of the same samples, with
images and with videos; its recipe of docs/recipes.md, and what is wrong in others."""

import io
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import distributed
from transformers import AutoConfig, AutoTokenizer, Qwen2VLImageProcessor, Qwen2VLProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from veomni.arguments import parse_args
from veomni.data import build_data_transform, build_dataloader, build_dataset
from veomni.data.chat_template import build_chat_template
from veomni.data.data_collator import MainCollator
from veomni.data.multimodal.preprocess import PREPROCESSOR_REGISTRY
from veomni.distributed.parallel_state import init_parallel_state
from veomni.models.transformers.qwen2_5vl.generated import patched_modeling_qwen2_5_vl_gpu as vl_2_5
from veomni.models.transformers.qwen2_vl.generated import patched_modeling_qwen2_vl_gpu as vl_2
from veomni.ops.kernels.cross_entropy import ForCausalLMLoss
from veomni.trainer.base import BaseTrainer
from veomni.trainer.vlm_trainer import VeOmniVLMArguments

import launch.trainers.veomni
from launch.loop.parallel import initialize_parallel
from launch.model.config import tiny_config
from task_encoders.families import FAMILIES, build_sample_encoder
from task_encoders.families.builtin_processor import builtin_processor
from task_encoders.media.video_file import decode_frames, read_video_header
from task_encoders.samples import SourceSample
from task_encoders.text.qwen_vocabulary import MEDIA_TOKEN_IDS
from tests.helpers.hf_trainers import number_of, several_packs, use_segment_attention
from tests.helpers.pages import blocks
from tests.helpers.peers import (
    assert_same,
    check_losses,
    check_order,
    check_uniform_steps,
    open_packs,
    stored_samples,
    two_losses,
)
from tests.helpers.videos import VIDEO_MODEL, video_packs
from tests.peers import Say, chat_of, check_loader_resumes
from tests.peers.laws import CommandLaws

START, END = 151644, 151645


def make_loader(packed: Path, accumulated: int = 1, **options: Any) -> Any:
    """Packs through VeOmni's loader, as its trainer makes it."""
    dataset = build_dataset("mapping", train_path=str(packed), transform=None, seed=1)
    world_size = distributed.get_world_size() if distributed.is_initialized() else 1
    return build_dataloader(
        "native",
        dataset=dataset,
        micro_batch_size=1,
        global_batch_size=accumulated * world_size,
        dataloader_batch_size=accumulated,
        max_seq_len=0,
        train_steps=0,
        num_workers=0,
        prefetch_factor=None,
        pin_memory=False,
        **{"dyn_bsz": False, **options},
    )


@PREPROCESSOR_REGISTRY.register("messages")
def _messages(conversations: Any, **_: Any) -> Any:
    """Chats with parts, as VeOmni's templates take them."""
    return conversations


def png(image: Image.Image) -> bytes:
    """The file of a picture. RGB: PNG has no CMYK."""
    file = io.BytesIO()
    image.convert("RGB").save(file, "PNG")
    return file.getvalue()


def own_sample(
    transform: Any,
    sample: SourceSample,
    media: list[bytes],
    frames_of: Callable[[bytes], list[Image.Image]] | None,
) -> dict[str, Any]:
    """A sample as VeOmni encodes it, in the form of its template's own trainers. `frames_of` are
    those of a video that are given to it."""
    chat = chat_of(sample, media)
    parts = [part for message in chat for part in message["content"]]
    images = [png(part["image"]) for part in parts if part["type"] == "image"]
    videos = [frames_of(part["video"]) for part in parts if frames_of and part["type"] == "video"]
    conversations = [
        [message["role"], *((part["type"], part.get("text")) for part in message["content"])]
        for message in chat
        if message["role"] != "system"  # its template has one, the same for all samples
    ]
    template = transform.keywords["chat_template"]
    template.system_prompt = (
        type(template).system_prompt if sample.system is None else sample.system
    )
    given = {"conversations": conversations, "images": images, "videos": videos}
    (made,) = transform(given | {"source": "messages"})
    tokens, labels = made["input_ids"], made["labels"]
    # It trains the newline after every answer, and keeps the last.
    labels[tokens.roll(1) == END] = -100
    first = 0
    end = len(tokens) - 1
    if sample.task == "captioning":  # it has headers round captions
        first = int((tokens == START).nonzero()[1]) + 3
        vision = made["image_mask"] | made["video_mask"]
        labels[vision.roll(-1) | vision | vision.roll(1)] = -100
    for name in ("input_ids", "attention_mask", "labels", "image_mask", "video_mask"):
        made[name] = made[name][first:end]
    made["position_ids"] = made["position_ids"][..., first:end] - first
    made.pop("mm_token_type_ids")  # not concatenated by its collator
    made["labels"][0] = -100
    return made


VERSION = f"VeOmni {version('veomni')}"
FAMILY = "qwen2_vl"


@pytest.fixture(autouse=True)
def _one_rank() -> None:
    initialize_parallel(1)  # its loader asks for the rank


LIMITS = {"min_pixels": VIDEO_MODEL["min_pixels"], "max_pixels": VIDEO_MODEL["max_pixels"]}
#: Options of VeOmni's recipes, except for its own limits of pixels.
SAMPLING: dict[str, Any] = {"fps": 2.0, "frame_factor": 2, "min_frames": 4, "max_frames": 768}
MODELS = {
    "qwen2_vl": vl_2.Qwen2VLForConditionalGeneration,
    "qwen2_5_vl": vl_2_5.Qwen2_5_VLForConditionalGeneration,
}
VISION: dict[str, dict[str, int]] = {"qwen2_vl": {}, "qwen2_5_vl": {"tokens_per_second": 2}}


def compared(
    packed: Path,
    processor: Any,
    family: str = "qwen2_vl",
    frames_of: Callable[[bytes], list[Image.Image]] | None = None,
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Our rows, and what VeOmni's collator makes of the samples that its transform encodes."""
    config = tiny_config(family, {}, VISION[family], **MEDIA_TOKEN_IDS)
    transform = build_data_transform(
        family,
        processor=processor,
        chat_template=build_chat_template("qwen2vl", processor),
        position_id_func=MODELS[family].get_position_id_func(SimpleNamespace(config=config)),
        **(SAMPLING if frames_of else {}),
    )
    packs, collate, loader = open_packs(packed), MainCollator(), make_loader(packed)
    assert len(loader) == len(packs)
    for pack, (ours,) in zip(packs, loader, strict=True):
        samples = [own_sample(transform, *stored, frames_of) for stored in stored_samples(pack)]
        theirs = collate(samples)
        assert ours.keys() == theirs.keys()
        yield ours, theirs


def test_every_demo_pack_is_what_its_collator_makes_of_its_samples(
    task: str, demo: dict[str, Path], say: Say
) -> None:
    processor, num_packs = builtin_processor(min_pixels=3136, max_pixels=100352), 0
    for ours, theirs in compared(demo[task], processor):
        assert_same(ours, theirs, f"{task} {num_packs}")
        num_packs += 1
    assert num_packs > 5
    say(f"{num_packs} packs of {task} are what its collator makes of their samples")


def rows_read(packed: Path) -> list[dict[str, Any]]:
    """Rows that this rank trains on in an epoch, where all are data parallel."""
    size = distributed.get_world_size()
    init_parallel_state(dp_size=size, dp_shard_size=size, device_type="cpu")
    return [row for (row,) in make_loader(packed)]


def numbers_read(packed: Path) -> list[int]:
    """Numbers of the packs that this rank trains on in an epoch."""
    packs = open_packs(packed)
    image = packs.task_encoder.encoder.media_token_ids["image_token_id"]
    rows = rows_read(packed)
    tokens = [row["input_ids"].masked_fill(row["image_mask"], image) for row in rows]
    return [number_of(one, packs) for one in tokens]


def test_order(case: Any, tmp_path: Path, say: Say) -> None:
    say(check_order(case[1], tmp_path, numbers_read))


def images_read(packed: Path) -> list[bool]:
    """Whether each row that this rank trains on has images."""
    return ["pixel_values" in row for row in rows_read(packed)]


def test_uniform_steps(case: Any, family: str, tmp_path: Path, say: Say) -> None:
    say(check_uniform_steps(family, case[0], tmp_path, images_read))


def test_its_loader_goes_on_where_it_was_saved(case: Any, say: Say) -> None:
    say(check_loader_resumes(lambda: make_loader(case[1], accumulated=2)))


#: Kernels of recurrent layers, by module.
KERNELS = (
    ("fla.modules.convolution", "causal_conv1d"),
    ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
)


def losses_of_packs(checkpoint: Path, packed: Path) -> list[float]:
    """Losses before and after a step on VeOmni's own model and loss; its trainer needs a GPU."""
    config = AutoConfig.from_pretrained(checkpoint)
    name, (architecture,) = config.model_type, config.architectures
    folder = f"veomni.models.transformers.{name}.generated"
    modeling = import_module(f"{folder}.patched_modeling_{name}_gpu")
    if name.startswith("qwen3_5"):  # its registry gives these out where it sees a GPU
        for module, kernel in KERNELS:
            found = getattr(import_module(module), kernel)
            getattr(modeling, f"veomni_{kernel}")._kernel = found
    model = getattr(modeling, architecture).from_pretrained(checkpoint)
    use_segment_attention(model)
    model.loss_function = ForCausalLMLoss
    return two_losses(
        model, make_loader(packed), lambda rows: model(**rows[0], use_cache=False).loss
    )


@pytest.mark.parametrize(
    "family", ["qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"]
)
def test_steps_are_those_of_the_samples_alone(family: str, tmp_path: Path, say: Say) -> None:
    """And, where it has the model, those of `launch.train`."""
    checkpoint, packed = several_packs(family, tmp_path)
    is_ours = family in FAMILIES and FAMILIES[family].megatron_core
    losses = losses_of_packs(checkpoint, packed)
    say(check_losses(packed, checkpoint, losses, tmp_path / "ours" if is_ours else None))


@pytest.mark.parametrize("family", ["qwen3_5"], indirect=True)
def test_it_refuses_recurrent_layers_without_kernels(
    family: str, case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, kernel in KERNELS:
        with monkeypatch.context() as patch:
            patch.setattr(import_module(module), kernel, None)
            with pytest.raises((NotImplementedError, RuntimeError), match=r"[Vv]arlen"):
                losses_of_packs(*case)


def assert_same_pixels(ours: Any, theirs: Any, grids: torch.Tensor) -> None:
    """Equal where a frame keeps its size; it resizes frames as floats, which transformers does as
    bytes."""
    sizes = grids.prod(dim=1).tolist()
    parts = zip(grids.tolist(), ours.split(sizes), theirs.split(sizes), strict=True)
    for grid, one, other in parts:
        difference = float((one - other).abs().max())
        assert difference < 0.3
        assert (difference == 0) == (grid == [9, 6, 4])  # of the clip of 84 rows and 56 columns


@pytest.mark.parametrize("family", MODELS)
def test_packs_with_videos_are_what_its_collator_makes_of_their_samples(
    task: str, family: str, tmp_path: Path, say: Say
) -> None:
    packed = video_packs(task, tmp_path, family=family)
    encoder = build_sample_encoder(family, **VIDEO_MODEL)
    videos = Qwen2VLVideoProcessor(**LIMITS)
    processor = Qwen2VLProcessor(
        Qwen2VLImageProcessor(**LIMITS), builtin_processor().tokenizer, videos
    )

    def frames_of(data: bytes) -> list[Image.Image]:
        """Those that are in the pack: by itself it takes those of qwen-vl-utils."""
        header = read_video_header(io.BytesIO(data))
        return list(decode_frames(data, header, encoder.sample_video(header).frames))

    num_packs = num_videos = other_positions = 0
    for ours, theirs in compared(packed, processor, family, frames_of):
        if "video_grid_thw" in ours:
            pixels = theirs.pop("pixel_values_videos")
            assert_same_pixels(ours["pixel_values_videos"], pixels, ours["video_grid_thw"])
            num_videos += len(ours["video_grid_thw"])
            if family == "qwen2_5_vl":  # every step takes a second for it
                other = theirs.pop("position_ids") != ours["position_ids"]
                other_positions += int(other.any())
        assert_same(ours, theirs, f"{task} {num_packs}")
        num_packs += 1
    assert num_videos >= 12
    assert (other_positions > 0) == (family == "qwen2_5_vl")
    but = f" and the seconds in positions of {other_positions}" * (other_positions > 0)
    said = f"{num_packs} {family} packs of {task} with {num_videos} videos"
    say(f"{said} as its own, but for resized frames{but}")


PAGE = Path(__file__).parents[2] / "docs/recipes.md"


#: Family of the checkpoint of a recipe.
of_recipe = pytest.mark.parametrize("family", ["qwen2_5_vl"], indirect=True)


def parse(
    file: Path, checkpoint: Path, packed: Path, overrides: Mapping[str, Any] | None = None
) -> VeOmniVLMArguments:
    """The recipe of the documentation, for this model and these packs, as the command parses it."""
    (text,) = [block.text for block in blocks(PAGE.read_text()) if "dyn_bsz" in block.text]
    file.write_text(text)
    values = {
        "model.model_path": checkpoint,
        "model.ops_implementation.load_balancing_loss_implementation": "eager",  # without triton
        "data.train_path": packed,
        "data.dataloader.num_workers": 0,
        "data.dataloader.pin_memory": False,
        "train.global_batch_size": 2,
        **(overrides or {}),
    }
    arguments = [part for name, value in values.items() for part in (f"--{name}", str(value))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["veomni", str(file), *arguments])
        args: VeOmniVLMArguments = parse_args(VeOmniVLMArguments)
    return args


def build(args: VeOmniVLMArguments) -> Any:
    """A trainer's data, as VeOmni builds it."""
    tokenizer = AutoTokenizer.from_pretrained(args.model.tokenizer_path)
    transform = build_data_transform("qwen2_5_vl", processor=SimpleNamespace(tokenizer=tokenizer))
    trainer = SimpleNamespace(args=args, data_transform=transform, collate_fn=MainCollator())
    BaseTrainer._build_dataset(trainer)
    BaseTrainer._build_dataloader(trainer)
    return trainer


@of_recipe
def test_the_documented_recipe_builds_data_of_every_pack(
    case: tuple[Path, Path], tmp_path: Path
) -> None:
    args = parse(tmp_path / "recipe.yaml", *case)
    assert not args.train.dyn_bsz
    trainer = build(args)
    packs = open_packs(case[1])
    assert trainer.train_steps == len(trainer.train_dataloader) == len(packs) // 2 > 2
    rows = [row for step in trainer.train_dataloader for row in step]
    for number, row in enumerate(rows):
        boundaries = packs.batch([number]).cu_lengths[0]
        assert torch.equal(row["cu_seq_lens_q"], boundaries.to(row["cu_seq_lens_q"]))
        assert torch.equal(row["labels"], packs.batch([number]).labels)


@of_recipe
def test_several_packs_are_one_row(case: tuple[Path, Path], tmp_path: Path) -> None:
    singles = build(parse(tmp_path / "recipe.yaml", *case)).train_dataloader
    args = parse(tmp_path / "recipe.yaml", *case, {"train.micro_batch_size": 2})
    (pair,) = next(iter(build(args).train_dataloader))
    first, second = next(iter(singles))
    for name in ("input_ids", "labels", "position_ids", "image_mask", "attention_mask"):
        assert torch.equal(pair[name], torch.cat([first[name], second[name]], dim=-1))
    pixels = [row["pixel_values"] for row in (first, second) if "pixel_values" in row]
    assert torch.equal(pair["pixel_values"], torch.cat(pixels))
    ends = [first["cu_seq_lens_q"], second["cu_seq_lens_q"][1:] + first["cu_seq_lens_q"][-1]]
    assert torch.equal(pair["cu_seq_lens_q"], torch.cat(ends))


@of_recipe
class TestCommand(CommandLaws):
    refused = (
        ({"train.dyn_bsz": True}, r"set train\.dyn_bsz=false"),
        ({"data.datasets_type": "iterable"}, r"set data\.datasets_type mapping, not iterable"),
        ({"data.datasets_type": "energon"}, r"set data\.datasets_type mapping, not energon"),
    )

    def build(self, checkpoint: Path, packed: Path, output: Path, options: Any) -> Any:
        return build(parse(output / "recipe.yaml", checkpoint, packed, options))


@of_recipe
def test_other_data_go_veomnis_way(case: tuple[Path, Path], tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text('{"a": 1}\n{"a": 2}\n')
    args = parse(tmp_path / "recipe.yaml", case[0], text)
    build_dataset = launch.trainers.veomni.DATASET_REGISTRY["mapping"]
    dataset = build_dataset(train_path=args.data.train_path, transform=lambda row, **_: [row])
    assert [dataset[i] for i in range(2)] == [[{"a": 1}], [{"a": 2}]]
