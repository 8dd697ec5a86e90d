"""Rows made in threads: the same as without, whatever is wrong with their images."""

import io
import multiprocessing
import os
import threading
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from task_encoders.families import build_sample_encoder
from task_encoders.packs.pack import SubSample
from task_encoders.rows.row_encoder import RowEncoder
from task_encoders.samples import SampleError, SourceSample, Turn

THREADS = 2


def jpeg(width: int, height: int) -> bytes:
    rng = np.random.default_rng(width)
    pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG")
    return buffer.getvalue()


def sub_sample(key: str, *images: bytes) -> SubSample:
    names = tuple(f"{number}.jpg" for number in range(len(images)))
    turn = Turn("<image>" * len(images) + "What?", f"It is {key}.")
    return SubSample(key, SourceSample(key, "vqa", (turn,), names), images)


@pytest.fixture(scope="module")
def sub_samples() -> list[SubSample]:
    good = [jpeg(width, 120) for width in (64, 500, 130, 200, 90, 300)]
    return [
        sub_sample("text"),
        sub_sample("one", good[0]),
        sub_sample("first_truncated", good[1][:-2000], good[2]),
        sub_sample("three", *good[1:4]),
        sub_sample("last_truncated", good[4], good[1][:-2000]),
        SubSample("unreadable", SampleError("bad_record", "no answer")),
        sub_sample("long", jpeg(2100, 8)),
        sub_sample("two", *good[4:]),
    ]


class CountingEncoder:
    """A sample encoder that counts the images that are decoded and not yet encoded, and notes the
    threads that do so."""

    def __init__(self) -> None:
        self.encoder: Any = build_sample_encoder(resize="torch")
        self.lock = threading.Lock()
        self.held = self.most = 0
        self.threads: set[threading.Thread] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.encoder, name)

    def _count(self, change: int) -> None:
        with self.lock:
            self.threads.add(threading.current_thread())
            self.held += change
            self.most = max(self.most, self.held)

    def decode_image(self, data: bytes) -> Image.Image:
        self._count(1)
        return self.encoder.decode_image(data)

    def encode(self, *args: Any) -> Any:
        try:
            return self.encoder.encode(*args)
        finally:
            self._count(-1)


def row_encoder(num_threads: int, encoder: Any = None, **options: Any) -> RowEncoder:
    settings: dict[str, Any] = {
        "seq_length": 4096,
        "multiple": 1,
        "pad_to_seq_length": False,
        "cross_sample_attention": False,
        "pixel_transport": "uint8",
        "check_lengths": True,
    }
    encoder = encoder or build_sample_encoder(resize="torch")
    return RowEncoder(encoder=encoder, encode_threads=num_threads, **(settings | options))


@pytest.mark.parametrize("transport", ["float32", "uint8"])
def test_threads_make_the_same_row(sub_samples: list[SubSample], transport: str) -> None:
    one = row_encoder(1, pixel_transport=transport).encode(sub_samples)
    two = row_encoder(THREADS, pixel_transport=transport).encode(sub_samples)
    assert one[1:] == two[1:]
    assert one[1] == ["text", "one", "three", "two"]
    reasons = [line.split(": ")[:2] for line in one[2]]
    assert reasons == [
        ["first_truncated", "truncated_image"],
        ["last_truncated", "truncated_image"],
        ["unreadable", "bad_record"],
        ["long", "aspect_ratio"],
    ]
    for alone, together in zip(one[0].tensors().values(), two[0].tensors().values(), strict=True):
        assert torch.equal(alone, together)


def test_few_decoded_images_are_held() -> None:
    encoder = CountingEncoder()
    many = [sub_sample(str(width), jpeg(width, 120)) for width in range(60, 300, 12)]
    row_encoder(THREADS, encoder).encode(many)
    assert encoder.held == 0
    assert 1 <= encoder.most <= 2 * THREADS


def test_threads_are_kept_from_row_to_row(sub_samples: list[SubSample]) -> None:
    encoder = CountingEncoder()
    for _ in range(4):
        row_encoder(THREADS, encoder).encode(sub_samples)
    assert 1 <= len(encoder.threads) <= THREADS
    assert threading.current_thread() not in encoder.threads


def _tokens(sub_samples: list[SubSample], results: Any) -> None:
    row, *_ = row_encoder(THREADS).encode(sub_samples)
    results.put((os.getpid(), row.tokens.tolist()))


def test_a_forked_process_starts_its_own(sub_samples: list[SubSample]) -> None:
    """As a loader's worker does, after the parent has encoded."""
    row, *_ = row_encoder(THREADS).encode(sub_samples)
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    child = fork.Process(target=_tokens, args=(sub_samples, results))
    child.start()
    assert results.get(timeout=300) == (child.pid, row.tokens.tolist())
    child.join(timeout=300)
    assert child.exitcode == 0
