"""Every family's conversations: tokens, labels, positions, grids, pixels and times of videos equal
transformers' own, and what is measured is what is encoded."""

import io
import itertools
import os
import re
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch
from packaging.version import Version
from PIL import Image
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.video_utils import VideoMetadata

from task_encoders.families import FAMILIES, build_sample_encoder
from task_encoders.families.builtin_processor import builtin_tokenizer
from task_encoders.families.glm4v import GLM, GLM_TEMPLATE
from task_encoders.media.patches import BACKENDS, frame_patches
from task_encoders.media.video_file import VideoHeader, decode_frames, read_video_header
from task_encoders.model_inputs import to_transformers_kwargs
from task_encoders.samples import IGNORE_INDEX, SampleError, SourceSample
from task_encoders.samples.medium_options import AS_FAMILY, MediumOptions
from task_encoders.text.chat_templates import ChatTemplate, JinjaTemplate
from task_encoders.text.template_proof import write
from task_encoders.text.tokenizer import checkpoint_tokenizer
from tests.helpers.clips import clip_of, draw_options
from tests.helpers.encoder_contract import (
    VERSION,
    needs_transformers,
    opened,
    own_pairs,
    transformers_function,
    unequal,
)
from tests.helpers.texts_and_images import (
    TypedTokens,
    messages_and_tools,
    odd_pictures,
    random_conversation,
)
from tests.helpers.tiny_checkpoints import packed_batch
from tests.helpers.tiny_families import encoder_of, encoder_options
from tests.helpers.videos import make_video, odd_clips
from tests.world import World

#: FUZZED_SAMPLES=2000 takes some minutes.
SAMPLES = int(os.environ.get("FUZZED_SAMPLES", "24"))
PUBLISHED = Path(__file__).parents[2] / "data" / "templates"
ONE_FRAME = make_video(1)
#: Before and after what carries loss, in what a template writes.
BEGIN, END = "\ue010", "\ue011"
#: Attributes of transformers' processors, besides those of media.
TOKENS: dict[str, Any] = {
    **{f"vision_{end}_token": f"<|vision_{end}|>" for end in ("start", "end")},
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "image_seq_length": 4,
    "video_processor": SimpleNamespace(merge_size=2, temporal_patch_size=2),
}


def of_transformers(names: tuple[str, str], kind: str) -> Any:
    """Import a class by its module and prefix: a Processor, or a Model."""
    module, prefix = names
    file = {"Processor": "processing", "Model": "modeling"}[kind]
    return getattr(import_module(f"transformers.models.{module}.{file}_{module}"), prefix + kind)


def qwen_images(encoder: Any) -> Any:
    options, vision = encoder.options, encoder.vision
    is_qwen3 = options.family.startswith("qwen3")
    return Qwen2VLImageProcessorPil(
        patch_size=16 if is_qwen3 else getattr(options, "patch_size", 14),
        merge_size=vision.merge_size,
        temporal_patch_size=vision.temporal_patch_size,
        min_pixels=options.min_pixels,
        max_pixels=options.max_pixels,
        **({"image_mean": [0.5] * 3, "image_std": [0.5] * 3} if is_qwen3 else {}),
    )


def glm_images(encoder: Any) -> Any:
    options = encoder.options
    kind = Glm4vImageProcessorPil if options.family == "glm4v" else Glm46VImageProcessorPil
    return kind(size={"shortest_edge": options.min_pixels, "longest_edge": options.max_pixels})


def gemma_images(encoder: Any) -> Any:
    """Make the processor of the tower, without padding; 12B merges its patches."""
    of_tower = Gemma4ImageProcessorPil(max_soft_tokens=encoder.options.max_soft_tokens)

    def process(images: Sequence[Any], return_tensors: str) -> dict[str, Any]:
        found = of_tower(images=images, return_tensors=return_tensors)
        counts, parts = found["num_soft_tokens_per_image"], []
        columns = found["pixel_values"], found["image_position_ids"], counts
        for values, places, count in zip(*columns, strict=True):
            assert not values[9 * count :].any()
            part = values[: 9 * count], places[: 9 * count]
            if encoder.options.family == "gemma4_unified":
                merge = transformers_function("gemma4_unified", "patches_merge")
                merged = merge(*(torch.from_numpy(one)[None] for one in part), count)
                part = merged[0][0].numpy(), merged[1][0].numpy()
            parts.append(part)
        rows, places = map(np.concatenate, zip(*parts, strict=True))
        return {"rows": rows, "places": places, "num_soft_tokens_per_image": counts}

    return process


def pixtral_images(encoder: Any) -> Any:
    return PixtralImageProcessorPil(
        size={"longest_edge": encoder.options.longest_edge}, patch_size=28
    )


def pixtral_text(images: Any, number: int) -> str:
    """Write an image as PixtralProcessor.replace_image_token, whose module needs torchvision."""
    rows, columns = (int(side) // 28 for side in images["image_sizes"][number])
    row = "[IMG]" * columns + "[IMG_BREAK]"
    return (row * rows).removesuffix("[IMG_BREAK]") + "[IMG_END]"


def tiled_images(encoder: Any) -> Any:
    return GotOcr2ImageProcessorPil(
        size=dict.fromkeys(("height", "width"), encoder.options.image_size),
        max_patches=encoder.options.max_tiles,
        crop_to_patches=True,
        image_mean=[0.485, 0.456, 0.406],
        image_std=[0.229, 0.224, 0.225],
    )


def marked_answers(pattern: str) -> Callable[[str], str]:
    """Mark the second group: what follows the header of an answer."""
    return lambda text: re.sub(pattern, rf"\1{BEGIN}\2{END}", text, flags=re.DOTALL)


def mark_mistral(template: str) -> str:
    begin, end = "{%- elif message['role'] == 'assistant' %}", "{{- eos_token }}"
    for mark, old in ((BEGIN, begin), (END, end)):
        assert template.count(old) == 1
        template = template.replace(old, f"{old}{{{{- '{mark}' }}}}")
    return template


def mark_gemma(template: str) -> str:
    """Mark where TRL's training template of the same layout (diffusion_gemma_training.jinja)
    does."""
    thought = "'<|channel>thought\\n' + thinking_text + '\\n<channel|>'"
    for old, new in (
        (thought, f"'{BEGIN}' + {thought} + '{END}'"),
        ("'<|tool_call>call:'", f"'{BEGIN}<|tool_call>call:'"),
        ("'}<tool_call|>'", f"'}}<tool_call|>{END}'"),
        (
            "{{- captured_content -}}",
            f"{{{{- '{BEGIN}' ~ captured_content ~ '{END}' if role == 'model' and "
            "captured_content|trim else captured_content -}}",
        ),
    ):
        assert template.count(old) == 1
        template = template.replace(old, new)
    head, end, tail = template.rpartition("{{- '<turn|>\\n' -}}")
    assert end
    return f"{head}{{{{- '{BEGIN}<turn|>{END}\\n' if role == 'model' else '<turn|>\\n' -}}}}{tail}"


def end_gemma(text: str) -> str:
    """The model hands over with the token that opens a result, and has no say in what follows."""
    text = text.replace(f"{END}<|tool_response>", f"<|tool_response>{END}")
    return text.replace(f"<tool_response|>{BEGIN}<turn|>{END}", "<tool_response|><turn|>")


class Kind(NamedTuple):
    """How transformers and published checkpoints have a family."""

    #: module and prefix of its classes in transformers
    names: tuple[str, str]
    #: makes the image processor with an encoder's sizes
    images: Callable[[Any], Any]
    #: what a template writes in the place of an image, and of a video
    marks: tuple[str, ...]
    #: marks what carries loss in what the template has written, or in the template
    mark: Callable[[str], str]
    mark_template: Callable[[str], str] = str
    #: the first transformers whose processor writes media by itself
    since: str = "5.10"


CHATML = marked_answers(r"(<\|im_start\|>assistant\n)(.*?<\|im_end\|>)")
QWEN = Kind(("qwen2_vl", "Qwen2VL"), qwen_images, ("<|image_pad|>", "<|video_pad|>"), CHATML)
GLM4V = Kind(
    ("glm4v", "Glm4v"),
    glm_images,
    ("<|image|>", "<|video|>"),
    marked_answers(r"(<\|assistant\|>)(.*?<\|(?:user|observation|system)\|>)"),
)
GEMMA = Kind(("gemma4", "Gemma4"), gemma_images, GLM4V.marks, end_gemma, mark_gemma)
INTERNVL = ("internvl", "InternVL"), tiled_images, ("<IMG_CONTEXT>", "<video>"), CHATML
KINDS: dict[str, Kind] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "llava_onevision_1_5", "llava_onevision_2"), QWEN),
    **dict.fromkeys(("qwen3_vl", "qwen3_5"), QWEN._replace(names=("qwen3_vl", "Qwen3VL"))),
    "glm4v": GLM4V,
    "glm46v": GLM4V._replace(names=("glm46v", "Glm46V")),
    **dict.fromkeys(("gemma4", "gemma4_unified"), GEMMA),
    "mistral3": Kind(("pixtral", "Pixtral"), pixtral_images, ("[IMG]",), str, mark_mistral),
    "internvl3": Kind(*INTERNVL, since="5.15"),
}
#: Models that compute positions, where they are not those of KINDS.
MODELS = {"qwen2_5_vl": ("qwen2_5_vl", "Qwen2_5_VL"), "qwen3_5": ("qwen3_5", "Qwen3_5")}
#: After a family's name: options of its encoder, or a published template.
VARIANTS: dict[str, dict[str, Any]] = {
    "builtin": {"processor": "builtin"},
    "untagged": {"outer_video_tags": False},
    **{f"{p} by {m}": {"patch_size": p, "merge_size": m} for p in (14, 16) for m in (2, 3)},
}
BUILT_IN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_onevision_1_5")
CASES = [
    *(f"{family} builtin" for family in BUILT_IN),
    "qwen3_vl untagged",
    *(f"qwen3_5 qwen3_{generation}" for generation in (5, 6, 8)),
    *("llava_onevision_2 14 by 3", "llava_onevision_2 16 by 2"),
    *("glm4v", "glm46v", "gemma4", "gemma4_unified", "internvl3"),
    *("mistral3 mistral_v13", "mistral3 mistral_v15"),
    *(
        pytest.param(one, marks=pytest.mark.exhaustive)
        for one in (
            *(*BUILT_IN, "qwen3_5 untagged"),
            *(f"llava_onevision_2 {sizes}" for sizes in ("14 by 2", "16 by 3")),
        )
    ),
]


class Clip(NamedTuple):
    """A video, what is taken of it, and its patches."""

    header: VideoHeader
    frames: list[int]
    grid: tuple[int, int, int]
    rows: np.ndarray


class Reference:
    """A family's encoder, and transformers' processor and positions."""

    def __init__(self, case: str, world: World, folder: Path) -> None:
        self.family, _, variant = case.partition(" ")
        self.kind = KINDS[self.family]
        needs_transformers(self.kind.since, "writes no media to compare with")
        folder = shutil.copytree(world.tokenizer(self.family), folder / self.family)
        published = PUBLISHED / f"{variant}.jinja"
        template = published.read_text("utf-8") if published.is_file() else ""
        if variant == "untagged":  # words of the template in front of a medium
            template = FAMILIES[self.family].build.TEMPLATE or ""
            template = template.replace("{{- '<|vision_start|>", "{{- 'It: <|vision_start|>")
        if template:
            (folder / "chat_template.jinja").write_text(template)
        options = {"processor": str(folder), "resize": "pil", **encoder_options(self.family)}
        options |= VARIANTS.get(variant, {})
        self.encoder: Any = build_sample_encoder(self.family, **options)
        self.tokenizer: Any = (
            builtin_tokenizer(self.encoder.TEXT_TOKENS)
            if variant == "builtin"
            else checkpoint_tokenizer(str(folder))
        )
        template = template or self.encoder.TEMPLATE or self.tokenizer.chat_template
        self.as_objects = "<function=" in template or self.family.startswith(("glm", "gemma"))
        self.template = self.kind.mark_template(template)
        added = self.tokenizer.added_tokens_decoder.values()
        self.names = [*(str(token) for token in added if token.special), "<video>"]
        self.typed = TypedTokens(self.tokenizer, self.names)
        self.images = self.kind.images(self.encoder)
        self.processor: Any = SimpleNamespace(replace_image_token=pixtral_text)
        if self.family != "mistral3":
            kind = of_transformers(self.kind.names, "Processor")
            self.processor = kind.__new__(kind)
        names = dict(zip(("image_token", "video_token"), self.kind.marks, strict=False))
        ids = {"image_token_id": self.kind.marks[0]}
        ids |= {"video_start_id": "<|begin_of_video|>", "video_end_id": "<|end_of_video|>"}
        found = {name: self.tokenizer.convert_tokens_to_ids(token) for name, token in ids.items()}
        vars(self.processor).update(TOKENS, image_processor=self.images, **names, **found)
        # An older transformers rounds the time of a video's steps otherwise.
        is_old = self.family == "qwen2_5_vl" and Version("5.18") > VERSION
        self.takes_videos = self.encoder.takes_videos and not is_old
        self.takes_options = self.takes_videos and self.kind.images is qwen_images

    def written(self, sample: SourceSample) -> str | None:
        """Write a conversation by the template, up to the end of its last answer, with marks around
        what carries loss; None where the template refuses it."""
        given = messages_and_tools(sample, as_objects=self.as_objects)
        text = self.typed.write(*given, self.template)
        if text is not None and self.family.startswith("glm"):  # the next message ends an answer
            text += "<|observation|>" if sample.turns[-1].calls else "<|user|>"
        return None if text is None else self.kind.mark(text.rstrip())

    def with_media(self, text: str, images: Any, clips: Sequence[Clip]) -> str:
        """Put what the processor writes of media in the place of the template's marks."""
        if not getattr(self.encoder.options, "outer_video_tags", True):
            pad = self.kind.marks[1]  # as the processors of transformers 4.57 to 5.9
            text = text.replace(f"<|vision_start|>{pad}<|vision_end|>", pad)
        numbers, left = itertools.count(), iter(clips)

        def medium(found: re.Match[str]) -> str:
            if found[0] == self.kind.marks[0]:
                return str(self.processor.replace_image_token(images, next(numbers)))
            return self.video_text(next(left))

        return re.sub("|".join(map(re.escape, self.kind.marks)), medium, text)

    def video_text(self, clip: Clip) -> str:
        """Write a video as the processor does in the place of its mark."""
        num_frames, rate = clip.header.num_frames, clip.header.fps
        metadata = VideoMetadata(num_frames, fps=rate, frames_indices=np.array(clip.frames))
        pool = getattr(self.encoder, "POOL", 1)
        inputs = {
            "video_metadata": [metadata],
            "video_grid_thw": torch.tensor([clip.grid]),
            "num_soft_tokens_per_video": [clip.grid[1] * clip.grid[2] // pool**2],
            "pixel_values_videos": [np.zeros(len(clip.frames))],
        }
        return str(self.processor.replace_video_token(inputs, video_idx=0))

    def ids_and_labels(self, text: str, trained: Sequence[bool]) -> tuple[list[int], list[int]]:
        """Return the tokens of a text, and the labels of those that overlap what is marked in it,
        of the answers that are trained."""
        ids: list[int] = []
        labels: list[int] = []
        inside, answers = False, iter(trained)
        for i, part in enumerate(self.typed.pattern.split(text)):
            if i % 2:
                ids.append(self.tokenizer.convert_tokens_to_ids(part))
                labels.append(ids[-1] if inside else IGNORE_INDEX)
                continue
            shown, carry_loss = "", []
            for character in self.typed.shown(part):
                if character in (BEGIN, END):
                    inside = character == BEGIN and next(answers, True)
                else:
                    shown += character
                    carry_loss.append(inside)
            plain = {"split_special_tokens": True, "add_special_tokens": False}
            found = self.tokenizer(shown, return_offsets_mapping=True, **plain)
            ids += found.input_ids
            for one, (begin, end) in zip(found.input_ids, found.offset_mapping, strict=True):
                labels.append(one if any(carry_loss[begin:end]) else IGNORE_INDEX)
        return ids, labels

    def clip(self, data: bytes, asked: MediumOptions) -> Clip:
        """Take frames of a video: those that its options ask for, by the rule of transformers."""
        header = read_video_header(io.BytesIO(data))
        if not asked:
            sampled = self.encoder.sample_video(header)
            rows, _ = self.encoder.encode_video(data)
            return Clip(header, list(sampled.frames), sampled.grid, rows)
        frames, grid = clip_of(self.encoder, header, asked)
        pictures = list(decode_frames(data, header, range(header.num_frames)))
        shown = [pictures[number] for number in frames]
        return Clip(header, frames, grid, frame_patches(shown, grid, 2, self.encoder.vision))

    def positions(self, tokens: np.ndarray, images: Any, clips: Any, seconds: list[float]) -> Any:
        """Return positions by get_rope_index."""
        if self.encoder.POSITION_ROWS == 1:
            return np.arange(len(tokens))[None]
        kind = of_transformers(MODELS.get(self.family, self.kind.names), "Model")
        vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
        model = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
        model.get_vision_position_ids = kind.get_vision_position_ids.__get__(model)
        ids = torch.from_numpy(tokens)[None]
        if self.encoder.VIDEOS_AS_IMAGES:
            types = torch.tensor(self.processor.create_mm_token_type_ids([tokens]))
        else:
            is_video = ids == self.encoder.video_token_id
            types = (ids == self.encoder.image_token_id).int() + 2 * is_video.int()
        grids = {"image": images.get("image_grid_thw", ()), "video": [one.grid for one in clips]}
        given = {
            f"{name}_grid_thw": torch.tensor(np.array(own)) if len(own) else None
            for name, own in grids.items()
        }
        if self.family == "qwen2_5_vl":
            given["second_per_grid_ts"] = torch.tensor(seconds)
        return kind.get_rope_index(model, ids, types, **given)[0][:, 0].numpy()

    def differences(
        self, sample: SourceSample, text: str, images: list[bytes], videos: list[bytes]
    ) -> list[str]:
        """Name what differs from transformers in an encoded sample, whose template writes `text`,
        or in what is measured or stored of it. Raises SampleError where it cannot be encoded."""
        encoder = self.encoder
        encoded = encoder.encode(sample, images, videos)
        theirs = self.images(images=[*map(opened, images)], return_tensors="np") if images else {}
        asked = sample.media_options[len(images) :]
        clips = [self.clip(data, one) for data, one in zip(videos, asked, strict=True)]
        weights = [turn.weight > 0 for turn in sample.turns]
        tokens, labels = self.ids_and_labels(self.with_media(text, theirs, clips), weights)
        seconds = [
            encoder.for_medium(one).sample_video(clip.header).seconds_per_step
            for one, clip in zip(asked, clips, strict=True)
        ]
        positions = self.positions(encoded.tokens, theirs, clips, seconds)
        pairs: dict[str, tuple[Any, Any]] = {
            "tokens": (encoded.tokens, tokens),
            "labels": (encoded.labels, labels),
            "positions": (encoded.position_ids, positions),
            **own_pairs(encoder, sample, images, videos, encoded),
        }
        if text.count(BEGIN) != len(sample.turns) and not all(weights):
            del pairs["labels"]
        stills = [encoder.encode_image(encoder.decode_image(data))[0] for data in images]
        shown: tuple[list[Any], list[Any]] = stills, [clip.rows for clip in clips]
        if encoder.VIDEOS_AS_IMAGES:  # in the order of their tokens
            kinds = [iter(own) for own in shown]
            marks = re.findall("|".join(map(re.escape, self.kind.marks)), text)
            shown = [next(kinds[self.kind.marks.index(mark)]) for mark in marks], []
        for name, rows in zip(("image_pixels", "video_pixels"), shown, strict=True):
            own = getattr(encoded, name)
            pairs[name] = own, np.concatenate([*rows, own[:0]])
        if images and not (videos and encoder.VIDEOS_AS_IMAGES):
            ours = to_transformers_kwargs(packed_batch([encoded]))
            pairs |= {name: (ours[name], theirs[name]) for name in ours.keys() & theirs.keys()}
            if "rows" in theirs:
                pairs["rows"] = encoded.pixel_values, theirs["rows"]
                is_place = ours["image_position_ids"][..., 0] >= 0
                pairs["places"] = ours["image_position_ids"][is_place], theirs["places"]
            if "patch_positions" in ours:
                grids, merge = theirs["image_grid_thw"], encoder.vision.merge_size
                places = [one for grid in grids for one in in_blocks(grid, merge)]
                pairs["patch positions"] = ours["patch_positions"], places
        return unequal(pairs)


def in_blocks(grid: Any, merge: int) -> Iterator[tuple[int, int, int]]:
    """(0, row, column) of each patch, in blocks of merge²."""
    rows, columns = (range(0, int(side), merge) for side in grid[1:])
    for row, column, y, x in itertools.product(rows, columns, range(merge), range(merge)):
        yield 0, row + y, column + x


def draw(
    rng: np.random.Generator, index: int, reference: Reference
) -> tuple[SourceSample, list[bytes], list[bytes]]:
    """Draw a conversation, its images and its videos: with control tokens and <video> that a user
    typed, or with some images turned into videos, of which some have options of their own."""
    typed = [name for name in reference.names if '"' not in name]  # which JSON writes otherwise
    special = tuple(typed) if index % 3 == 0 else ()
    sample = random_conversation(rng, index, special=special)
    if not sample.images and rng.random() < 0.4:  # in front
        sample = replace(sample, images=("a", "b")[: rng.integers(1, 3)])
    may_turn = reference.takes_videos and not special
    kinds = ["<video>" if may_turn and rng.random() < 0.4 else "<image>" for _ in sample.images]
    left = iter(kinds)

    def chosen(text: str) -> str:
        return re.sub("<image>", lambda _: next(left), text)

    turns = []
    for turn in sample.turns:
        before = tuple((role, chosen(text)) for role, text in turn.before)
        turns.append(replace(turn, before=before, prompt=chosen(turn.prompt)))
    clips = [*odd_clips(), ONE_FRAME][: 5 if reference.takes_options else 4]
    videos = [clips[i] for i in rng.integers(0, len(clips), kinds.count("<video>"))]
    names = sample.images[len(videos) :]
    images = [odd_pictures()[i] for i in rng.integers(0, len(odd_pictures()), len(names))]
    sample = replace(sample, turns=tuple(turns), images=names, videos=("v",) * len(videos))
    if videos and index % 2 and reference.takes_options:
        options = [AS_FAMILY] * len(images)
        options += [own_options(rng, reference.encoder, data) for data in videos]
        sample = replace(sample, options=tuple(options))
    return sample, images, videos


def own_options(rng: np.random.Generator, encoder: Any, data: bytes) -> MediumOptions:
    """Draw options that a video can have, if it has several frames."""
    header = read_video_header(io.BytesIO(data))
    assert header.fps is not None
    seconds, side = header.num_frames / header.fps, encoder.vision.factor
    drawn = (draw_options(rng, seconds, side) for _ in range(100))
    return next((one for one in drawn if clip_of(encoder, header, one)), AS_FAMILY)


@pytest.mark.parametrize("case", CASES)
def test_conversations(case: str, world: World, tmp_path: Path) -> None:
    """Compare conversations of text, images and videos; with thoughts, tools, calls and their
    results, and control tokens that a user typed."""
    reference = Reference(case, world, tmp_path)
    if "_v1" in case or "5 qwen3_" in case:  # the others write what the family's template does
        is_other = case.endswith(("qwen3_8", "mistral_v15"))
        assert ("chat_template" in reference.encoder.fingerprint) == is_other
    rng, counts = np.random.default_rng(zlib.crc32(case.encode())), Counter[str]()
    for index in range(2 * SAMPLES):
        if index >= SAMPLES and bool(counts["videos"]) == reference.takes_videos:
            break
        counts["drawn"] += 1
        sample, images, videos = draw(rng, index, reference)
        text = reference.written(sample)
        try:
            found = reference.differences(sample, text or "", images, videos)
        except SampleError as error:
            counts[error.reason] += 1
            counts["refused plain"] += text is not None and sample.is_plain
            continue
        assert found == []
        counts.update(written=1, tools=bool(sample.tools), images=bool(images), videos=bool(videos))
    assert counts["refused plain"] == 0
    assert counts["written"] + counts["not_in_template"] == counts["drawn"]
    assert counts["written"] > 0.3 * SAMPLES
    assert counts["images"] > 0.1 * SAMPLES
    assert (counts["videos"] > 0.03 * SAMPLES) == reference.takes_videos


def test_every_family_is_held_against_transformers() -> None:
    assert KINDS.keys() | {"llava_1_5"} == FAMILIES.keys()  # which has a test of its own


def by_torch(encoder: Any, frames: Sequence[Image.Image], grid: Sequence[int]) -> Any:
    """Values of frames by the steps of transformers' torch backend, one after another."""
    patch, family = encoder.vision.patch_size, encoder.options.family
    pixels = torch.from_numpy(np.stack([*map(np.array, frames)])).permute(0, 3, 1, 2)
    size = (grid[1] * patch, grid[2] * patch)
    resized = torch.nn.functional.interpolate(pixels, size, mode="bicubic", antialias=True)
    normal = encoder.vision.mean, encoder.vision.std
    mean, std = (torch.tensor(x)[:, None, None] * (1.0 / (1 / 255)) for x in normal)
    is_gemma = family.startswith("gemma")
    values = resized * (1 / 255) if is_gemma else (resized.float() - mean) / std
    if encoder.vision.temporal_patch_size == 2:
        kind = f"{KINDS[family].names[1]}VideoProcessor"
        patchify = transformers_function(family, "patchify", kind)
        return patchify(None, values[None], patch, 2, 2)[0][0].numpy()
    blocks = values.reshape(len(frames), 3, size[0] // patch, patch, size[1] // patch, patch)
    order = (0, 2, 4, 3, 5, 1) if is_gemma else (0, 2, 4, 1, 3, 5)
    return blocks.permute(order).flatten(3).flatten(0, 2).numpy()


@pytest.mark.parametrize(
    "family", ["qwen2_vl", "qwen3_vl", "glm4v", "internvl3", "gemma4", "gemma4_unified"]
)
def test_pixels_by_torch(family: str, world: World) -> None:
    """Compare values of videos, also of one frame, and of images; GLM's and InternVL's images are
    cut like frames."""
    by_pillow, encoder = (encoder_of(world.tokenizer(family), resize=one) for one in BACKENDS)
    assert encoder.fingerprint == by_pillow.fingerprint  # lengths do not depend on it
    if family.startswith(("qwen", "gemma")):
        images = [opened(data).convert("RGB") for data in odd_pictures()[:20]]
        if family == "qwen2_vl":  # 6 megapixels, which Pillow holds in blocks and does not hand out
            coarse = np.random.default_rng(0).integers(0, 256, (50, 12, 3), np.uint8)
            images.append(Image.fromarray(coarse).resize((1200, 5000)))
            with pytest.raises(ValueError, match=r"not contiguous|in multiple array blocks"):
                pa.array(images[-1])
        for image in images:
            rows, (grid, _) = encoder.encode_image(image)
            found = encoder.normalisation.values(rows, encoder.normalisation.repeats)
            np.testing.assert_array_equal(found, by_torch(encoder, [image], grid))
    counts = []
    for data in odd_clips():
        header = read_video_header(io.BytesIO(data))
        sampled = encoder.sample_video(header)
        frames = [*decode_frames(data, header, sampled.frames, 10**6)]
        found = encoder.normalisation.values(encoder.encode_video(data)[0])
        np.testing.assert_array_equal(found, by_torch(encoder, frames, sampled.grid))
        counts.append(len(frames))
    assert (min(counts) == 1) == (family == "glm4v")


def test_texts_of_glm_are_those_of_trl(world: World, tmp_path: Path) -> None:
    """Compare with GLM-4.5's templates, which take no media: the texts, and the answers that TRL
    trains, where results follow calls, and nothing else does, as TRL takes it."""
    reference = Reference("glm4v", world, tmp_path)
    published = (PUBLISHED / "glm4moe.jinja").read_text()
    ours, theirs = (ChatTemplate(JinjaTemplate(x, {}), GLM) for x in (GLM_TEMPLATE, published))
    template = (PUBLISHED / "glm4moe_training.jinja").read_text()
    for name, mark in (("generation", BEGIN), ("endgeneration", END)):
        template = template.replace(f"{{% {name} %}}", f"{{{{- '{mark}' -}}}}")
    rng, counts = np.random.default_rng(12), Counter[str]()
    for index in range(2 * SAMPLES):
        sample = random_conversation(rng, index)
        if sample.images:
            continue
        assert write(ours, sample) == write(theirs, sample)
        counts["texts"] += write(ours, sample) is not None
        pairs = itertools.pairwise(sample.turns)
        if any(bool(a.calls) != (b.role == "tool") for a, b in pairs):
            continue
        given = messages_and_tools(sample, as_objects=True)
        assert reference.written(sample) == reference.typed.write(*given, template)
        counts.update(written=1, tools=bool(sample.tools))
    assert counts["texts"] > counts["written"] > 0.4 * SAMPLES
    assert counts["tools"] > 0.1 * SAMPLES
