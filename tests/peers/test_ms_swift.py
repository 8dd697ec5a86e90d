"""ms-swift on packs, and against what its own template makes of the same samples, with images and
with videos; on families beside Qwen's where its templates pack: on GLM-V and InternVL3; its command
of docs/integrations.md, and what is wrong in others."""

import io
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import swift
import torch
import torchvision
from PIL import Image, ImageOps
from swift.arguments import SftArguments
from swift.model import get_model_processor
from swift.pipelines.train.sft import SwiftSft
from swift.template import get_template
from swift.utils import import_external_file, parse_args
from transformers import AutoConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from offline_packing.demo.training import tiny_qwen2_vl
from offline_packing.online.collate import padding_free_collator
from offline_packing.online.datasets import PackedDatasetWrapper
from task_encoders.families.builtin_processor import builtin_processor
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.media.video_file import read_video_header
from task_encoders.samples import SourceSample, place_media
from tests.helpers.hf_trainers import (
    QUIET,
    decoded_video,
    numbers_read,
    recorded_run,
    use_segment_attention,
    video_files,
    with_processor,
)
from tests.helpers.peers import assert_same, open_packs, stored_samples
from tests.helpers.tiny_tokenizers import save_processor
from tests.helpers.videos import video_packs as clips_packed
from tests.peers import Say
from tests.peers.laws import CommandLaws, PackingLaws, Rows, TrainingLaws

PLUGIN = Path(__file__).parents[2] / "launch/trainers/ms_swift.py"
LENGTH = {"return_length": True}


def make_template(model: Any, processor: Any, family: str, **options: Any) -> Any:
    """A template that packs, for a tokenizer of any vocabulary."""
    template = get_template(processor, template_type=family, **options)
    template.set_mode("train")
    template.model = model
    template.packing = template.padding_free = True
    template.image_token_id = model.config.image_token_id
    template.video_token_id = model.config.video_token_id
    return template


def packs_of_plugin(template: Any, model_dir: str, packed: Path, split: str = "train") -> Any:
    """Packs for that template, which the plugin changes as it does a pipeline's."""
    import_external_file(str(PLUGIN))
    plugin: Any = sys.modules[SwiftSft._prepare_dataset.__module__]
    args = SimpleNamespace(packing=True, model_dir=model_dir)
    return plugin.packs_for(SimpleNamespace(args=args, template=template), str(packed), split)


def assistant(text: str) -> dict[str, str]:
    """A message."""
    return {"role": "assistant", "content": text}


def own_sample(
    template: Any, sample: SourceSample, media: list[bytes], limits: dict[str, int], scratch: Path
) -> dict[str, Any]:
    """A sample as ms-swift encodes it, except for the newline that it trains after every answer.

    Args:
        limits: min_pixels and max_pixels, which it takes from the environment, once, otherwise.
        scratch: for videos.
    """
    count = len(sample.images)
    # It does not turn images upright by their EXIF orientation.
    images = [ImageOps.exif_transpose(Image.open(io.BytesIO(data))) for data in media[:count]]
    videos = video_files(media[count:], scratch)
    given = {"images": images, "videos": videos, "chat_template_kwargs": limits}
    if sample.task == "captioning":
        caption = "<image>" * len(images) + sample.turns[0].answer
        return template.encode({"messages": [assistant(caption)], **given}, **LENGTH)
    messages = [] if sample.system is None else [{"role": "system", "content": sample.system}]
    for turn in place_media(sample):
        messages += [{"role": "user", "content": turn.prompt}, assistant(turn.answer)]
    # Of itself it writes this before the answers of all turns, the chat template of the last.
    thought = template.template_meta.non_thinking_prefix
    messages[-1] = assistant(thought + messages[-1]["content"])
    encoded: dict[str, Any] = template.encode({"messages": messages, **given}, **LENGTH)
    end, (newline,) = template.tokenizer.eos_token_id, template.tokenizer.encode("\n")
    assert encoded["input_ids"][-2:] == [end, newline] == encoded["labels"][-2:]
    tokens = encoded["input_ids"]
    pairs = zip([None, *tokens], tokens, encoded["labels"], strict=False)
    encoded["labels"] = [-100 if before == end else label for before, _, label in pairs][:-1]
    encoded["input_ids"] = tokens[:-1]
    if "mm_token_type_ids" in encoded:
        encoded["mm_token_type_ids"] = encoded["mm_token_type_ids"][:-1]
    return encoded | {"length": len(encoded["input_ids"])}


class CPUArguments(SftArguments):
    """Without the check for flash attention."""

    def _check_padding_free(self) -> None:
        self.padding_free = True


class Pipeline(SwiftSft):
    """Stops at the trainer."""

    args_class = CPUArguments

    def train(self, trainer: Any) -> Any:
        return trainer


#: Model type and template of ms-swift by the model type of transformers, where they differ from it.
NAMES = {
    "glm4v": ("glm4v", "glm4v"),
    "glm46v": ("glm4v", "glm4_5v"),
    "internvl": ("internvl", "internvl_hf"),
}


def make(output: Path, _: Any, packs: PackedFolder, checkpoint: Path, **options: Any) -> Any:
    """ms-swift's trainer as `swift sft` makes it from its arguments, on a CPU."""
    import_external_file(str(PLUGIN))
    name = AutoConfig.from_pretrained(checkpoint).model_type
    model_type, template = NAMES.get(name, (name, name.removesuffix("_moe")))
    args = CPUArguments(
        model=str(checkpoint),
        model_type=model_type,
        template=template,
        dataset=[str(packs.path)],
        output_dir=str(output),
        add_version=False,
        packing=True,
        attn_impl="sdpa",
        torch_dtype="float32",
        tuner_type="full",
        freeze_vit=False,
        freeze_aligner=False,
        train_dataloader_shuffle=False,
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        warmup_ratio=0.0,
        weight_decay=0.0,
        dataloader_num_workers=0,
        **{**QUIET, "report_to": ["none"], **options},
    )
    pipeline = Pipeline(args)
    use_segment_attention(pipeline.model)
    return pipeline.run()


VERSION = f"ms-swift {swift.__version__}"
FAMILY = "qwen2_vl"
QWEN = ("qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


class TestTraining(TrainingLaws):
    run = partial(recorded_run, make)
    read = partial(numbers_read, make)
    prepare = staticmethod(with_processor)
    families = (*QWEN, "glm4v", "glm46v", "internvl3")
    drop_last = True


@pytest.fixture(scope="module")
def case(case: Any) -> Any:
    with_processor(case[0])
    return case


@pytest.fixture(scope="module")
def loaded(family: str, case: Any) -> Any:
    """The model and its processor, as ms-swift loads them."""
    return get_model_processor(str(case[0]), model_type=family)


#: Limits of pixels with which a sample is encoded; None: it is not compared.
LimitsOf = Callable[[SourceSample, list[bytes]], dict[str, int] | None]


def both_rows(
    packs: PackedFolder,
    loaded: tuple[Any, Any],
    scratch: Path,
    limits_of: LimitsOf | None = None,
    **options: Any,
) -> Iterator[tuple[list[tuple[SourceSample, list[bytes]]], dict[str, Any], dict[str, Any]]]:
    """The collator's rows of packs, and of their samples encoded by a template with these options;
    with the samples. By default with the packs' limits for images."""
    vision = packs.task_encoder.encoder.options
    template, plugged = (make_template(*loaded, vision.family, **options) for _ in range(2))
    dataset = packs_of_plugin(plugged, loaded[0].model_dir, packs.path, packs.split)
    for number, pack in enumerate(packs):
        samples, ours, theirs = [], [], []
        for stored, one in zip(stored_samples(pack), dataset[number], strict=True):
            limits = {"min_pixels": vision.min_pixels, "max_pixels": vision.max_pixels}
            limits = limits_of(*stored) if limits_of else limits
            if limits is not None:
                samples.append(stored)
                ours.append(one)
                theirs.append(own_sample(template, *stored, limits, scratch))
        if samples:
            both = plugged.data_collator([ours]), template.data_collator([theirs])
            assert both[0].keys() == both[1].keys() - {"second_per_grid_ts"}  # of it came positions
            yield samples, *both


def with_pillow(loaded: tuple[Any, Any]) -> tuple[Any, Any]:
    """The backend that packs name: torchvision's values differ in the last bits."""
    model, processor = loaded
    processor.image_processor = Qwen2VLImageProcessorPil.from_pretrained(model.model_dir)
    return model, processor


class TestPacking(PackingLaws):
    def rows(self, packs: PackedFolder, task: str, folder: Path) -> Iterator[Rows]:
        """With a model of the whole vocabulary."""
        processor = builtin_processor()
        tiny_qwen2_vl().save_pretrained(folder)
        save_processor(folder, processor.tokenizer, processor.chat_template)
        loaded = with_pillow(get_model_processor(str(folder), model_type="qwen2_vl"))
        options = {"use_chat_template": task != "captioning"}
        for _, ours, theirs in both_rows(packs, loaded, folder, **options):
            yield ours, theirs


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"], indirect=True)
def test_packs_are_what_its_packing_would_give(
    family: str, case: Any, loaded: Any, tmp_path: Path, say: Say
) -> None:
    packs = open_packs(case[1])
    rows = both_rows(packs, with_pillow(loaded), tmp_path, add_non_thinking_prefix=False)
    for number, (_, ours, theirs) in enumerate(rows):
        assert_same(ours, theirs, f"{family} {number}")
    assert len(packs) > 5
    say(f"{len(packs)} packs are what its own packing makes of their samples")


@pytest.mark.parametrize("family", ["qwen3_5"], indirect=True)
@pytest.mark.parametrize("module", ["fla.modules.convolution", "fla.ops.gated_delta_rule"])
def test_recurrent_layers_without_kernels_are_refused(
    module: str, family: str, case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    template = SimpleNamespace()
    with pytest.raises(ValueError, match=f"only by {module}, .* install flash-linear-attention"):
        packs_of_plugin(template, str(case[0]), case[1])


def test_packs_made_while_training_are_joined_as_by_its_collator(
    case: Any, loaded: Any, tmp_path: Path, say: Say
) -> None:
    template = make_template(*loaded, "qwen2_vl")
    template.packing = template.padding_free = False  # samples come in lists
    samples: list[Any] = []
    for pack in open_packs(case[1]):
        samples += [own_sample(template, *one, {}, tmp_path) for one in stored_samples(pack)]
    for sample in samples:
        tokens = torch.tensor(sample["input_ids"])
        sample["mm_token_type_ids"] = (tokens == template.image_token_id).long()
    packs = list(PackedDatasetWrapper(samples, template, 256, 16))
    assert sum(map(len, packs)) == len(samples) == 48
    for pack in packs:
        theirs = template.data_collator([[dict(sample) for sample in pack]])
        for sample in pack:
            inputs = {"input_ids": torch.tensor(sample["input_ids"])[None]}
            inputs["mm_token_type_ids"] = sample["mm_token_type_ids"][None]
            sample |= template._get_position_ids({**sample, **inputs})
        ours = padding_free_collator(pack)
        theirs["position_ids"] = torch.cat(
            [theirs.pop("text_position_ids")[None], theirs["position_ids"]]
        )
        assert theirs.keys() == ours.keys() - {"use_cache"}
        for name, value in theirs.items():
            assert torch.equal(torch.as_tensor(ours[name]).to(value.dtype), value), name
    say(f"{len(packs)} packs of PackedDatasetWrapper joined alike by both collators")


DOCS = Path(__file__).parents[2] / "docs"
(COMMAND,) = re.findall(r"`(swift sft [^`]*)`", (DOCS / "integrations.md").read_text())
(LONG_COMMAND,) = re.findall(
    r"(swift sft [^`]*)\n```", (DOCS / "coming_from_ms_swift.md").read_text()
)


def datasets(
    checkpoint: Path, packed: Path, output: Path, more: str = "", command: str = COMMAND
) -> list[Any]:
    """The samples that a pipeline of the documented command trains on, with more options."""
    names = dict.fromkeys(("FOLDER", "Qwen/Qwen2-VL-2B-Instruct"), str(checkpoint))
    names["out/packed"] = str(packed)
    words = [names.get(word, word) for word in shlex.split(command.replace("\\\n", " "))[2:]]
    words += ["--model_type", "qwen2_vl", "--template", "qwen2_vl", *more.split()]
    words += ["--output_dir", str(output), "--use_cpu", "true", "--torch_dtype", "float32"]
    args, rest = parse_args(CPUArguments, words)
    assert not rest
    return SwiftSft._prepare_dataset(SimpleNamespace(args=args, template=SimpleNamespace()))


@pytest.mark.parametrize("command", [COMMAND, LONG_COMMAND], ids=["integrations", "coming_from"])
def test_the_documented_command_builds_data_of_every_pack(
    command: str, case: tuple[Path, Path], tmp_path: Path
) -> None:
    train, validation = datasets(*case, tmp_path, command=command)
    packs = open_packs(case[1])
    assert len(train) == len(packs) > 3
    assert validation is None
    for number in range(len(packs)):
        lengths = [sample["length"] for sample in train[number]]
        assert lengths == packs.batch([number]).cu_lengths[0].diff().tolist()


class TestCommand(CommandLaws):
    refused = (
        ("--packing false", "set --packing true"),
        ("--train_dataloader_shuffle true", "set --train_dataloader_shuffle false"),
        ("--group_by_length true", "leave out --group_by_length"),
        ("--dataset {packed} other.jsonl", "give one --dataset"),
        ("--val_dataset {packed}", "no packs in its val split"),
    )

    def build(self, checkpoint: Path, packed: Path, output: Path, options: str | None) -> Any:
        with_processor(checkpoint)
        return datasets(checkpoint, packed, output, (options or "").format(packed=packed))


_ENDS = ("min", "max")
#: In pixel values.
THREE_OF_255 = 3.01 / 255 / 0.2613


@pytest.fixture
def _decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that it calls, which torchvision no longer has."""

    def read_video(path: str, **_: Any) -> tuple[torch.Tensor, None, dict[str, float]]:
        frames, rate = decoded_video(path)
        return torch.from_numpy(frames.transpose(0, 3, 1, 2)), None, {"video_fps": rate}

    monkeypatch.setattr(torchvision.io, "read_video", read_video, raising=False)


def same_frames(encoder: Any, data: bytes) -> bool:
    """Return True if ms-swift takes the frames of packs, which are transformers'."""
    header = read_video_header(io.BytesIO(data))
    frames = list(encoder.sample_video(header).frames)
    spread = torch.linspace(0, header.num_frames - 1, len(frames)).round().long()
    return frames == spread.tolist()


each_family = pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"], indirect=True)


@each_family
@pytest.mark.usefixtures("_decoder")
def test_packs_with_videos_are_what_its_packing_would_give(
    family: str, loaded: Any, video_packs: Path, tmp_path: Path, say: Say
) -> None:
    """All but the pixels: it resizes images with Pillow (those are compared with the demo's packs),
    and frames in floating point, which it spreads from the first to the last."""
    packs = open_packs(video_packs)
    encoder = packs.task_encoder.encoder
    stored = encoder.options.model_dump()
    limits = {f"{end}_pixels": stored[f"video_{end}_pixels"] for end in _ENDS}
    alike = others = 0
    for samples, ours, theirs in both_rows(packs, loaded, tmp_path, lambda *_: limits):
        theirs.pop("second_per_grid_ts", None)
        pixels = [batch.pop("pixel_values_videos", None) for batch in (theirs, ours)]
        theirs.pop("pixel_values", None)
        assert_same(ours, theirs, family)
        videos = [data for sample, media in samples for data in media[len(sample.images) :]]
        sizes = ours["video_grid_thw"].prod(1).tolist() if videos else []
        frames = zip(*(values.split(sizes) for values in pixels), strict=True) if videos else ()
        for data, (one, other) in zip(videos, frames, strict=True):
            same = same_frames(encoder, data)
            difference = float((one - other).abs().max())
            assert difference < THREE_OF_255 if same else difference > 1
            alike, others = alike + same, others + (not same)
    assert alike > 3
    assert others > 3
    say(
        f"{len(packs)} packs with {alike + others} videos are what its own "
        f"packing makes of their samples, but for the pixels: of {others} it takes other frames"
    )


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"], indirect=True)
@pytest.mark.usefixtures("_decoder")
def test_samples_with_videos_are_what_it_encodes(
    family: str, case: Any, loaded: Any, tmp_path: Path, say: Say
) -> None:
    """All but the pixels, of videos of 4 and 8 frames: it takes an even number, and limits the
    pixels of a frame, where packs limit those of a video."""
    model = {"family": family, "processor": str(case[0]), "video_max_pixels": 1 << 16}
    packs = open_packs(clips_packed("bmr", tmp_path, **model))
    encoder = packs.task_encoder.encoder
    pixels = encoder.options.model_dump()

    def limits_of(sample: SourceSample, media: list[bytes]) -> dict[str, int] | None:
        headers = [read_video_header(io.BytesIO(data)) for data in media[len(sample.images) :]]
        counts = {len(encoder.sample_video(header).frames) for header in headers}
        if counts not in ({4}, {8}) or sample.images:
            return None
        return {f"{end}_pixels": pixels[f"video_{end}_pixels"] // max(counts) for end in _ENDS}

    compared = 0
    options = {"add_non_thinking_prefix": False}
    for samples, ours, theirs in both_rows(packs, loaded, tmp_path, limits_of, **options):
        del theirs["pixel_values_videos"]
        assert_same(ours, theirs, family)
        compared += len(samples)
    assert compared > 3
    say(f"{compared} samples with videos as it encodes them, pixels apart")


@each_family
def test_samples_padded_for_context_parallelism_go_on_behind(
    family: str, loaded: Any, video_packs: Path
) -> None:
    """As in its `_handle_megatron_cp`, which makes a sample longer and leaves its positions."""
    template, plugged = (make_template(*loaded, family) for _ in range(2))
    for sample in packs_of_plugin(plugged, loaded[0].model_dir, video_packs)[0]:
        del sample["labels"], sample["length"]
        sample["input_ids"] = torch.tensor([[*sample["input_ids"], 0, 0, 0]])
        types = torch.nn.functional.pad(sample["mm_token_type_ids"], (0, 3))
        sample["mm_token_type_ids"] = types[None]
        ours = plugged._get_position_ids(sample)["position_ids"]
        if family == "qwen2_vl" or "video_grid_thw" not in sample:  # which have no time
            theirs = template._get_position_ids(sample)["position_ids"]
            assert torch.equal(ours, theirs)
        assert torch.equal(ours[:, :, -4:].diff(), torch.ones(4, 1, 3, dtype=torch.int64))
