"""InternVL3 and 3.5, as transformers has them: an image is tiles of one size, and a thumbnail; a
video is frames, each a tile.

an image of 2 tiles   <img> [tile] [tile] [thumbnail] </img>     of 256 tokens each
a video of 2 frames   Frame1: <img> [tile] </img>\\n Frame2: <img> [tile] </img>
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, ClassVar, Final, Self

import numpy as np
from PIL import Image as PillowImage
from pydantic import model_validator

from task_encoders.families.base.cost import ModelCost, TransformerShape
from task_encoders.families.base.family import (
    TINY,
    TINY_TOWER,
    Family,
    FamilyEncoder,
    Preset,
    ResizedOptions,
)
from task_encoders.families.base.spans import BlankImage, Medium, Span
from task_encoders.field_types import Count
from task_encoders.media.image import VisionSettings
from task_encoders.media.patches import Bytes
from task_encoders.media.video import SampledVideo
from task_encoders.media.video_file import VideoHeader
from task_encoders.samples import SampleError, SourceSample
from task_encoders.text.pieces import CHATML, Control, Dialect, Fixed, Image, Piece, Text, Video

#: Side of the square of patches that becomes a token.
_MERGE: Final = 2

#: Before each frame of a video; the others' follow a newline.
_LABEL: Final = "Frame{}: "

#: From published checkpoints in transformers' form.
INTERNVL_TEMPLATE: Final = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}{{ '<IMG_CONTEXT>\n' }}"
    "{% elif content['type'] == 'video' %}{{ '<video>\n' }}"
    "{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{'<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n' }}{% endif %}"
)
_DIALECT: Final = Dialect(
    CHATML.controls.pattern, CHATML.answers.pattern, {"<IMG_CONTEXT>": Image(), "<video>": Video()}
)


class InternVL3Options(ResizedOptions):
    """Tiles of published checkpoints."""

    #: side of an image, or of its tiles, in pixels
    image_size: Count = 448
    #: side of a patch in pixels
    patch_size: Count = 14
    #: fewest tiles of an image
    min_tiles: Count = 1
    #: most tiles of an image, besides the thumbnail of one that has several
    max_tiles: Count = 12
    #: frames taken from a video: the middle one of each of this number of equal parts
    video_num_frames: Count = 8

    @model_validator(mode="after")
    def _check_tiles(self) -> Self:
        if self.min_tiles > self.max_tiles:
            raise ValueError(f"min_tiles {self.min_tiles} > max_tiles {self.max_tiles}; lower it")
        if self.image_size % (_MERGE * self.patch_size):
            raise ValueError(
                f"image_size {self.image_size} is not a multiple of {_MERGE * self.patch_size}, "
                "the side of a token"
            )
        return self


class InternVL3Encoder(FamilyEncoder):
    """Patches of each tile row by row; a tile, or a frame, is a step of the grid."""

    LENGTHS_OF = "internvl3"
    POSITION_ROWS = 1
    IMAGE_LAYOUT = "tiles"
    VIDEOS_AS_IMAGES = True
    MEDIA_TOKENS: ClassVar = {"image_token_id": "<IMG_CONTEXT>"}
    PAD_TOKEN = "<|endoftext|>"
    TEMPLATE = INTERNVL_TEMPLATE
    DIALECT = _DIALECT
    CAPTION_END = Control("<|im_end|>", 1.0)
    AROUND_PICTURE = ("<img>", "</img>")

    options: InternVL3Options

    def __init__(self, options: InternVL3Options) -> None:
        self._side = options.image_size // options.patch_size
        vision = VisionSettings(
            patch_size=options.patch_size,
            temporal_patch_size=1,
            merge_size=self._side,  # patches are cut tile by tile
            mean=(0.485, 0.456, 0.406),
            std=(0.229, 0.224, 0.225),
            resize=options.resize,
        )
        super().__init__(options, vision)

    def _tiles(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of tiles whose aspect ratio is closest to the image's. Of
        equal ones those with most tiles win, unless their area is more than twice the image's."""
        found, least = (1, 1), math.inf
        for columns, rows in _arrangements(self.options.min_tiles, self.options.max_tiles):
            difference = abs(width / height - columns / rows)
            half_full = 0.5 * self.options.image_size**2 * columns * rows
            if difference < least or (difference == least and width * height > half_full):
                found, least = (rows, columns), difference
        return found

    def image_medium(self, height: int, width: int) -> Medium:
        rows, columns = self._tiles(height, width)
        num_tiles = rows * columns
        return Medium((num_tiles + (num_tiles > 1), self._side, self._side))

    def encode_image(self, image: PillowImage.Image) -> tuple[Bytes, Medium]:
        rows, columns = self._tiles(image.height, image.width)
        grids = [(1, rows * self._side, columns * self._side)]
        if rows * columns > 1:
            grids.append((1, self._side, self._side))
        cut = [self.cut([image], grid, 1) for grid in grids]
        return np.concatenate(cut), self.image_medium(image.height, image.width)

    def sample_video(self, header: VideoHeader) -> SampledVideo:
        # In integers, see media.video.sampled_frames: transformers' float32 gives neighbours of
        # some frames in very long videos.
        total, wanted = header.num_frames, self.options.video_num_frames
        if total < wanted:
            raise SampleError("bad_video", f"{total} frames < video_num_frames {wanted}")
        frames = [(2 * i + 1) * total // (2 * wanted) for i in range(wanted)]
        return SampledVideo((wanted, self._side, self._side), frames, 1.0, header.fps)

    def render(self, sample: SourceSample, weights: Sequence[float]) -> Iterable[Piece]:
        pieces = super().render(sample, weights)
        return _with_first_labels(pieces) if sample.videos else pieces

    def medium_spans(self, medium: Medium) -> Iterator[Span]:
        steps, height, width = medium.grid
        num_pictures, num_tiles = (1, steps) if medium.video is None else (steps, 1)
        num_tokens = num_tiles * (height // _MERGE) * (width // _MERGE)
        tokens = Span((self.image_token_id,), num_tokens)
        before, after = self._around
        for i in range(num_pictures):
            if i > 0:
                yield from self.texts.spans(Text("\n" + _LABEL.format(i + 1)))
            yield from (before, tokens, after)

    @staticmethod
    def blank_image(hf_config: Any) -> BlankImage:
        patch = hf_config.vision_config.patch_size[0]
        side = hf_config.vision_config.image_size[0] // patch
        num_tokens = int(side * hf_config.downsample_ratio) ** 2
        return BlankImage((side**2, 3 * patch**2), (1, side, side), num_tokens)


def _with_first_labels(pieces: Iterable[Piece]) -> list[Piece]:
    """Put the label of its first frame in front of each video. The label is joined to the text
    before it, since they are tokenized together."""
    labelled: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, Fixed):
            labelled += piece.pieces
            continue
        if isinstance(piece, Video):
            last = labelled[-1] if labelled else None
            if isinstance(last, Text):
                labelled[-1] = Text(last.text + _LABEL.format(1))
            else:
                labelled.append(Text(_LABEL.format(1)))
        labelled.append(piece)
    return labelled


@cache
def _arrangements(least: int, most: int) -> list[tuple[int, int]]:
    """Return the columns and rows of grids of `least` to `most` tiles, the fewest tiles first."""
    sides = range(1, most + 1)
    found = [(columns, rows) for columns in sides for rows in sides]
    return sorted([one for one in found if least <= math.prod(one) <= most], key=math.prod)


INTERNVL3: Final = Family(
    "internvl3",
    InternVL3Options,
    InternVL3Encoder,
    ModelCost(
        "InternVL3-8B",
        TransformerShape(3584, 28, 18_944, kv_share=1 / 7, query_size=3584),
        TransformerShape(1024, 24, 4096, ffn_matrices=2, causal=False),
        head=3584 * 151_674,
        merger=6_881_280.0,
    ),
    "InternVL",
    other_names=("internvl",),
    tensor_names="llava",
    tiny=Preset(
        {**TINY, "model_type": "qwen2", "vocab_size": 151_674},
        {**TINY_TOWER, "model_type": "internvl_vision"},
        {"image_token_id": 151_667, "tie_word_embeddings": False},
    ),
    megatron_core=True,
)
