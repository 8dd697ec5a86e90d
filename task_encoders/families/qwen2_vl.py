"""Qwen2-VL's sample encoder. `measure` and `encode` share `_layout`, so they cannot disagree."""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from task_encoders.media import image, video
from task_encoders.media.video import VideoSettings
from task_encoders.media.video_file import VideoHeader
from task_encoders.sample_encoder import IGNORE_INDEX, EncodedSample, SampleLength
from task_encoders.samples import SourceSample, check_sample
from task_encoders.text import chat_templates
from task_encoders.text.chat_templates import Answer, Control, Text, Video
from task_encoders.text.tokenizer import BUILTIN, load_tokenizer

Grid = tuple[int, int, int]

#: Raised by one whenever a change alters any sample's tokens, so that old artifacts are refused.
TEMPLATE_VERSION: Final = 1

#: Positions per second of video in every published Qwen2.5-VL checkpoint.
TOKENS_PER_SECOND: Final = 2.0


class _Span(NamedTuple):
    """Consecutive tokens: `ids` with loss from `loss_from` on, or `ids[0]` for all of a medium's
    `grid`, whose steps in time are `interval` positions apart."""

    ids: Sequence[int]
    num_tokens: int
    loss_from: int
    grid: Grid | None = None
    interval: float = 1.0


class _Medium(NamedTuple):
    """What a medium's tokens and positions follow from."""

    grid: Grid
    #: seconds of video in one step of the grid
    seconds: float = 1.0


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
        max_image_pixels: int = image.MAX_IMAGE_PIXELS,
        video: VideoSettings | None = None,
        tokens_per_second: float | None = None,
        text_tokens: tuple[str, ...] = (),
    ) -> None:
        """`tokens_per_second`: positions per second of video, as of Qwen2.5-VL; None: one per step
        of its grid, as of Qwen2-VL. `text_tokens`: see `load_tokenizer`."""
        self.tokenizer = load_tokenizer(processor, text_tokens)
        if processor != BUILTIN:
            _check_checkpoint(processor)
        self.vision = image.VisionSettings(
            min_pixels, max_pixels, max_aspect_ratio, max_image_pixels
        )
        self.video = video or VideoSettings()
        self.tokens_per_second = tokens_per_second
        self.image_token_id = self.tokenizer.special_id("<|image_pad|>")
        self.video_token_id = self.tokenizer.special_id("<|video_pad|>")
        self.pad_token_id = self.tokenizer.special_id("<|endoftext|>")
        self._control = {
            Control(token, labelled): _Span([self.tokenizer.special_id(token)], 1, 1 - labelled)
            for token in ("<|im_start|>", "<|im_end|>")
            for labelled in (False, True)
        }
        self._before_medium = _Span([self.tokenizer.special_id("<|vision_start|>")], 1, 1)
        self._behind_medium = _Span([self.tokenizer.special_id("<|vision_end|>")], 1, 1)
        self._texts: dict[str, _Span] = {}

    @cached_property
    def fingerprint(self) -> Mapping[str, str | int]:
        # `tokens_per_second` is not among it: it decides position_ids, which are made when a pack
        # is read and stand in no artifact. Packs of Qwen2-VL and Qwen2.5-VL are the same.
        return {
            "family": "qwen2_vl",
            "template": TEMPLATE_VERSION,
            "tokenizer": self.tokenizer.fingerprint,
            "min_pixels": self.vision.min_pixels,
            "max_pixels": self.vision.max_pixels,
            "max_aspect_ratio": f"{self.vision.max_aspect_ratio:g}",
            "max_image_pixels": self.vision.max_image_pixels,
            "video_fps": f"{self.video.fps:g}",
            "video_min_frames": self.video.min_frames,
            "video_max_frames": self.video.max_frames,
            "video_min_pixels": self.video.min_pixels,
            "video_max_pixels": self.video.max_pixels,
            "video_max_tokens": self.video.max_tokens or 0,
            "max_video_frames": self.video.max_file_frames,
        }

    def measure(
        self,
        sample: SourceSample,
        image_sizes: Sequence[tuple[int, int]],
        videos: Sequence[VideoHeader] = (),
    ) -> SampleLength:
        grids = tuple(image.image_grid(h, w, self.vision) for h, w in image_sizes)
        video_grids = tuple(video.video_grid(v, self.video, self.vision) for v in videos)
        spans = self._layout(
            sample, [_Medium(grid) for grid in grids], [_Medium(grid) for grid in video_grids]
        )
        num_tokens = sum([span.num_tokens for span in spans])
        without_loss = sum([span.loss_from for span in spans])
        if spans[0].loss_from == 0:  # the very first token has nothing to be predicted from
            without_loss += 1
        all_grids = grids + video_grids
        patches = sum([t * h * w for t, h, w in all_grids])
        return SampleLength(num_tokens, num_tokens - without_loss, patches, all_grids)

    def encode(
        self, sample: SourceSample, images: Sequence[bytes], videos: Sequence[bytes] = ()
    ) -> EncodedSample:
        image_pixels = [image.image_patches(data, self.vision) for data in images]
        video_pixels = [video.video_patches(data, self.video, self.vision) for data in videos]
        image_grids = [grid for _, grid in image_pixels]
        video_media = [_Medium(grid, seconds) for _, grid, seconds in video_pixels]
        spans = self._layout(sample, [_Medium(grid) for grid in image_grids], video_media)
        num_tokens = sum(span.num_tokens for span in spans)
        tokens = np.empty(num_tokens, dtype=np.int64)
        labels = np.full(num_tokens, IGNORE_INDEX, dtype=np.int64)
        start = 0
        for span in spans:
            end = start + span.num_tokens
            tokens[start:end] = span.ids  # a medium's single one is repeated
            labels[start + span.loss_from : end] = tokens[start + span.loss_from : end]
            start = end
        labels[0] = IGNORE_INDEX
        return EncodedSample(
            key=sample.key,
            tokens=tokens,
            labels=labels,
            position_ids=self._position_ids(spans, num_tokens),
            pixel_values=self._concatenate([values for values, _ in image_pixels]),
            image_grid_thw=_grid_array(image_grids),
            pixel_values_videos=self._concatenate([values for values, _, _ in video_pixels]),
            video_grid_thw=_grid_array([medium.grid for medium in video_media]),
        )

    def _concatenate(
        self, pixel_values: Sequence[npt.NDArray[np.float32]]
    ) -> npt.NDArray[np.float32]:
        if not pixel_values:
            return np.empty((0, self.vision.patch_dim), dtype=np.float32)
        return pixel_values[0] if len(pixel_values) == 1 else np.concatenate(pixel_values)

    def _layout(
        self, sample: SourceSample, images: Sequence[_Medium], videos: Sequence[_Medium]
    ) -> list[_Span]:
        """The sample's tokens as spans, in order."""
        if len(images) != len(sample.images) or len(videos) != len(sample.videos):
            raise ValueError(
                f"{len(images)} images and {len(videos)} videos given for the "
                f"{len(sample.images)} and {len(sample.videos)} of {sample}"
            )
        check_sample(sample)
        spans: list[_Span] = []
        next_image, next_video = iter(images), iter(videos)
        for piece in chat_templates.render(sample):
            if isinstance(piece, Control):
                spans.append(self._control[piece])
            elif isinstance(piece, Text):
                spans.append(self._text_span(piece.text))
            elif isinstance(piece, Answer):
                ids, loss_from = self.tokenizer.encode_answer(piece.header, piece.text)
                spans.append(_Span(ids, len(ids), loss_from))
            else:
                is_video = isinstance(piece, Video)
                medium = self._medium_span(next(next_video if is_video else next_image), is_video)
                spans += (self._before_medium, medium, self._behind_medium)
        return spans

    def _medium_span(self, medium: _Medium, is_video: bool) -> _Span:
        num_tokens = math.prod(medium.grid) // self.vision.merge_size**2
        if not is_video:
            return _Span((self.image_token_id,), num_tokens, num_tokens, medium.grid)
        rate = self.tokens_per_second
        interval = 1.0 if rate is None else rate * medium.seconds
        return _Span((self.video_token_id,), num_tokens, num_tokens, medium.grid, interval)

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

        Text counts up on all three rows. An image's or a video's tokens take their place in the
        merged grid: one temporal position per step of a video, or as much time as Qwen2.5-VL says
        (in float32, rounded down). What follows goes on behind the longer side of the grid, as in
        transformers, also where a video's temporal positions reach further.
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
                places = np.indices(shape).reshape(3, -1)
                if span.interval != 1:
                    places[0] = (places[0].astype(np.float32) * np.float32(span.interval)).astype(
                        np.int64
                    )
                positions[:, start:end] = places + next_position
                next_position += max(shape[1:])
            start = end
        return positions


def read_tokens_per_second(processor: str) -> float:
    """Positions per second of video, as the checkpoint's config.json says.

    Published checkpoints have 2, which also stands for a folder without that file.
    """
    if processor == BUILTIN:
        return TOKENS_PER_SECOND
    from transformers import PreTrainedConfig

    try:
        config, _ = PreTrainedConfig.get_config_dict(processor)
    except OSError:
        return TOKENS_PER_SECOND
    return float(config.get("vision_config", {}).get("tokens_per_second", TOKENS_PER_SECOND))


def _grid_array(grids: Sequence[Grid]) -> npt.NDArray[np.int32]:
    """(N, 3)"""
    return np.array(grids, dtype=np.int32).reshape(-1, 3)


def _check_checkpoint(processor: str) -> None:
    """Refuse a checkpoint whose chat template is not this family's."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(processor, trust_remote_code=False)
    if tokenizer.chat_template:
        chat_templates.check_chat_template(tokenizer, processor)
