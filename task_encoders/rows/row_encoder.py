"""Sub-samples as a row: each is encoded, and the usable ones are concatenated."""

import io
import itertools
import logging
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Final

import numpy as np
from megatron.energon.errors import FatalSampleError
from PIL import Image

from task_encoders.concatenate import PackedRow, concatenate
from task_encoders.families.base.family import FamilyEncoder
from task_encoders.media.patches import PixelTransport
from task_encoders.media.video_file import MissingPyAVError
from task_encoders.packs.pack import SubSample
from task_encoders.packs.pack_format import Tree
from task_encoders.rows.trees import as_tree
from task_encoders.sample_encoder import EncodedMedium, EncodedSample, SampleLength
from task_encoders.samples import SampleError
from task_encoders.samples.medium_options import MediumOptions
from task_encoders.threads import map_in, result_of, submit

logger = logging.getLogger(__name__)

#: Sub-samples, each with one decoded image. With more, threads wait hardly less.
_BEGUN_PER_THREAD: Final = 2

_AS_MEASURED: Final = (
    "give the task encoder the processor and pixel limits of the folder's manifest.json"
)


@dataclass(frozen=True, slots=True)
class RowEncoder:
    """Options of rows; the fields are those of the task encoder."""

    encoder: FamilyEncoder
    seq_length: int
    multiple: int
    pad_to_seq_length: bool
    cross_sample_attention: bool
    pixel_transport: PixelTransport
    encode_threads: int
    check_lengths: bool

    def __post_init__(self) -> None:
        if self.multiple > self.seq_length:
            raise ValueError(
                f"pad_multiple is {self.multiple}; it must be at most seq_length "
                f"{self.seq_length}, or no sample fits a pack"
            )
        if self.pad_to_seq_length and self.seq_length % self.multiple:
            raise ValueError(
                f"pad_to_seq_length: seq_length {self.seq_length} is not a multiple of "
                f"pad_multiple {self.multiple}; set "
                f"{self.seq_length // self.multiple * self.multiple}"
            )

    def encode(self, sub_samples: Sequence[SubSample]) -> tuple[PackedRow, list[str], list[str]]:
        """Encode all usable sub-samples to a row; return it with their keys, and "key: reason:
        detail" of each unusable one.

        Raises:
            SampleError: none can be used.
            FatalSampleError: see `_encode_one`; or sub-samples of a tree do not begin alike.
        """
        by_tree = itertools.groupby(sub_samples, key=lambda one: one.tree or object())
        groups = [list(group) for _, group in by_tree]
        pool = _threads(self.encode_threads) if self.encode_threads > 1 else None
        each = self._in_threads(groups, pool) if pool else map(self._encode_group, groups)
        encoded: list[EncodedSample] = []
        parents: list[int] = []
        keys: list[str] = []
        dropped: list[str] = []
        room = self.seq_length
        for group, results in zip(groups, each, strict=True):
            usable = [one for one in results if not isinstance(one, SampleError)]
            segments, tree = usable, group[0].tree
            if tree is not None and usable:
                media = self._media_of(tree, usable[0])
                try:
                    ids = self.encoder.media_token_ids
                    segments = as_tree(usable, tree.num_tokens, *media, ids)
                except ValueError as differs:
                    raise FatalSampleError(f"{differs}; {_AS_MEASURED}") from differs
            padded = -(-sum(len(one.tokens) for one in segments) // self.multiple) * self.multiple
            fits = padded <= room
            if fits and segments:
                parents += [-1] + [len(encoded)] * (len(segments) - 1)
                encoded += segments
                keys += [one.key for one in usable]
                room -= padded
            for sub_sample, error in zip(group, results, strict=True):
                if not isinstance(error, SampleError):
                    if fits:
                        continue
                    error = SampleError("overlong", f"{padded} tokens do not fit the {room} left")
                if len(sub_samples) == 1:
                    raise error
                dropped.append(f"{sub_sample.key}: {error}")
                logger.warning("dropped from its pack %s", dropped[-1])
        if not encoded:
            raise SampleError("bad_record", f"nothing of it can be used: {'; '.join(dropped)}")
        row = concatenate(
            encoded,
            parents=parents if max(parents) >= 0 else None,
            pad_token_id=self.encoder.pad_token_id,
            multiple=self.multiple,
            pad_to_length=self.seq_length if self.pad_to_seq_length else None,
            cross_sample_attention=self.cross_sample_attention,
            pixel_transport=self.pixel_transport,
            map_=partial(map_in, pool) if pool else map,
        )
        return row, keys, dropped

    def _media_of(self, tree: Tree, sample: EncodedSample) -> tuple[int, int]:
        """Count images and videos of the trunk among the arrays of a sample, in which the steps of
        a video may be pictures."""
        if not tree.num_videos or len(sample.video_grid_thw):
            return tree.num_images, tree.num_videos
        shared = sample.tokens[: tree.num_tokens] == self.encoder.media_token_ids["image_token_id"]
        return int(np.count_nonzero(np.diff(shared.astype(np.int8), prepend=0) > 0)), 0

    def _in_threads(
        self, groups: Sequence[Sequence[SubSample]], pool: ThreadPoolExecutor
    ) -> Iterator[list[EncodedSample | SampleError]]:
        """Encode each group in two tasks that never wait: decoding an image, then the rest, queued
        after the decoding of other images. The largest begin first, so that threads end
        together."""

        def begin(group: Sequence[SubSample]) -> Future[list[EncodedSample | SampleError]]:
            first: list[Image.Image] = []
            with suppress(SampleError):  # encoding it raises the same
                first += map(self.encoder.decode_image, group[0].images[:1])
            return submit(pool, self._encode_group, group, first)

        sizes = [-sum(map(len, one.images + one.videos)) for (one, *_) in groups]
        order = sorted(range(len(groups)), key=sizes.__getitem__)
        begun: deque[Future[Future[list[EncodedSample | SampleError]]]] = deque()
        ended: list[list[EncodedSample | SampleError]] = []
        for number in order:
            if len(begun) == _BEGUN_PER_THREAD * self.encode_threads:
                ended.append(result_of(result_of(begun.popleft())))
            begun.append(submit(pool, begin, groups[number]))
        ended += (result_of(result_of(one)) for one in begun)
        results = dict(zip(order, ended, strict=True))
        return (results[number] for number in range(len(order)))

    def _encode_group(
        self, group: Sequence[SubSample], decoded: Sequence[Image.Image] = ()
    ) -> list[EncodedSample | SampleError]:
        """Encode each sub-sample of a tree, or one alone; in the place of one that cannot be used
        is the reason. Media that they share are encoded once. `decoded`: the first images of the
        first."""
        #: by the identity of their bytes, and their options
        known: dict[tuple[int, MediumOptions], EncodedMedium] = {}
        each = ((one, () if number else decoded) for number, one in enumerate(group))
        return [self._encode_one(*one, known) for one in each]

    def _encode_one(
        self,
        sub_sample: SubSample,
        decoded: Sequence[Image.Image],
        known: dict[tuple[int, MediumOptions], EncodedMedium],
    ) -> EncodedSample | SampleError:
        """Encode a sub-sample, whose first images may be decoded already, or return why it cannot
        be used. `known`: media of its tree that are encoded.

        Raises:
            FatalSampleError: PyAV is missing; or its length is not the one stored in its pack.
        """
        key, sample, images, videos, measured, _ = sub_sample
        if isinstance(sample, SampleError):
            return sample
        media: list[EncodedMedium] = []
        try:
            files = zip(images + videos, sample.media_options, strict=True)
            for number, (data, options) in enumerate(files):
                encoder, own = self.encoder.for_medium(options), (id(data), options)
                if own not in known and number >= len(images):
                    known[own] = encoder.encode_video(data)
                elif own not in known:
                    is_decoded = number < len(decoded)
                    known[own] = encoder.encode_image(
                        decoded[number] if is_decoded else encoder.decode_image(data)
                    )
                media.append(known[own])
            encoded = self.encoder.encode(sample, media[: len(images)], media[len(images) :])
        except SampleError as error:
            return error
        except MissingPyAVError as error:
            raise FatalSampleError(str(error)) from error
        if self.check_lengths and measured not in (None, len(encoded.tokens)):
            raise FatalSampleError(
                f"sub-sample {key!r} has {len(encoded.tokens)} tokens but was measured with "
                f"{measured}; {_AS_MEASURED}"
            )
        return encoded


def measure(sub_sample: SubSample, encoder: FamilyEncoder) -> SampleLength:
    """Measure a sub-sample from the headers of its media. Raises SampleError, FatalSampleError."""
    if isinstance(sub_sample.sample, SampleError):
        raise sub_sample.sample
    headers = [encoder.image_header(io.BytesIO(image)) for image in sub_sample.images]
    try:
        videos = [encoder.video_header(io.BytesIO(video)) for video in sub_sample.videos]
    except MissingPyAVError as error:
        raise FatalSampleError(str(error)) from error
    sizes = [(header.height, header.width) for header in headers]
    return encoder.measure(sub_sample.sample, sizes, videos)


@cache
def _threads(number: int) -> ThreadPoolExecutor:
    """Return the thread pool, kept for all rows: new threads wait for page faults of new memory."""
    return ThreadPoolExecutor(number)


# Threads do not survive a fork, by which a loader starts its workers.
os.register_at_fork(after_in_child=_threads.cache_clear)
