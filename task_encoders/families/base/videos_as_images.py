"""Models that take a video as images: its steps are pictures among the images of its row."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image as PillowImage

from task_encoders.families.base.encoder import FamilyEncoder
from task_encoders.families.base.spans import Medium
from task_encoders.media.patches import Bytes
from task_encoders.media.video import video_patches
from task_encoders.packs.tokenized import TokenizedText
from task_encoders.sample_encoder import EncodedSample
from task_encoders.samples import SourceSample
from task_encoders.text.pieces import Image, Video


class VideosAsImagesEncoder(FamilyEncoder):
    """Base of the encoders of their families. The patches of a picture are as wide as an image's:
    `normalisation` repeats no frame."""

    def encode_video(self, data: bytes) -> tuple[Bytes, Medium]:
        most = self.options.max_video_frames
        rows, sampled = video_patches(data, self.sample_video, self.vision, most)
        return rows, Medium(sampled.grid, sampled)

    def encode(
        self,
        sample: SourceSample,
        images: Sequence[bytes | PillowImage.Image],
        videos: Sequence[bytes] = (),
        tokenized: TokenizedText | None = None,
    ) -> EncodedSample:
        """The sample with its videos' pictures among its images, in the order of its tokens."""
        encoded = super().encode(sample, images, videos, tokenized)
        if not videos:
            return encoded
        parts = self.parts(sample, tokenized)
        is_video = [isinstance(part, Video) for part in parts if isinstance(part, Image | Video)]
        return _in_order(encoded, is_video)


def _in_order(encoded: EncodedSample, is_video: Sequence[bool]) -> EncodedSample:
    """The sample without videos: the pictures of each are images in its place. `is_video` says of
    all media, in the order of their tokens, which are videos."""
    images = _media(encoded.image_pixels, encoded.image_grid_thw)
    videos = _media(encoded.video_pixels, encoded.video_grid_thw)
    pixels: list[Bytes] = []
    grids: list[list[int]] = []
    for of_video in is_video:
        rows, (steps, height, width) = next(videos if of_video else images)
        pixels.append(rows)
        grids += [[1, height, width]] * steps if of_video else [[steps, height, width]]
    return dataclasses.replace(
        encoded,
        image_pixels=np.concatenate(pixels),
        image_grid_thw=np.array(grids, dtype=np.int32),
        video_pixels=encoded.video_pixels[:0],
        video_grid_thw=encoded.video_grid_thw[:0],
    )


def _media(pixels: Bytes, grids: npt.NDArray[np.int32]) -> Iterator[tuple[Bytes, list[int]]]:
    """The rows and the grid of each image, or of each video."""
    return zip(np.split(pixels, grids.prod(1).cumsum()), grids.tolist(), strict=False)
