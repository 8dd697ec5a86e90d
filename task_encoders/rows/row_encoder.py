"""Sub-samples to a row: each is encoded, and those that can be used are concatenated."""

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import get_args

from task_encoders.concatenate import Map, PackedRow, concatenate
from task_encoders.media.pixel_values import PixelTransport
from task_encoders.rows.sub_samples import SubSample, encode
from task_encoders.sample_encoder import EncodedSample, SampleEncoder
from task_encoders.samples import SampleError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RowEncoder:
    """How rows are made; the fields are those of the task encoder."""

    encoder: SampleEncoder
    seq_length: int
    pad_multiple: int
    pad_to_seq_length: bool
    cross_sample_attention: bool
    pixel_transport: PixelTransport
    encode_threads: int
    check_lengths: bool

    def __post_init__(self) -> None:
        if self.pad_to_seq_length and self.seq_length % self.pad_multiple:
            raise ValueError(
                f"pad_to_seq_length: seq_length {self.seq_length} is not a multiple of "
                f"pad_multiple {self.pad_multiple}; set "
                f"{self.seq_length // self.pad_multiple * self.pad_multiple}"
            )
        if self.pixel_transport not in get_args(PixelTransport):
            raise ValueError(f"pixel_transport {self.pixel_transport!r}: float32 or uint8")
        if self.encode_threads < 1:
            raise ValueError(f"encode_threads {self.encode_threads} must be at least 1")

    def encode(self, sub_samples: Sequence[SubSample]) -> tuple[PackedRow, list[str], list[str]]:
        """The row of all sub-samples that can be used, their keys, and "key: reason: detail" of
        each of the others.

        Raises:
            SampleError: none can be used.
            FatalSampleError: see `sub_samples.encode`.
        """
        with self._mapping() as map_:
            encoded, dropped = self._encode(sub_samples, map_)
            if not encoded:
                raise SampleError("bad_record", f"nothing of it can be used: {'; '.join(dropped)}")
            row = concatenate(
                encoded,
                pad_token_id=self.encoder.pad_token_id,
                pad_multiple=self.pad_multiple,
                pad_to_length=self.seq_length if self.pad_to_seq_length else None,
                cross_sample_attention=self.cross_sample_attention,
                pixel_transport=self.pixel_transport,
                map_=map_,
            )
        return row, [one.key for one in encoded], dropped

    def _encode(
        self, sub_samples: Sequence[SubSample], map_: Map
    ) -> tuple[list[EncodedSample], list[str]]:
        def encode_one(number: int) -> EncodedSample | SampleError:
            try:
                return encode(sub_samples[number], self.encoder, check_length=self.check_lengths)
            except SampleError as error:
                return error

        # Threads end together if the largest begin first.
        order = sorted(range(len(sub_samples)), key=lambda i: -sub_samples[i].num_bytes)
        results = dict(zip(order, map_(encode_one, order), strict=True))
        encoded: list[EncodedSample] = []
        dropped: list[str] = []
        room = self.seq_length
        for number, sub_sample in enumerate(sub_samples):
            result = results[number]
            if not isinstance(result, SampleError):
                padded = -(-len(result.tokens) // self.pad_multiple) * self.pad_multiple
                if padded <= room:
                    room -= padded
                    encoded.append(result)
                    continue
                result = SampleError("overlong", f"{padded} tokens do not fit the {room} left")
            if len(sub_samples) == 1:
                raise result
            dropped.append(f"{sub_sample.key}: {result}")
            logger.warning("dropped from its pack %s", dropped[-1])
        return encoded, dropped

    @contextmanager
    def _mapping(self) -> Iterator[Map]:
        """`map`, or a thread pool's, started for each pack: a loader forks its workers."""
        if self.encode_threads == 1:
            yield map
        else:
            with ThreadPoolExecutor(self.encode_threads) as pool:
                yield pool.map
