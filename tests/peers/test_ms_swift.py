"""ms-swift on packs, and against what its own template makes of the same samples, with images and
with videos; on families beside Qwen's where its templates pack: on GLM-V and InternVL3; its command
of docs/integrations.md, and what is wrong in others."""

import io
import re
import shlex
import sys
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
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoTokenizer,
    Glm4vImageProcessor,
    Glm4vProcessor,
    Glm4vVideoProcessor,
    Glm46VImageProcessor,
    Glm46VProcessor,
    Glm46VVideoProcessor,
    GotOcr2ImageProcessor,
    InternVLProcessor,
    InternVLVideoProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from offline_packing.demo.training import tiny_qwen2_vl
from offline_packing.online.collate import padding_free_collator
from offline_packing.online.datasets import PackedDatasetWrapper
from task_encoders.families import FAMILIES
from task_encoders.families.builtin_processor import builtin_processor
from task_encoders.media.video_file import read_video_header
from task_encoders.samples import SourceSample, place_media
from tests.helpers.hf_trainers import (
    Run,
    check_resuming,
    decoded_video,
    number_of,
    save_processor,
    several_packs,
    use_segment_attention,
    video_files,
    with_processor,
)
from tests.helpers.peers import (
    assert_same,
    check_contradictions,
    check_losses,
    check_order,
    open_packs,
    stored_samples,
)
from tests.helpers.tiny_families import encoder_options
from tests.helpers.videos import video_packs as clips_packed
from tests.peers import Say

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
    template: Any,
    sample: SourceSample,
    media: list[bytes],
    limits: dict[str, int],
    scratch: Path = Path(),
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


def make_trainer(
    checkpoint: Path, packed: Path, output: Path, *, model_type: str, template: str, **options: Any
) -> Any:
    """ms-swift's trainer as `swift sft` makes it from its arguments, on a CPU."""
    import_external_file(str(PLUGIN))
    args = CPUArguments(
        model=str(checkpoint),
        model_type=model_type,
        template=template,
        dataset=[str(packed)],
        output_dir=str(output),
        add_version=False,
        packing=True,
        attn_impl="sdpa",
        torch_dtype="float32",
        tuner_type="full",
        freeze_vit=False,
        freeze_aligner=False,
        train_dataloader_shuffle=False,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        warmup_ratio=0.0,
        weight_decay=0.0,
        dataloader_num_workers=0,
        logging_steps=1,
        report_to=["none"],
        use_cpu=True,
        **options,
    )
    pipeline = Pipeline(args)
    use_segment_attention(pipeline.model)
    return pipeline.run()


VERSION = f"ms-swift {swift.__version__}"
FAMILY = "qwen2_vl"


@pytest.fixture(scope="module")
def case(case: Any) -> Any:
    limits = {name: encoder_options("qwen2_vl")[name] for name in ("min_pixels", "max_pixels")}
    with_processor(case[0], **limits)
    return case


def names_of(checkpoint: Path) -> dict[str, str]:
    """ms-swift's names for a checkpoint of Qwen's."""
    model_type = AutoConfig.from_pretrained(checkpoint).model_type
    return {"model_type": model_type, "template": model_type.removesuffix("_moe")}


def recorded_run(checkpoint: Path, packed: Path, output: Path, resume: Path | None = None) -> Run:
    """Packs and loss of each of six steps, and the weights at the end."""
    packs = open_packs(packed)
    options = {"resume_from_checkpoint": str(resume)} if resume else {}
    trainer = make_trainer(
        checkpoint, packed, output, **names_of(checkpoint), max_steps=6, save_steps=3, **options
    )
    seen: list[int] = []
    trainer.model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(number_of(kwargs["input_ids"], packs)),
        with_kwargs=True,
    )
    trainer.train(options.get("resume_from_checkpoint"))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return seen, losses, [weight.detach().clone() for weight in trainer.model.parameters()]


@pytest.mark.parametrize(
    "family", ["qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"], indirect=True
)
def test_steps_are_those_of_our_own_trainer_and_are_resumed(
    family: str, case: Any, tmp_path: Path, say: Say
) -> None:
    _, losses = check_resuming(tmp_path, recorded_run, *case)
    is_ours = family in FAMILIES and FAMILIES[family].megatron_core
    said = check_losses(case[1], case[0], losses, tmp_path / "ours" if is_ours else None)
    say(f"{said}, 6 steps resumed after 3 to the last bit")


def numbers_read(packed: Path, checkpoint: Path, output: Path) -> list[int]:
    """Numbers of the packs that this rank trains on in an epoch."""
    packs = open_packs(packed)
    trainer = make_trainer(checkpoint, packed, output, **names_of(checkpoint))
    return [number_of(row["input_ids"], packs) for row in trainer.get_train_dataloader()]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_5"], indirect=True)
def test_order(family: str, case: Any, tmp_path: Path, say: Say) -> None:
    checkpoint, packed = case
    say(check_order(packed, tmp_path, numbers_read, checkpoint, tmp_path / "out", drop_last=True))


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"], indirect=True)
def test_packs_are_what_its_packing_would_give(family: str, case: Any, say: Say) -> None:
    checkpoint, packed = case
    model, processor = get_model_processor(str(checkpoint), model_type=family)
    # The backend that the packs name: torchvision's values differ in the last bits.
    processor.image_processor = Qwen2VLImageProcessorPil.from_pretrained(checkpoint)
    template, plugged = (
        make_template(model, processor, family, add_non_thinking_prefix=False) for _ in range(2)
    )
    dataset, packs = packs_of_plugin(plugged, str(checkpoint), packed), open_packs(packed)
    vision = packs.task_encoder.encoder.options
    limits = {"min_pixels": vision.min_pixels, "max_pixels": vision.max_pixels}
    for number, pack in enumerate(packs):
        own = [own_sample(template, *sample, limits) for sample in stored_samples(pack)]
        theirs = template.data_collator([own])
        ours = plugged.data_collator([dataset[number]])
        assert ours.keys() == theirs.keys()
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


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model with the whole vocabulary, and its processor, as ms-swift loads them."""
    import_external_file(str(PLUGIN))
    folder = tmp_path_factory.mktemp("model")
    builtin = builtin_processor(min_pixels=3136, max_pixels=100352)
    tiny_qwen2_vl().save_pretrained(folder)
    save_processor(folder, builtin.tokenizer, builtin.chat_template)
    model, processor = get_model_processor(str(folder), model_type="qwen2_vl")
    # The backend that the packs name: torchvision's values differ in the last bits.
    processor.image_processor = builtin.image_processor
    return model, processor


def test_every_demo_pack_is_what_its_packing_would_give(
    task: str, demo: dict[str, Path], loaded: Any, say: Say
) -> None:
    """The collator's rows of our packs, and of the same samples encoded by its template."""
    model, processor = loaded
    dialogue = {"use_chat_template": task != "captioning"}
    template = make_template(model, processor, "qwen2_vl", **dialogue)
    num_packs = 0
    for split in ("train", "val"):
        packs = open_packs(demo[task], split)
        vision = packs.task_encoder.encoder.options
        limits = {"min_pixels": vision.min_pixels, "max_pixels": vision.max_pixels}
        plugged = make_template(model, processor, "qwen2_vl", **dialogue)
        dataset = packs_of_plugin(plugged, model.model_dir, demo[task], split)
        for number, pack in enumerate(packs):
            own = [own_sample(template, *sample, limits) for sample in stored_samples(pack)]
            theirs = template.data_collator([own])
            ours = plugged.data_collator([dataset[number]])
            assert ours.keys() == theirs.keys()
            assert_same(ours, theirs, f"{task} {split} {number}")
            num_packs += 1
    assert num_packs > 5
    say(f"{num_packs} packs of {task} are what its own packing makes of their samples")


class Encoded(Dataset[dict[str, Any]]):
    """Samples that its template encodes when they are asked for, some with an image."""

    def __init__(self, template: Any) -> None:
        self._template = template

    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> dict[str, Any]:
        images = [Image.new("RGB", (80, 60 + 20 * (number % 4)), "red")] * min(number % 3, 1)
        question = "<image>" * len(images) + f"What is {number}?"
        turns = [{"role": "user", "content": question}, assistant("bar " * (1 + number % 30))]
        sample = self._template.encode({"messages": turns, "images": images}, **LENGTH)
        tokens = torch.tensor(sample["input_ids"])
        sample["mm_token_type_ids"] = (tokens == self._template.model.config.image_token_id).long()
        return sample


def test_packs_made_while_training_are_joined_as_by_its_collator(loaded: Any, say: Say) -> None:
    model, processor = loaded
    template = get_template(processor, template_type="qwen2_vl")
    template.set_mode("train")
    template.model = model
    packs = list(PackedDatasetWrapper(Encoded(template), template, 256, 16))
    assert sum(map(len, packs)) == 40
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


#: Model type and template of ms-swift, and transformers' processors.
TRAINED: dict[str, tuple[str, str, tuple[Any, ...]]] = {
    "glm4v": ("glm4v", "glm4v", (Glm4vProcessor, Glm4vImageProcessor, Glm4vVideoProcessor)),
    "glm46v": ("glm4v", "glm4_5v", (Glm46VProcessor, Glm46VImageProcessor, Glm46VVideoProcessor)),
    "internvl3": (
        "internvl",
        "internvl_hf",
        (InternVLProcessor, GotOcr2ImageProcessor, InternVLVideoProcessor),
    ),
}


def save_its_processor(checkpoint: Path, whole: Any, images: Any, videos: Any) -> None:
    """The one that ms-swift loads; packs do without."""
    names = {"start_image": "<img>", "end_image": "</img>", "context_image": "<IMG_CONTEXT>"}
    names = {f"{name}_token": token for name, token in names.items()} | {"video_token": "<video>"}
    options = {"extra_special_tokens": names} if whole is InternVLProcessor else {}
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, **options)
    template = tokenizer.chat_template
    whole(images(), tokenizer, videos(), chat_template=template).save_pretrained(checkpoint)


@pytest.mark.parametrize("family", TRAINED)
def test_steps_are_those_of_the_samples_alone(family: str, tmp_path: Path, say: Say) -> None:
    model_type, template, processors = TRAINED[family]
    checkpoint, packed = several_packs(family, tmp_path)
    save_its_processor(checkpoint, *processors)
    names = {"model_type": model_type, "template": template}
    trainer = make_trainer(checkpoint, packed, tmp_path / "output", **names, max_steps=2)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    say(check_losses(packed, checkpoint, losses))


DOCS = Path(__file__).parents[2] / "docs"
(COMMAND,) = re.findall(r"`(swift sft [^`]*)`", (DOCS / "integrations.md").read_text())
(LONG_COMMAND,) = re.findall(
    r"(swift sft [^`]*)\n```", (DOCS / "coming_from_ms_swift.md").read_text()
)


#: Family of the checkpoint of a command.
of_command = pytest.mark.parametrize("family", ["qwen2_5_vl"], indirect=True)


def datasets(
    checkpoint: Path, packed: Path, output: Path, *more: str, command: str = COMMAND
) -> list[Any]:
    """The samples that a pipeline of the documented command trains on, with these options."""
    names = dict.fromkeys(("FOLDER", "Qwen/Qwen2-VL-2B-Instruct"), str(checkpoint))
    names["out/packed"] = str(packed)
    words = [names.get(word, word) for word in shlex.split(command.replace("\\\n", " "))[2:]]
    model = ["--model_type", "qwen2_5_vl", "--template", "qwen2_5_vl"]
    options = ["--output_dir", str(output), "--use_cpu", "true", "--torch_dtype", "float32"]
    args, rest = parse_args(CPUArguments, [*words, *model, *options, *more])
    assert not rest
    return SwiftSft._prepare_dataset(SimpleNamespace(args=args, template=SimpleNamespace()))


@of_command
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


@of_command
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--packing false", "set --packing true"),
        ("--train_dataloader_shuffle true", "set --train_dataloader_shuffle false"),
        ("--group_by_length true", "leave out --group_by_length"),
        ("--dataset {packed} other.jsonl", "give one --dataset"),
        ("--val_dataset {packed}", "no packs in its val split"),
    ],
)
def test_what_packs_do_not_do_is_refused(
    options: str, message: str, case: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        datasets(*case, tmp_path, *options.format(packed=case[1]).split())
    assert "\n" not in str(caught.value)


@of_command
def test_packs_that_contradict_model_or_environment_are_refused(case: Any, tmp_path: Path) -> None:
    check_contradictions(
        lambda model, packs: datasets(with_processor(model), packs, tmp_path), case, tmp_path
    )


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


@pytest.fixture(scope="module")
def with_videos(family: str, case: Any) -> Any:
    """The model and its processor, as ms-swift loads them."""
    return get_model_processor(str(with_processor(case[0])), model_type=family)


each_family = pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"], indirect=True)


@each_family
@pytest.mark.usefixtures("_decoder")
def test_packs_with_videos_are_what_its_packing_would_give(
    family: str, with_videos: Any, video_packs: Path, tmp_path: Path, say: Say
) -> None:
    """All but the pixels: it resizes images with Pillow (those are compared with the demo's packs),
    and frames in floating point, which it spreads from the first to the last."""
    packs = open_packs(video_packs)
    encoder = packs.task_encoder.encoder
    stored = encoder.options.model_dump()
    limits = {f"{end}_pixels": stored[f"video_{end}_pixels"] for end in _ENDS}
    template, plugged = (make_template(*with_videos, family) for _ in range(2))
    dataset = packs_of_plugin(plugged, with_videos[0].model_dir, video_packs)
    alike = others = 0
    for number, pack in enumerate(packs):
        samples = list(stored_samples(pack))
        own = [own_sample(template, *s, limits, tmp_path) for s in samples]
        theirs = template.data_collator([own])
        ours = plugged.data_collator([dataset[number]])
        theirs.pop("second_per_grid_ts", None)  # of which positions were made
        assert ours.keys() == theirs.keys()
        pixels = [batch.pop("pixel_values_videos", None) for batch in (theirs, ours)]
        for batch in (theirs, ours):
            batch.pop("pixel_values", None)
        assert_same(ours, theirs, f"{family} {number}")
        videos = [data for sample, media in samples for data in media[len(sample.images) :]]
        if not videos:
            continue
        sizes = ours["video_grid_thw"].prod(1).tolist()
        for data, one, other in zip(videos, *(p.split(sizes) for p in pixels), strict=True):
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
    family: str, case: Any, with_videos: Any, tmp_path: Path, say: Say
) -> None:
    """All but the pixels, of videos of 4 and 8 frames: it takes an even number, and limits the
    pixels of a frame, where packs limit those of a video."""
    model = {"family": family, "processor": str(case[0]), "video_max_pixels": 1 << 16}
    packed = clips_packed("bmr", tmp_path, **model)
    packs, model_dir = open_packs(packed), with_videos[0].model_dir
    encoder = packs.task_encoder.encoder
    stored = encoder.options.model_dump()
    template, plugged = (
        make_template(*with_videos, family, add_non_thinking_prefix=False) for _ in range(2)
    )
    dataset, compared = packs_of_plugin(plugged, model_dir, packed), 0
    for number, pack in enumerate(packs):
        for (sample, media), ours in zip(stored_samples(pack), dataset[number], strict=True):
            headers = [read_video_header(io.BytesIO(data)) for data in media[len(sample.images) :]]
            counts = {len(encoder.sample_video(header).frames) for header in headers}
            if counts not in ({4}, {8}) or sample.images:
                continue
            (frames,) = counts
            limits = {f"{end}_pixels": stored[f"video_{end}_pixels"] // frames for end in _ENDS}
            own = own_sample(template, sample, media, limits, tmp_path)
            row, theirs = plugged.data_collator([[ours]]), template.data_collator([[own]])
            for batch in (row, theirs):
                del batch["pixel_values_videos"]
            assert row.keys() == theirs.keys()
            assert_same(row, theirs, f"{family} {number}")
            compared += 1
    assert compared > 3
    say(f"{compared} samples with videos as it encodes them, pixels apart")


@each_family
def test_samples_padded_for_context_parallelism_go_on_behind(
    family: str, with_videos: Any, video_packs: Path
) -> None:
    """As in its `_handle_megatron_cp`, which makes a sample longer and leaves its positions."""
    template, plugged = (make_template(*with_videos, family) for _ in range(2))
    for sample in packs_of_plugin(plugged, with_videos[0].model_dir, video_packs)[0]:
        del sample["labels"], sample["length"]
        sample["input_ids"] = torch.tensor([[*sample["input_ids"], 0, 0, 0]])
        types = torch.nn.functional.pad(sample["mm_token_type_ids"], (0, 3))
        sample["mm_token_type_ids"] = types[None]
        ours = plugged._get_position_ids(sample)["position_ids"]
        if family == "qwen2_vl" or "video_grid_thw" not in sample:  # which have no time
            theirs = template._get_position_ids(sample)["position_ids"]
            assert torch.equal(ours, theirs)
        assert torch.equal(ours[:, :, -4:].diff(), torch.ones(4, 1, 3, dtype=torch.int64))
