"""Rows made in threads, the same as without, whatever is wrong with their images; and samples that
begin alike, as a trunk and branches of one row."""

import json
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.energon.errors import FatalSampleError

from task_encoders.concatenate import PackedRow, concatenate, merge_rows, split_row
from task_encoders.energon_samples import empty_batch
from task_encoders.families import build_sample_encoder
from task_encoders.model_inputs import pad_batch, to_packed_seq_params, to_transformers_kwargs
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.packs.pack import Pack, PackFormatError, SubSample, sub_samples_of_pack
from task_encoders.packs.pack_format import PackedSubSample, Tree, media_part_names, pack_json
from task_encoders.rows.encoded_rows import SetAside
from task_encoders.rows.row_encoder import RowEncoder
from task_encoders.rows.trees import as_tree
from task_encoders.sample_encoder import EncodedSample
from task_encoders.samples import SampleError, SourceSample, Turn
from task_encoders.settings import PackingSettings
from tests.helpers.datasets import image_bytes
from tests.helpers.texts_and_images import random_image
from tests.helpers.tiny_checkpoints import NORMALISATION

THREADS = 2


def sub_sample(key: str, *images: bytes) -> SubSample:
    names = tuple(f"{number}.jpg" for number in range(len(images)))
    turn = Turn("<image>" * len(images) + "What?", f"It is {key}.")
    return SubSample(key, SourceSample(key, "vqa", (turn,), names), images)


@pytest.fixture(scope="module")
def sub_samples() -> list[SubSample]:
    good = [image_bytes(width, 120) for width in (64, 500, 130, 200, 90, 300)]
    return [
        sub_sample("text"),
        sub_sample("one", good[0]),
        sub_sample("first_truncated", good[1][:-2000], good[2]),
        sub_sample("three", *good[1:4]),
        sub_sample("last_truncated", good[4], good[1][:-2000]),
        SubSample("unreadable", SampleError("bad_record", "no answer")),
        sub_sample("long", image_bytes(2100, 8)),
        sub_sample("two", *good[4:]),
    ]


def task_encoder(**options: Any) -> PackedTaskEncoder:
    settings = PackingSettings(packed=True, vqa=True)
    options = {"min_pixels": 784, "max_pixels": 50_000, "seq_length": 2048, **options}
    return PackedTaskEncoder(settings=settings, family="qwen2_vl", processor="builtin", **options)


def row_encoder(num_threads: int) -> RowEncoder:
    return task_encoder(encode_threads=num_threads)._rows


def test_threads_make_the_same_row(sub_samples: list[SubSample]) -> None:
    one, two = (row_encoder(threads).encode(sub_samples) for threads in (1, THREADS))
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


def test_few_images_are_held_and_threads_are_kept_from_row_to_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoder, lock = row_encoder(1).encoder, threading.Lock()
    threads, held = set[threading.Thread](), [0]

    def count(name: str, change: int) -> None:
        run = getattr(encoder, name)

        def counted(*given: Any) -> Any:
            with lock:
                threads.add(threading.current_thread())
                held.append(held[-1] + change)
            return run(*given)

        monkeypatch.setattr(encoder, name, counted)

    count("decode_image", 1)
    count("encode", -1)
    many = [sub_sample(str(width), image_bytes(width, 120)) for width in range(60, 300, 12)]
    for _ in range(3):
        replace(row_encoder(THREADS), encoder=encoder).encode(many)
    assert held[-1] == 0
    assert 1 <= max(held) <= 2 * THREADS
    assert 1 <= len(threads) <= THREADS
    assert threading.current_thread() not in threads


def test_a_forked_process_starts_its_own(sub_samples: list[SubSample]) -> None:
    """As a loader's worker does, after the parent has encoded."""
    row, *_ = row_encoder(THREADS).encode(sub_samples)
    child = os.fork()
    if not child:
        signal.alarm(300)
        again = None
        try:
            again, *_ = row_encoder(THREADS).encode(sub_samples)
        finally:
            os._exit(again is None or not torch.equal(again.tokens, row.tokens))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


SHARED = 6


def sample(number: int, length: int, images: int = 1) -> EncodedSample:
    """A sample whose first `SHARED` tokens, and its first image of 8 patches, all have."""
    rng, common = np.random.default_rng(number), np.random.default_rng(99)
    tokens = np.append(common.integers(0, 100, SHARED), rng.integers(0, 100, length - SHARED))
    weights = np.ones(length, np.float32)
    weights[: SHARED + 1] = 0
    pixels = [common.integers(0, 256, (8, 12), dtype=np.uint8)]
    pixels += [rng.integers(0, 256, (4, 12), dtype=np.uint8) for _ in range(images - 1)]
    grids = [[1, 2, 4], *[[1, 2, 2]] * (images - 1)]
    return EncodedSample(
        key=str(number),
        tokens=tokens,
        loss_weights=weights,
        position_ids=np.tile(np.arange(length), (3, 1)),
        image_pixels=np.concatenate(pixels),
        image_grid_thw=np.array(grids, np.int32),
        video_pixels=np.empty((0, 24), np.uint8),
        video_grid_thw=np.empty((0, 3), np.int32),
        normalisation=NORMALISATION,
    )


SAMPLES = [sample(0, 9), sample(1, 8, images=3), sample(2, 14, images=2)]
ALONE = replace(sample(7, 5 + SHARED), key="alone")


def row(multiple: int = 1, pad_to_length: int | None = None) -> PackedRow:
    segments = [ALONE, *as_tree(SAMPLES, SHARED, 1, 0, {}), ALONE]
    parents = [-1, -1, 1, 1, 1, -1]
    return concatenate(
        segments, pad_token_id=0, parents=parents, multiple=multiple, pad_to_length=pad_to_length
    )


def same(found: PackedRow, expected: PackedRow) -> None:
    for name in ("tokens", "loss_weights", "position_ids", "pixel_values", "image_grid_thw"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert found.media_counts.tolist() == expected.media_counts.tolist()


def test_each_token_and_picture_stands_once() -> None:
    """Of a tree; and it is padded as a whole."""
    found = row()
    assert found.cu_lengths.diff().tolist() == [11, 6, 3, 2, 8, 11]
    assert found.parents.tolist() == [-1, -1, 1, 1, 1, -1]
    assert found.media_counts[:, 0].tolist() == [1, 1, 0, 2, 1, 1]
    assert len(found.pixel_values) == 8 * 3 + 4 * 3
    assert found.position_ids[0, 17:20].tolist() == [6, 7, 8]
    padded = row(multiple=8)
    assert padded.cu_lengths.diff().tolist() == [16, 6, 3, 2, 13, 16]
    assert int(padded.attn_mask.sum()) == 5 + 5 + 5


@pytest.mark.parametrize("multiple", [1, 8])
def test_a_row_gives_back_its_samples(multiple: int) -> None:
    given = [ALONE, *SAMPLES, ALONE]
    found = split_row(merge_rows([row(multiple, 80), row()]))
    assert len(found) == 2 * len(given)
    for part, one in zip(found, [*given, *given], strict=True):
        same(split_row(part)[0], part)
        real = ~part.attn_mask
        own = {name: getattr(part, name)[..., real] for name in ("tokens", "loss_weights")}
        same(
            replace(part, **own, position_ids=part.position_ids[:, real]),
            concatenate([one], pad_token_id=0),
        )


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("tokens", lambda all_tokens: all_tokens + 1, "does not begin as"),
        ("tokens", lambda all_tokens: all_tokens[:SHARED], "does not begin as"),
        ("position_ids", lambda positions: positions + 1, "does not begin as"),
        ("image_grid_thw", lambda grids: grids[:, ::-1], "does not begin as"),
        ("image_pixels", lambda pixels: pixels + 1, "does not begin as"),
        ("loss_weights", np.ones_like, "has loss in the"),
        ("loss_weights", lambda weights: np.eye(1, len(weights), SHARED)[0], "has loss in the"),
    ],
)
def test_what_is_not_shared_is_refused(
    name: str, change: Callable[[Any], Any], message: str
) -> None:
    other = replace(SAMPLES[1], **{name: change(getattr(SAMPLES[1], name))})
    with pytest.raises(ValueError, match=message):
        as_tree([SAMPLES[0], other], SHARED, 1, 0, {})
    with pytest.raises(ValueError, match="a trunk of 0 tokens"):
        as_tree(SAMPLES, 0, 0, 0, {})


@pytest.mark.parametrize(
    "parents",
    [
        [-1, -1, 1, 1, 1, 9],
        [-1, -1, 1, 1, 1, -2],
        [0, -1, 1, 1, 1, -1],
        [-1, 2, -1, -1, -1, -1],
        [-1, 0, 1, -1, -1, -1],
        [-1, -1, 1, 1, 1],
        [-1, -1, 1, 1, 1, -1, -1],
    ],
)
def test_parents_that_are_no_trunks_are_refused(parents: list[int]) -> None:
    segments, message = [ALONE, *as_tree(SAMPLES, SHARED, 1, 0, {}), ALONE], "are not trunks that"
    with pytest.raises(ValueError, match=message):
        concatenate(segments, pad_token_id=0, parents=parents)
    bad = replace(row(), parents=torch.tensor(parents, dtype=torch.int32))
    for read in (split_row, lambda one: merge_rows([row(), one])):
        with pytest.raises(ValueError, match=message):
            read(bad)


def test_whoever_knows_no_trees_refuses_them() -> None:
    batch = pad_batch(replace(empty_batch(3, 8), cu_lengths=torch.tensor([[0, 5, 8]])), 12, 0)
    to_packed_seq_params(batch)
    batch = replace(batch, parents=torch.tensor([[-1, 0, -1]], dtype=torch.int32))
    assert pad_batch(batch, 16, 0).parents.tolist() == [[-1, 0, -1, -1]]
    for give in (to_packed_seq_params, to_transformers_kwargs):
        with pytest.raises(ValueError, match="the row holds samples that share prefixes"):
            give(batch)
    assert to_packed_seq_params(batch, trees=True) is not None


def pack(*sizes: int, bad: Sequence[int] = ()) -> Pack:
    """Questions on pictures, `sizes[i]` on picture i as a tree; those in `bad` have no answer."""
    rng = np.random.default_rng(0)
    subs, trees, media = [], [], []
    for number, size in enumerate(sizes):
        first = len(subs)
        media.append(random_image(rng, 90 + 10 * number, 60))
        for _ in range(size):
            own = len(subs)
            answer = "" if own in bad else f"It is {own}."
            turn = Turn(f"What is {own}?" * (own % 3 + 1), answer)
            sample = SourceSample(f"s{own}", "vqa", (turn,), ("a",))
            subs.append(PackedSubSample(sample, ("png",) if own == first else (), 0))
        if size > 1:
            trees.append(Tree(first, size, shared_tokens(media[-1]), 1, 0))
    record = json.loads(pack_json(subs, "vqa", trees=trees, media=media))
    del record["meta"]["num_tokens"]
    names = media_part_names(["png"] * len(media))
    return Pack("p", record, dict(zip(names, media, strict=True)))


ENCODER = build_sample_encoder("qwen2_vl", "builtin", min_pixels=784, max_pixels=50_000)


def shared_tokens(image: bytes) -> int:
    """Number of tokens up to the end of this picture, in any sample that begins with it."""
    sample = SourceSample("any", "vqa", (Turn("What?", "This."),), ("a",))
    tokens = ENCODER.encode(sample, [image]).tokens
    return int(np.flatnonzero(tokens == ENCODER.media_token_ids["image_token_id"])[-1]) + 2


@pytest.mark.parametrize("threads", [1, 3])
def test_a_pack_of_trees(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each picture is decoded once, and encoded once."""
    given = pack(3, 1, 2)
    assert list(given.media) == ["img000.png", "img001.png", "img002.png"]
    encoder, seen = task_encoder(trees=True, encode_threads=threads), list[Any]()
    for name in ("encode_image", "decode_image"):
        run = getattr(encoder.encoder, name)
        counted = lambda medium, run=run: (seen.append(medium), run(medium))[1]  # noqa: E731
        monkeypatch.setattr(encoder.encoder, name, counted)
    found = encoder.encode_pack(given)
    decoded = [one for one in seen if isinstance(one, bytes)]
    assert sorted(decoded) == sorted(given.media.values())
    widths = sorted(one.width for one in seen if not isinstance(one, bytes))
    assert widths == [90, 100, 110]
    assert found.row.parents.tolist() == [-1, 0, 0, 0, -1, -1, 5, 5]
    assert found.sub_sample_keys == [f"s{i}" for i in range(6)]
    samples = sub_samples_of_pack(given, "vqa")
    for part, one in zip(split_row(found.row), samples, strict=True):
        same(part, concatenate([ENCODER.encode(one.sample, one.images)], pad_token_id=0))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("bad", "parents", "images"),
    [
        ([0, 4], [-1, 0, 0, -1, 3], [1, 0, 0, 1, 0]),
        ([1], [-1, 0, 0, -1, 3, 3], [1, 0, 0, 1, 0, 0]),
        ([0, 1, 3, 4], [-1, 0], [1, 0]),
    ],
)
def test_a_branch_that_cannot_be_used_is_left_out_alone(
    bad: list[int], parents: list[int], images: list[int], threads: int
) -> None:
    found = task_encoder(trees=True, encode_threads=threads).encode_pack(pack(3, 2, bad=bad))
    assert found.sub_sample_keys == [f"s{i}" for i in range(5) if i not in bad]
    assert [line.partition(":")[0] for line in found.dropped] == [f"s{i}" for i in bad]
    assert found.row.parents.tolist() == parents
    assert found.row.media_counts[:, 0].tolist() == images


@pytest.mark.parametrize(
    "trees",
    [[[0, 3, 5, 1, 0]], [[1, 1]], "x", [[1, 1, 5, 1, 0], [0, 2, 5, 1, 0]], [[0, 2, 0, 0, 0]]],
)
def test_trees_that_are_not_of_the_pack(trees: Any) -> None:
    given = pack(2)
    given.record["meta"]["trees"] = trees
    with pytest.raises(PackFormatError, match="trees"):
        task_encoder(trees=True).encode_pack(given)


def test_trees_that_do_not_begin_alike_end_the_run() -> None:
    given = pack(2)
    given.record["meta"]["trees"][0][2] += 6  # their questions differ
    with pytest.raises(FatalSampleError, match=r"'s1' does not begin as 's0' does; give the task"):
        task_encoder(trees=True).encode_pack(given)


@pytest.mark.parametrize(("tokens", "images"), [(-3, 1), (-2, 1), (0, 0), (None, 1), (0, 2)])
def test_a_tree_cut_inside_its_picture_ends_the_run(tokens: int | None, images: int) -> None:
    """Its trunk has other tokens of pictures than its grids say; None: it ends before any."""
    given = pack(2)
    tree = given.record["meta"]["trees"][0]
    tree[2:4] = 3 if tokens is None else tree[2] + tokens, images
    with pytest.raises(FatalSampleError, match=r"of sample 's0' do not end after .* [012] images"):
        task_encoder(trees=True).encode_pack(given)


def test_errors_of_no_sample_go_to_the_loaders_own_handler() -> None:
    told: list[Exception] = []
    aside = SetAside(lambda error, *_: told.append(error))
    errors = SampleError("bad_image", "cut"), PackFormatError("no turns"), RuntimeError("a bug")
    for error in errors:
        aside(error, {"__key__": "ps_0"}, None)
    assert told == [errors[2]]
    assert aside.lines[:2] == ["ps_0: bad_image: cut", "ps_0: bad_record: no turns"]
