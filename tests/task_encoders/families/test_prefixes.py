"""Beginnings that samples share, of every family."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import orjson
import pytest
import torch

from task_encoders.concatenate import concatenate, split_row
from task_encoders.families.base.family import FamilyEncoder
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.packs.pack import Pack, SubSample, sub_samples_of_pack
from task_encoders.packs.pack_format import PackedSubSample, Tree, media_part_names, pack_json
from task_encoders.rows.row_encoder import measure
from task_encoders.sample_encoder import Prefix
from task_encoders.samples import SourceSample, Turn
from task_encoders.settings import PackingSettings
from tests.helpers.texts_and_images import random_image
from tests.helpers.tiny_families import CLIP, STILL, encoder_of, encoder_options

SIZE = 70, 100
IMAGE, OTHER = (random_image(np.random.default_rng(i), *SIZE[::-1]) for i in range(2))


@functools.cache
def task_encoder(folder: Path) -> PackedTaskEncoder:
    options = {"seq_length": 4096, **encoder_options(folder.name), "family": folder.name}
    return PackedTaskEncoder(processor=str(folder), trees=True, **options)


def prefix_of(encoder: FamilyEncoder, *turns: str, images: int = 1) -> Prefix | None:
    """The prefix of a dialogue of these prompts."""
    said = tuple(Turn(prompt, f"Answer {i}") for i, prompt in enumerate(turns))
    sample = SourceSample("s", "bmr", said, tuple("ab"[:images]))
    return encoder.measure(sample, [SIZE] * images).prefix


def ids_of(prefix: Prefix) -> bytes:
    return orjson.dumps([tuple(span) for span in prefix.spans], option=orjson.OPT_SERIALIZE_NUMPY)


def test_leading_media(folder: Path) -> None:
    encoder = encoder_of(folder)
    one = prefix_of(encoder, "<image>\nWhat?")
    assert one is not None
    assert one[2:] == (1, 0)
    for prompt in ("<image>Why so?", "<image>\nWhat is this?", "<image>\nWhat?\nAnd why?"):
        same = prefix_of(encoder, prompt)
        assert same is not None
        assert same[1:] == one[1:]
        assert ids_of(same) == ids_of(one)
    assert prefix_of(encoder, "No picture?", images=0) is None
    behind = prefix_of(encoder, "What?<image>")
    assert behind is not None
    in_front = folder.name in ("llava_1_5", "mistral3")  # by the template
    assert (behind.num_tokens > one.num_tokens) != in_front
    two = prefix_of(encoder, "<image>\n<image>\nWhich?", images=2)
    assert two is not None
    assert two.num_images == 2
    for prompts, count in (
        (["<image>Or:<image>"], 1 + (folder.name == "llava_1_5")),
        (["<image>\nWhat?", "And<image>?"], 1),
    ):
        apart = prefix_of(encoder, *prompts, images=2)
        assert apart is not None
        assert apart.num_images == count
    assert prefix_of(encoder, "Hello.", "<image>What?") is None  # after a trained answer


def as_pack(subs: Sequence[SubSample], tree: Tree, task: str) -> Pack:
    """A pack of one tree, between two copies of its first sample alone."""
    kinds = [("png",) * len(sub.images) + ("mp4",) * len(sub.videos) for sub in subs]
    first = kinds[0]
    extensions = [first, first, *(own[len(first) :] for own in kinds[1:]), first]
    samples = [subs[0].sample, *(sub.sample for sub in subs), subs[0].sample]
    stored = [
        PackedSubSample(sample, own, 0)  # type: ignore[arg-type]
        for sample, own in zip(samples, extensions, strict=True)
    ]
    names = media_part_names([extension for own in extensions for extension in own])
    once = [*subs[0].images, *subs[0].videos]
    media = [*once, *once, *(OTHER for _ in names[3 * len(first) :]), *once]
    record = json.loads(pack_json(stored, task, trees=[tree], media=media))
    del record["meta"]["num_tokens"]
    return Pack("p", record, dict(zip(names, media, strict=True)))


@pytest.mark.parametrize("task", ["vqa", "captioning", "bmr"])
def test_trees_of_measured_prefixes(folder: Path, task: str) -> None:
    """Of a video, or of an image where the family takes none; of an image in other tasks."""
    is_video = task == "vqa" and folder.name not in STILL
    media = {"videos": ("x",)} if is_video else {"images": ("a",)}
    files = ((), (CLIP,)) if is_video else ((IMAGE,), ())
    subs = []
    for i in range(3):
        prompt = "" if task == "captioning" else f"What is {i}?" * (i + 1)
        turns = [Turn(prompt, f"A long story {i}.")]
        if task == "bmr":
            turns.append(Turn(f"And {i}?", f"No. {i}"))
        subs.append(SubSample(f"s{i}", SourceSample(f"s{i}", task, tuple(turns), **media), *files))
    if task == "bmr":  # a further picture in a branch
        turns[1] = Turn("And <image>?", "Yes.")
        turns[0] = Turn("<image>" + turns[0].prompt, turns[0].answer)
        further = SourceSample("s2", task, tuple(turns), ("a", "b"))
        subs[2] = SubSample("s2", further, (IMAGE, OTHER))
    encoder = task_encoder(folder)
    encoder.settings = PackingSettings(packed=True, vqa=task == "vqa", bmr=task == "bmr")
    found = [measure(sub, encoder.encoder).prefix for sub in subs]
    if found[0] is None:
        assert (folder.name, task) == ("llava_1_5", "captioning")
        return
    assert {one and one[1:] for one in found} == {found[0][1:]}
    tree = Tree(1, 3, found[0].num_tokens, *found[0][2:])
    pack = as_pack(subs, tree, task)
    encoded = encoder.encode_pack(pack)
    row = encoded.row
    assert encoded.dropped == []
    assert row.parents.tolist() == [-1, -1, 1, 1, 1, -1]
    alone = [
        concatenate([encoder.encoder.encode(*one[1:4])], pad_token_id=0)  # type: ignore[arg-type]
        for one in sub_samples_of_pack(pack, task)
    ]
    lengths = [len(one.tokens) for one in alone]
    assert len(row.tokens) == sum(lengths) - 2 * tree.num_tokens
    assert tree.num_tokens > 4
    first = row.cu_lengths[2:5]
    assert not row.loss_weights[first].any()
    for part, one in zip(split_row(row), alone, strict=True):
        for name in ("tokens", "loss_weights", "position_ids", "pixel_values", "image_grid_thw"):
            assert torch.equal(getattr(part, name), getattr(one, name)), name
        assert torch.equal(part.pixel_values_videos, one.pixel_values_videos)
        assert part.media_counts.tolist() == one.media_counts.tolist()
