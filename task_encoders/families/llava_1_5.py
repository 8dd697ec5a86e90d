"""LLaVA-1.5, also with other vision towers: every image is a square of the same size.

plain   <s> image caption \\n
v1      <s> system USER: image \\n question ASSISTANT: answer </s> USER: … </s>
neva    as v1, but questions are as they were written: with images where they are marked
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Final, Literal

from PIL import Image as PillowImage

from task_encoders.families.base.cost import ModelCost, TransformerShape
from task_encoders.families.base.family import (
    TINY,
    TINY_TOWER,
    Family,
    FamilyEncoder,
    ModelOptions,
    Preset,
)
from task_encoders.families.base.spans import BlankImage, Medium, Span
from task_encoders.field_types import Count, NonNegative
from task_encoders.media.image import CLIP_MEAN, CLIP_STD, VisionSettings
from task_encoders.media.patches import BACKENDS, Bytes
from task_encoders.samples import (
    IMAGE_PLACEHOLDER,
    SampleError,
    SourceSample,
    place_media,
    split_at_media,
)
from task_encoders.text.pieces import Answer, Control, Image, Piece, Text, caption_pieces
from task_encoders.text.tokenizer import checkpoint_tokenizer

#: Mean and standard deviation of a tower's pixels.
TOWERS: Final = {"clip": (CLIP_MEAN, CLIP_STD), "siglip": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))}

DEFAULT_SYSTEM: Final = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions."
)
_START, _END = Control("<s>"), Control("</s>", 1.0)


class Llava15Options(ModelOptions):
    """Square images of one size: by default CLIP ViT-L/14's 336 pixels."""

    #: side of an image in pixels
    image_size: Count = 336
    #: side of a patch in pixels
    patch_size: Count = 14
    #: tokens of an image; 0: one per patch
    tokens_per_image: NonNegative = 0
    #: images that are not square: padded with the mean colour, or as the tower's processor does it
    image_aspect: Literal["pad", "square"] = "pad"
    #: whose normalisation is used: CLIP's or SigLIP's
    tower: Literal["clip", "siglip"] = "clip"
    #: how conversations are written
    template: Literal["v1", "plain", "neva"] = "v1"


class Llava15Encoder(FamilyEncoder):
    """One row of pixel_values per image, the whole image: (3, image_size, image_size)."""

    LENGTHS_OF = "llava_1_5"
    TEMPLATE_VERSION = 2  # 1: the blank before an answer carried no loss
    POSITION_ROWS = 1
    IMAGE_LAYOUT = "squares"
    PAD_TOKEN = "<unk>"
    MEDIA_TOKENS: ClassVar = {"image_token_id": IMAGE_PLACEHOLDER}

    options: Llava15Options

    def __init__(self, options: Llava15Options) -> None:
        if options.template_options:
            raise ValueError(f"family {options.family} has no template_options; remove them")
        mean, std = TOWERS[options.tower]
        size = options.image_size
        vision = VisionSettings(patch_size=size, temporal_patch_size=1, mean=mean, std=std)
        super().__init__(options, vision)
        side = options.image_size // options.patch_size
        self._grid = (1, side, side)
        num_tokens = options.tokens_per_image or side**2
        self._image_span = Span((self.image_token_id,), num_tokens)
        self._background = tuple(int(value * 255) for value in mean)
        # A tokenizer must not split text after a special token differently than alone.
        text = "USER: What is it? ASSISTANT: A cat.</s>USER: Why? ASSISTANT: So.</s>"
        tokenizer = checkpoint_tokenizer(options.processor)
        theirs = tokenizer(text, add_special_tokens=False)["input_ids"]
        end, ours = self.tokenizer.special_id("</s>"), []
        for part in text.split("</s>")[:-1]:
            ours += [*self.tokenizer.encode(part), end]
        if ours != theirs:
            raise ValueError(
                f"the tokenizer of {options.processor!r} puts no space in front of text after a "
                f"special token, as {options.family} was trained; use the tokenizer files of a "
                "published checkpoint, such as llava-hf/llava-1.5-7b-hf"
            )

    def render(self, sample: SourceSample, weights: Sequence[float]) -> Iterator[Piece]:
        details = {name for turn in sample.turns for name in turn.details}
        if details - {"trained", "weight", "truncated"} or sample.tools:
            raise SampleError("not_in_template", "the template has no tools, thoughts and roles")
        yield _START
        end = "" if sample.turns[-1].truncated else "\n"
        if sample.task == "captioning":
            yield from caption_pieces(
                sample, end, after_media=self.options.loss_on == "after_media"
            )
            return
        if self.options.template == "plain":
            if len(sample.turns) > 1:
                raise SampleError("bad_record", "the plain template has one turn")
            yield from [Image()] * len(sample.images)
            yield Answer("", sample.turns[0].answer + end, weights[0])
            return
        text = f"{DEFAULT_SYSTEM if sample.system is None else sample.system} "
        for turn, weight in zip(place_media(sample), weights, strict=True):
            text += "USER: "
            parts = split_at_media(sample, turn.prompt)
            if self.options.template != "neva":
                # Images go in front of their turn, each on its own line.
                front = [IMAGE_PLACEHOLDER, "\n"] * turn.prompt.count(IMAGE_PLACEHOLDER)
                parts = [*front, turn.prompt.replace(IMAGE_PLACEHOLDER, "").strip()]
            for part in parts:
                if part == IMAGE_PLACEHOLDER:
                    if text:
                        yield Text(text)
                    yield Image()
                    text = ""
                else:
                    text += part
            # A prompt ends in the colon: the blank, in "▁5" a separate token, is the model's.
            header, answer = f"{text} ASSISTANT:", f" {turn.answer}"
            yield Answer(header, answer, weight) if weight else Text(header + answer)
            yield Control(_END.token, weight)
            text = ""

    def image_medium(self, height: int, width: int) -> Medium:
        return Medium(self._grid)

    def medium_spans(self, medium: Medium) -> Iterable[Span]:
        return [self._image_span]

    @staticmethod
    def blank_image(hf_config: Any) -> BlankImage:
        size = hf_config.vision_config.image_size
        side = size // hf_config.vision_config.patch_size
        return BlankImage((1, 3 * size**2), (1, side, side), side**2)

    def encode_image(self, image: PillowImage.Image) -> tuple[Bytes, Medium]:
        # Padded to a square and resized; or, where it is not to be padded, cut from the middle
        # (CLIP), or squeezed (SigLIP).
        side, (width, height) = self.options.image_size, image.size
        if self.options.image_aspect == "pad" and width != height:
            longer = max(width, height)
            square = PillowImage.new("RGB", (longer, longer), self._background)
            square.paste(image, ((longer - width) // 2, (longer - height) // 2))
            image, width, height = square, longer, longer
        resize, _ = BACKENDS["pil"]
        if self.options.tower == "siglip":
            pixels = resize(image, side, side)[..., :3]
        else:
            shorter = min(width, height)
            width, height = int(side * width / shorter), int(side * height / shorter)
            left, top = (width - side) // 2, (height - side) // 2
            pixels = resize(image, height, width)[top : top + side, left : left + side, :3]
        return pixels.transpose(2, 0, 1).reshape(1, -1), Medium(self._grid)


LLAVA_1_5: Final = Family(
    "llava_1_5",
    Llava15Options,
    Llava15Encoder,
    ModelCost(
        "LLaVA-1.5-7B",
        TransformerShape(4096, 32, 11008, query_size=4096),
        TransformerShape(1024, 24, 4096, ffn_matrices=2, causal=False),  # CLIP ViT-L/14
        head=4096 * 32_064,
        merger=20_971_520.0,
    ),
    "Llava",
    other_names=("llava", "llava_llama"),
    tiny=Preset(
        {
            **TINY,
            "model_type": "llama",
            "num_key_value_heads": 4,
            "vocab_size": 32_064,
            "rms_norm_eps": 1e-5,
        },
        {
            **TINY_TOWER,
            "model_type": "clip_vision_model",
            "image_size": Llava15Options.model_fields["image_size"].default,
            "patch_size": Llava15Options.model_fields["patch_size"].default,
        },
        {"image_token_id": 32_000, "tie_word_embeddings": False},
    ),
)
