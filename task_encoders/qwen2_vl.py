"""Qwen2-VL's sample encoder. `measure` and `encode` share `_layout`, so they cannot disagree."""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from task_encoders import chat_templates, vision
from task_encoders.chat_templates import Answer, Control, Text
from task_encoders.sample_encoder import IGNORE_INDEX, EncodedSample, SampleLength
from task_encoders.samples import SourceSample, check_sample
from task_encoders.tokenizer import BUILTIN, load_tokenizer

Grid = tuple[int, int, int]

#: Raised by one whenever a change alters any sample's tokens, so that old artifacts are refused.
TEMPLATE_VERSION: Final = 1


class _Span(NamedTuple):
    """Consecutive tokens: `ids` with loss from `loss_from` on, or one image's `grid`."""

    ids: Sequence[int]
    num_tokens: int
    loss_from: int
    grid: Grid | None = None


class Qwen2VLSampleEncoder:
    """Encodes samples as Qwen2-VL and Qwen2.5-VL read them.

    Captioning is the form of pretraining: vision tags, caption, end token, no chat template;
    everything but the vision part carries loss. Conversations go through the chat template with
    loss on the answers and their end tokens.
    """

    def __init__(
        self,
        *,
        processor: str = BUILTIN,
        min_pixels: int,
        max_pixels: int,
        max_aspect_ratio: float = 200,
        max_image_pixels: int = vision.MAX_IMAGE_PIXELS,
    ) -> None:
        self.tokenizer = load_tokenizer(processor)
        if processor != BUILTIN:
            _check_checkpoint(processor)
        self.vision = vision.VisionSettings(
            min_pixels, max_pixels, max_aspect_ratio, max_image_pixels
        )
        self._vision_start = self.tokenizer.special_id("<|vision_start|>")
        self._vision_end = self.tokenizer.special_id("<|vision_end|>")
        self.image_token_id = self.tokenizer.special_id("<|image_pad|>")
        self.pad_token_id = self.tokenizer.special_id("<|endoftext|>")
        self._control = {
            Control(token, labelled): _Span([self.tokenizer.special_id(token)], 1, 1 - labelled)
            for token in ("<|im_start|>", "<|im_end|>")
            for labelled in (False, True)
        }
        self._before_image = _Span([self._vision_start], 1, 1)
        self._behind_image = _Span([self._vision_end], 1, 1)
        self._texts: dict[str, _Span] = {}

    @cached_property
    def fingerprint(self) -> Mapping[str, str | int]:
        return {
            "family": "qwen2_vl",
            "template": TEMPLATE_VERSION,
            "tokenizer": self.tokenizer.fingerprint,
            "min_pixels": self.vision.min_pixels,
            "max_pixels": self.vision.max_pixels,
            "max_aspect_ratio": f"{self.vision.max_aspect_ratio:g}",
            "max_image_pixels": self.vision.max_image_pixels,
        }

    def measure(self, sample: SourceSample, image_sizes: Sequence[tuple[int, int]]) -> SampleLength:
        grids = tuple(vision.image_grid(h, w, self.vision) for h, w in image_sizes)
        spans = self._layout(sample, grids)
        num_tokens = sum([span.num_tokens for span in spans])
        without_loss = sum([span.loss_from for span in spans])
        if spans[0].loss_from == 0:  # the very first token has nothing to be predicted from
            without_loss += 1
        patches = sum([t * h * w for t, h, w in grids])
        return SampleLength(num_tokens, num_tokens - without_loss, patches, grids)

    def encode(self, sample: SourceSample, images: Sequence[bytes]) -> EncodedSample:
        pixels = [vision.image_patches(image, self.vision) for image in images]
        spans = self._layout(sample, tuple(grid for _, grid in pixels))
        num_tokens = sum(span.num_tokens for span in spans)
        tokens = np.empty(num_tokens, dtype=np.int64)
        labels = np.full(num_tokens, IGNORE_INDEX, dtype=np.int64)
        start = 0
        for span in spans:
            end = start + span.num_tokens
            tokens[start:end] = self.image_token_id if span.grid else span.ids
            labels[start + span.loss_from : end] = tokens[start + span.loss_from : end]
            start = end
        labels[0] = IGNORE_INDEX
        return EncodedSample(
            key=sample.key,
            tokens=tokens,
            labels=labels,
            position_ids=self._position_ids(spans, num_tokens),
            pixel_values=np.concatenate([values for values, _ in pixels])
            if pixels
            else np.empty((0, self.vision.patch_dim), dtype=np.float32),
            image_grid_thw=np.array([grid for _, grid in pixels], dtype=np.int32).reshape(-1, 3),
        )

    def _layout(self, sample: SourceSample, grids: Sequence[Grid]) -> list[_Span]:
        """The sample's tokens as spans, in order."""
        if len(grids) != len(sample.images):
            raise ValueError(f"{len(grids)} images given for the {len(sample.images)} of {sample}")
        check_sample(sample)
        spans: list[_Span] = []
        remaining = iter(grids)
        for piece in chat_templates.render(sample):
            if isinstance(piece, Control):
                spans.append(self._control[piece])
            elif isinstance(piece, Text):
                spans.append(self._text_span(piece.text))
            elif isinstance(piece, Answer):
                ids, loss_from = self.tokenizer.encode_answer(piece.header, piece.text)
                spans.append(_Span(ids, len(ids), loss_from))
            else:
                grid = next(remaining)
                num_tokens = math.prod(grid) // self.vision.merge_size**2
                image = _Span((), num_tokens, num_tokens, grid)
                spans += (self._before_image, image, self._behind_image)
        return spans

    def _text_span(self, text: str) -> _Span:
        """Tokens of a text without loss; those of the template's own words are kept."""
        if len(text) > 64:
            ids = self.tokenizer.encode(text)
            return _Span(ids, len(ids), len(ids))
        span = self._texts.get(text)
        if span is None:
            if len(self._texts) > 4096:
                self._texts.clear()
            ids = self.tokenizer.encode(text)
            span = self._texts[text] = _Span(ids, len(ids), len(ids))
        return span

    def _position_ids(self, spans: Sequence[_Span], num_tokens: int) -> npt.NDArray[np.int64]:
        """(3, S) multimodal rotary positions (M-RoPE, https://arxiv.org/abs/2409.12191, §2.1).

        Text counts up on all three rows. An image's tokens keep one temporal position and take
        their row and column in the merged grid; what follows goes on one above the largest.
        """
        positions = np.empty((3, num_tokens), dtype=np.int64)
        start = next_position = 0
        for span in spans:
            end = start + span.num_tokens
            if span.grid is None:
                positions[:, start:end] = np.arange(next_position, next_position + end - start)
                next_position += end - start
            else:
                t, h, w = span.grid
                shape = (t, h // self.vision.merge_size, w // self.vision.merge_size)
                positions[:, start:end] = np.indices(shape).reshape(3, -1) + next_position
                next_position += max(shape)
            start = end
        return positions


def _check_checkpoint(processor: str) -> None:
    """Refuse a checkpoint whose chat template is not this family's."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(processor, trust_remote_code=False)
    if tokenizer.chat_template:
        chat_templates.check_chat_template(tokenizer, processor)
