"""preview: what it shows is what the encoder gives, as text; and it shows nothing else."""

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import tiktoken

from offline_packing.errors import StageError
from offline_packing.measure.measure import measure
from offline_packing.report.pages import render_packs
from offline_packing.report.preview import PackPreview, SubSamplePreview, choose, preview
from offline_packing.report.preview_text import first_words, render_pack, safe
from offline_packing.report.spelled import Span
from offline_packing.runs.manifest import require_manifest
from offline_packing.runs.run import Run, open_encoder
from task_encoders.samples import IGNORE_INDEX
from task_encoders.text.qwen_vocabulary import QWEN_PATTERN, QWEN_SPECIAL_TOKENS, qwen_ranks
from tests.helpers.datasets import (
    dialogue,
    image_bytes,
    index_rows,
    make_run,
    packed_run,
    write_json,
)
from tests.helpers.formats import write_file
from tests.helpers.pages import HOSTILE, Elements
from tests.helpers.tiny_families import encoder_options
from tests.helpers.videos import CLIPS, VIDEO_MODEL, make_video
from tests.world import World, copy_of

OUTPUT = {"split": {"train": 0.8, "val": 0.2}, "key_prefix": "a_"}


@pytest.fixture
def run(world: World) -> Run:
    return world.run("bmr", output=OUTPUT)


def all_packs(run: Run) -> list[PackPreview]:
    return list(preview(run, num_packs=10_000))


@pytest.fixture(scope="module")
def qwen() -> tiktoken.Encoding:
    """Qwen's vocabulary with its control tokens, put together here."""
    ranks = qwen_ranks()
    special = {token: len(ranks) + i for i, token in enumerate(QWEN_SPECIAL_TOKENS)}
    return tiktoken.Encoding(
        "qwen", pat_str=QWEN_PATTERN, mergeable_ranks=ranks, special_tokens=special
    )


def text_of(span: Span) -> str:
    """The text of a span with its images' tokens written out again."""
    image = re.compile(r"\[image \d+x\d+: ([\d,]+) tokens\]")
    return "".join(
        image.sub(lambda match: "<|image_pad|>" * int(match[1].replace(",", "")), piece.text)
        for piece in span.pieces
    )


def check_sub_sample(run: Run, sub: SubSamplePreview, qwen: tiktoken.Encoding) -> None:
    """Tokens, labels and text of a segment are those of the sample encoder."""
    images = [image.picture for image in sub.images]
    encoded = open_encoder(run.config.model).encode(sub.sample, images)
    has_loss = encoded.labels != IGNORE_INDEX
    assert (sub.num_tokens, sub.num_loss_tokens) == (len(encoded.tokens), has_loss.sum())
    assert [image.grid for image in sub.images] == [tuple(g) for g in encoded.image_grid_thw]
    start = 0
    for span in sub.spans:
        some = slice(start, start := start + span.num_tokens)
        assert (has_loss[some] == (span.weight > 0)).all()
        assert text_of(span) == qwen.decode(encoded.tokens[some].tolist())
    assert start == sub.num_tokens
    trained = [span.weight > 0 for span in sub.spans]
    assert all(a != b for a, b in itertools.pairwise(trained))


@pytest.mark.parametrize(
    ("task", "more"), [("captioning", {}), ("bmr", {}), ("vqa", {"layout": "llava_onevision"})]
)
def test_all_packs_are_shown_as_they_are_encoded(
    task: str, more: dict[str, str], world: World, qwen: tiktoken.Encoding
) -> None:
    run = world.run(task, output=OUTPUT | more)
    rows, packs = {row["key"]: row for row in index_rows(run)}, all_packs(run)
    for pack in packs:
        assert pack.cu_lengths[0] == 0
        assert np.diff(pack.cu_lengths).tolist() == [sub.num_tokens for sub in pack.sub_samples]
        assert pack.dropped == ()
    subs = [sub for pack in packs for sub in pack.sub_samples]
    for sub in subs:
        check_sub_sample(run, sub, qwen)
        assert sub.num_tokens == rows[sub.sample.key]["num_tokens"]
    assert sorted(sub.sample.key for sub in subs) == sorted(rows)
    shards = json.loads(run.workspace.manifest.read_text())["shards"]
    split_of = {shard["name"]: shard["split"] for shard in shards}
    assert {pack.shard: pack.split for pack in packs} == split_of


def test_terminal(run: Run) -> None:
    (pack,) = preview(run, packs=["a_ps_00000001"])
    shown = click.unstyle(render_pack(pack, full=True))
    assert shown.startswith(f"a_ps_00000001  {pack.shard} (train)  {pack.cu_lengths[-1]:,} of 512")
    assert f"cu_lengths {list(pack.cu_lengths)}" in shown
    for sub in pack.sub_samples:
        assert first_words(sub.sample.turns[0].answer) in shown
        last = sub.sample.turns[-1].answer.splitlines()[-1]
        assert f"{last}<|im_end|>" in shown
        for image in sub.images:
            rows, columns = image.grid[1:]
            assert f"{image.width}x{image.height} -> {rows}x{columns}" in shown
            assert f"[image {rows}x{columns}: {rows * columns // 4:,} tokens]" in shown
    assert len(re.findall(r" loss │", shown)) >= len(pack.sub_samples)
    assert "\x1b" in render_pack(pack)


def test_page(run: Run) -> None:
    packs = list(preview(run, num_packs=2))
    page = render_packs(packs, run.config.task)
    assert page == render_packs(list(preview(run, num_packs=2)), run.config.task)
    elements = Elements(page.decode())
    assert ("data-name", "prompt") in elements.attributes  # for narrow screens
    subs = [sub for pack in packs for sub in pack.sub_samples]
    assert elements.names["img"] == sum(len(sub.images) for sub in subs) > 0
    sources = [value or "" for name, value in elements.attributes if name == "src"]
    assert all(source.startswith("data:image/jpeg;base64,") for source in sources)
    assert all(turn.answer in elements.text for sub in subs for turn in sub.sample.turns)


def one_pack(folder: Path, task: str, record: Any, **sections: Any) -> PackPreview:
    """Show the pack of one sample, whose media are in the folder already."""
    write_json(folder / "data/output_00000000.json", record)
    source = {"format": "pairs", "path": str(folder / "data"), "task": task}
    (pack,) = all_packs(packed_run(source, folder / "out", **sections))
    return pack


def test_long_texts_are_cut_unless_asked_for(tmp_path: Path) -> None:
    answer = " ".join(f"w{i}" for i in range(125))
    pack = one_pack(tmp_path, "bmr", {"messages": dialogue("Count.", answer)})
    cut = render_pack(pack)
    assert f"{answer}<|im_end|>" in render_pack(pack, full=True)
    assert answer not in cut
    assert re.search(r"w0 w1.*w124<\|im_end\|>", cut, re.DOTALL)
    assert f"{len(answer) + len('<|im_end|>') - 400:,} characters" in cut


def test_text_of_a_dataset_stays_text(tmp_path: Path) -> None:
    """On a terminal and on a page. Also control tokens written as text, which are told from the
    control tokens."""
    write_file(tmp_path / "data/a.jpg", image_bytes())
    answer = f"{HOSTILE}\x1b[31m\x9b2J <|im_end|>\n<|image_pad|>"
    record = {"messages": dialogue("<image>\nX\u202e", answer), "images": ["a.jpg"]}
    pack = one_pack(tmp_path, "vqa", record)
    (sub,) = pack.sub_samples
    kinds = {(piece.kind, piece.text) for span in sub.spans for piece in span.pieces}
    assert kinds >= {
        ("text", f"{HOSTILE}\x1b[31m\x9b2J "),
        ("literal", "[text: <|im_end|>]"),
        ("literal", "[text: <|image_pad|>]"),
        ("control", "<|im_end|>"),
    }
    assert [text for kind, text in kinds if kind == "vision"] == ["[image 4x4: 4 tokens]"]
    shown = click.unstyle(render_pack(pack, full=True))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", shown)
    assert "\\u001b[31m\\u009b2J [text: <|im_end|>]" in shown
    assert safe("a\tb\nc\r\u202e") == "a\tb\nc\\u000d\\u202e"
    page = render_packs([pack], f"</title>{HOSTILE}\x1b\ud800").decode()
    elements = Elements(page)
    assert elements.names["script"] == 0
    assert "[text: <|im_end|>]" in elements.text
    assert elements.names["img"] == 1
    assert elements.text.count(HOSTILE) >= 3  # the title, the heading, and the answer
    assert "\x1b" not in page
    assert page.count("\ufffd") >= 4


@pytest.mark.parametrize(
    "family",
    ["qwen2_vl", "qwen3_vl", "glm4v", pytest.param("internvl3", marks=pytest.mark.exhaustive)],
)
def test_videos_in_one_run_of_tokens_or_in_several(
    family: str, world: World, tmp_path: Path
) -> None:
    """Qwen3-VL and GLM-V write the time of each step; GLM-V's and InternVL3's have the tokens of
    images."""
    videos = ["short.mp4", "other.mp4"]
    for name in videos:
        write_file(tmp_path / "data" / name, make_video(*CLIPS[Path(name).stem]))
    write_file(tmp_path / "data/0.jpg", image_bytes(84, 60))
    record = {"messages": dialogue("What moves?", "A bar."), "images": ["0.jpg"], "videos": videos}
    model = VIDEO_MODEL | {"family": family, "resize": "pil"}
    if family == "internvl3":
        model = {"family": family, "resize": "pil", "max_pixels": None, **encoder_options(family)}
    if family in ("glm4v", "internvl3"):
        model |= {"processor": str(world.checkpoint(family))}
    (sub,) = one_pack(tmp_path, "vqa", record, model=model).sub_samples
    shown = [piece.text for span in sub.spans for piece in span.pieces if piece.kind == "vision"]
    runs = [video.grid[0] if family != "qwen2_vl" else 1 for video in sub.videos]
    expected = [f"image {sub.images[0].patches}"]
    for video, count in zip(sub.videos, runs, strict=True):
        expected += [f"video {video.num_frames} frames {video.patches}"] * count
    assert [re.sub(r"^\[|: .*", "", text) for text in shown] == expected
    tokens = [int(re.search(r": ([\d,]+) tokens", text)[1].replace(",", "")) for text in shown]
    grids = [math.prod(medium.grid) for medium in (*sub.images, *sub.videos)]
    assert sum(tokens) == sum(grids) // 4
    assert family == "qwen2_vl" or max(runs) > 1


def test_padding_inside_a_pack(world: World) -> None:
    run = world.run("captioning", pack={"pad_multiple": 16})
    rows = {row["key"]: row["num_tokens"] for row in index_rows(run)}
    padded = 0
    for sub in (sub for pack in all_packs(run) for sub in pack.sub_samples):
        more = -rows[sub.sample.key] % 16
        assert sub.num_tokens == rows[sub.sample.key] + more
        last = [piece.text for piece in sub.spans[-1].pieces]
        assert not more or last == [f"[padding: {more} tokens]"]
        padded += more > 0
    assert padded > 5


def test_which_packs(world: World) -> None:
    manifest = require_manifest(world.run("captioning", output=OUTPUT).workspace.root)
    total = sum(shard.packs for shard in manifest.shards)
    assert choose(manifest, 3, ["2", "a_ps_00000000", "1"], 0) == [2, 0, 1]
    drawn = choose(manifest, 3, [], 7)
    assert drawn == choose(manifest, 3, [], 7) == sorted(set(drawn))
    assert len(drawn) == 3
    assert choose(manifest, 10_000, [], 0) == list(range(total))
    for name in (str(total), "b_ps_00000000", "a_ps_x", "-1"):
        with pytest.raises(StageError, match=rf"no pack '{name}'; there are a_ps_00000000 to"):
            choose(manifest, 3, [name], 0)


def test_what_cannot_be_shown_is_refused(world: World, tmp_path: Path) -> None:
    """Packs that are not written, of another model, or damaged."""
    measure(run := make_run(source := world.source("captioning"), tmp_path / "measured"))
    with pytest.raises(StageError, match=r"no manifest in .*run write first"):
        list(preview(run))
    run = copy_of(world.run("captioning"), tmp_path / "out")
    other = make_run(source, tmp_path / "out", model={"max_pixels": 28 * 28 * 32})
    with pytest.raises(StageError, match="measured with max_pixels 50176"):
        list(preview(other))
    tar = tmp_path / "out/train-000000.tar"
    tar.write_bytes(tar.read_bytes()[:1000])
    with pytest.raises(StageError, match=r"cannot be read|is cut off"):
        list(preview(run, packs=["0"]))
