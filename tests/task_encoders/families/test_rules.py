"""Rules of one family: tags and ends of Qwen's videos, calls of Gemma, results of GLM's tools; and
checkpoints that do not fit."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.video_utils import VideoMetadata

from task_encoders.families import build_sample_encoder, family_of_processor
from task_encoders.families.base.spans import Medium
from task_encoders.families.glm4v import GLM_TEMPLATE
from task_encoders.media.video_file import VideoHeader, read_video_header
from task_encoders.samples import IGNORE_INDEX, SampleError, SourceSample, Turn
from task_encoders.text.pieces import Text, Video
from tests.helpers.datasets import image_bytes
from tests.helpers.encoder_contract import own_pairs, unequal
from tests.helpers.tiny_families import STILL, needs_family, save_tokenizer
from tests.helpers.tiny_tokenizers import gemma_tokenizer, save_gemma_tokenizer, save_glm_tokenizer
from tests.helpers.videos import make_video
from tests.world import World


@pytest.mark.parametrize(
    ("caption", "trained"),
    [
        ("It: <video> is", ["It", ":", " <", " is"]),  # a token of both carries the caption's loss
        ("It:\n<video>", ["It", ":\n"]),
        ("It.<video>\n<video>", ["It", ".<", "\n"]),
        ("<video><video>!", ["!"]),
    ],
)
def test_videos_without_outer_tags_in_captions(caption: str, trained: list[str]) -> None:
    encoder: Any = build_sample_encoder("qwen3_vl", outer_video_tags=False)
    tokenizer = encoder.tokenizer
    clips = [make_video(12)] * caption.count("<video>")
    sample = SourceSample("a", "captioning", (Turn("", caption),), videos=("v",) * len(clips))
    encoded = encoder.encode(sample, [], clips)
    assert unequal(own_pairs(encoder, sample, [], clips, encoded)) == []
    _, rows, columns = encoder.sample_video(read_video_header(io.BytesIO(clips[0]))).grid
    step = f"<|vision_start|>{'<|video_pad|>' * (rows * columns // 4)}<|vision_end|>"
    text = caption.replace("<video>", f"<0.2 seconds>{step}<0.9 seconds>{step}") + "<|im_end|>"
    ids: list[int] = []
    for i, part in enumerate(re.split(r"(<\|\w+\|>)", text)):
        ids += [tokenizer.special_id(part)] if i % 2 else tokenizer.encode(part)
    assert encoded.tokens.tolist() == ids
    labels = encoded.labels[encoded.labels != IGNORE_INDEX]
    first = [] if caption.startswith("<video>") else trained[:1]  # nothing predicts the first token
    found = [text for one in labels for text, _ in tokenizer.spell([one])]
    assert first + found == [*trained, "<|im_end|>"]


def test_videos_without_outer_tags_share_their_prefix() -> None:
    tagged, bare, default = (
        build_sample_encoder("qwen3_vl", outer_video_tags=tags) for tags in (True, False, None)
    )
    assert bare.fingerprint == {**tagged.fingerprint, "outer_video_tags": False}
    assert "outer_video_tags" not in default.fingerprint
    header = VideoHeader(12, 4.0, 64, 64)
    sample = SourceSample("a", "vqa", (Turn("<video>\n<video>\nA?", "b"),), videos=("v", "w"))
    prefix = bare.measure(sample, [], [header] * 2).prefix
    assert prefix is not None
    assert prefix.num_videos == 2


def positions_of_transformers_4(encoder: Any, tokens: Any, media: Any) -> Any:
    """Positions by get_rope_index of transformers 4.5x: each run of text or of one medium goes on
    after the largest position before it. `media`: grids, and positions from step to step."""
    runs: list[Any] = []
    left = iter(media)
    start = 0
    while start < len(tokens):
        first = 0 if not runs else int(runs[-1].max()) + 1
        if tokens[start] in (encoder.image_token_id, encoder.video_token_id):
            (t, h, w), interval = next(left)
            time = (torch.arange(t) * torch.tensor(interval)).long()
            sides = torch.arange(h // 2), torch.arange(w // 2)
            places = torch.stack(torch.meshgrid(time, *sides, indexing="ij"))
            runs.append(places.reshape(3, -1) + first)
        else:
            runs.append(torch.full((3, 1), first))
        start += runs[-1].shape[1]
    return torch.cat(runs, dim=1).numpy()


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_text_can_go_on_after_the_last_position_of_a_video(family: str) -> None:
    limits = {"max_pixels": 28**2 * 32, "video_min_pixels": 28**2, "video_max_pixels": 28**2 * 12}
    default, ours = (
        build_sample_encoder(family, video_end=end, **limits) for end in (None, "last_position")
    )
    clips = [make_video(90, 10, 96, 40), make_video(7, 10)]
    turns = Turn("Which?", "Both."), Turn("Why?", "So.")
    sample = SourceSample("k", "bmr", turns, ("i",), videos=("long", "short"))
    encoded = ours.encode(sample, [image_bytes(90, 60)], clips)
    media: list[Any] = [(encoded.image_grid_thw[0].tolist(), 1.0)]
    for data in clips:
        sampled = ours.sample_video(read_video_header(io.BytesIO(data)))
        rate = 2 * sampled.seconds_per_step if family == "qwen2_5_vl" else 1.0
        media.append((sampled.grid, rate))
    expected = positions_of_transformers_4(ours, encoded.tokens, media)
    np.testing.assert_array_equal(encoded.position_ids, expected)
    others = default.encode(sample, [image_bytes(90, 60)], clips).position_ids
    assert (others != expected).any()
    assert default.fingerprint == ours.fingerprint  # lengths do not depend on it


def test_tokens_per_second_are_the_checkpoints(tmp_path: Path) -> None:
    save_tokenizer("qwen2_5_vl", tmp_path)
    found = []
    for vision in (None, {}, {"tokens_per_second": 4}):
        if vision is not None:
            config = {"model_type": "qwen2_5_vl", "vision_config": vision}
            (tmp_path / "config.json").write_text(json.dumps(config))
        found.append(build_sample_encoder("qwen2_5_vl", str(tmp_path)).tokens_per_second)
    assert [*found, build_sample_encoder("qwen2_5_vl").tokens_per_second] == [2, 2, 4, 2]


CALL = '{"name": "f", "arguments": {"a": "b"}}'
TOOLS = '[{"type": "function", "function": {"name": "f", "description": ""}}]'


@pytest.mark.parametrize(
    ("prompt", "before"), [("Look <video>", "user\nLook "), ("<video>", "user\n")]
)
def test_the_first_label_of_a_video_of_internvl_ends_the_text_before_it(
    prompt: str, before: str, world: World
) -> None:
    encoder = build_sample_encoder("internvl3", str(world.tokenizer("internvl3")))
    dialogue = SourceSample("a", "bmr", (Turn(prompt, "A."),), videos=("v",))
    caption = SourceSample("a", "captioning", (Turn("", "<video>A."),), videos=("v",))
    for sample, text in ((dialogue, before), (caption, "")):
        pieces = list(encoder.parts(sample))
        at = [type(piece) for piece in pieces].index(Video)
        assert pieces[at - 1] == Text(text + "Frame1: ")
        assert not any(isinstance(piece, Text) for piece in pieces[max(at - 2, 0) : at - 1])


def test_a_turn_of_gemma_goes_on_after_results_of_calls(world: World) -> None:
    """Calls and what follows their results have weights of their own, and so do the tokens that
    end them."""
    encoder: Any = build_sample_encoder("gemma4", str(world.tokenizer("gemma4")))
    called = '<|tool_call>call:f{a:<|"|>b<|"|>}<tool_call|><|tool_response>'
    turns = Turn("a", "", calls=(CALL,)), Turn("1", "b", role="tool")
    for trained, expected in ((0, called), (1, "b<turn|>")):
        weighed = tuple(replace(turn, weight=float(i == trained)) for i, turn in enumerate(turns))
        encoded = encoder.encode(SourceSample("k", "bmr", weighed, tools=TOOLS), [])
        names = [text for text, _ in encoder.tokenizer.spell(encoded.labels[encoded.labels >= 0])]
        assert "".join(names) == expected


@pytest.mark.parametrize(
    ("total", "fps"), [(1, None), (240, None), (7000, 0.5), (20_000, 29.97), (9, 120.0)]
)
def test_times_of_gemmas_videos(total: int, fps: float | None, world: World) -> None:
    """As the processor writes them, also of minutes, and where a video says no rate."""
    encoder: Any = build_sample_encoder("gemma4", str(world.tokenizer("gemma4")))
    sampled = encoder.sample_video(VideoHeader(total, fps, 100, 80))
    spans = encoder.medium_spans(Medium((len(sampled.frames), encoder.POOL, encoder.POOL), sampled))
    written = encoder.tokenizer.spell([one for span in spans for one in span.ids])
    frames = np.array(sampled.frames)
    metadata = VideoMetadata(total_num_frames=total, fps=fps, frames_indices=frames)
    inputs = {"num_soft_tokens_per_video": [1], "video_metadata": [metadata]}
    names = {"boi_token": "<|image>", "eoi_token": "<image|>", "video_token": "<|video|>"}
    expected = Gemma4Processor.replace_video_token(SimpleNamespace(**names), inputs, 0)
    assert "".join(text for text, _ in written) == expected


@pytest.mark.parametrize("family", ["gemma4", "gemma4_unified"])
def test_checkpoints_of_gemma_that_do_not_fit(family: str, tmp_path: Path) -> None:
    needs_family(family)
    gemma_tokenizer().save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match=r"has no chat template; copy chat_template.jinja"):
        build_sample_encoder(family, str(tmp_path / "base"))
    save_gemma_tokenizer(tmp_path, joins_digits=True)
    with pytest.raises(ValueError, match="joins digits with the text before them"):
        build_sample_encoder(family, str(tmp_path))


def test_media_in_results_that_glms_template_shows_as_python_does(tmp_path: Path) -> None:
    """GLM-4.5V's template writes tool results that are not text as lists of parts."""
    literal = GLM_TEMPLATE.replace("response>\\n' + text +", "response>\\n' ~ message.content ~")
    save_glm_tokenizer(tmp_path, literal)
    encoder: Any = build_sample_encoder("glm4v", str(tmp_path))
    turns = Turn("a", "", calls=(CALL,)), Turn("3", "b", role="tool")
    plain = SourceSample("t", "bmr", turns)
    assert encoder.measure(plain, []).num_tokens > 20
    shown = (turns[0], replace(turns[1], prompt="<image>3"))
    with pytest.raises(SampleError, match="not_in_template"):
        encoder.measure(replace(plain, turns=shown, images=("i",)), [(56, 56)])


@pytest.mark.parametrize("model_type", ["glm4v", "glm4v_moe"])
def test_checkpoints_of_one_model_type_are_told_apart(model_type: str, tmp_path: Path) -> None:
    """GLM-4.5V's and GLM-4.6V's models are of one class, their processors are not."""
    kinds = {"glm4v": "Glm4vProcessor", "glm46v": "Glm46VProcessor"}
    for family, other in (("glm4v", "glm46v"), ("glm46v", "glm4v")):
        folder = tmp_path / family
        save_glm_tokenizer(folder, kind=kinds[family])
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        assert family_of_processor(str(folder)) == family
        assert build_sample_encoder(family, str(folder)).fingerprint["family"] == family
        with pytest.raises(ValueError, match=f"is of family {family}, not {other}"):
            build_sample_encoder(other, str(folder))


@pytest.mark.parametrize("model_type", ["llava_onevision2", "llava_onevision2_moe"])
def test_sizes_of_llava_onevision_2_must_be_the_checkpoints(
    model_type: str, tmp_path: Path
) -> None:
    save_tokenizer("llava_onevision_2", tmp_path)
    vision = {"patch_size": 16, "spatial_merge_size": 3}
    config = {"model_type": model_type, "vision_config": vision}
    (tmp_path / "config.json").write_text(json.dumps(config))
    given: Any = {"model": "llava_onevision_2", "processor": str(tmp_path)}
    with pytest.raises(ValueError, match=r"patch_size 14, and 16 in .*; set model.patch_size=16"):
        build_sample_encoder(**given)
    with pytest.raises(ValueError, match=r"merge_size 2, and 3 in .*; set model.merge_size=3"):
        build_sample_encoder(**given, patch_size=16)
    encoder: Any = build_sample_encoder(**given, patch_size=16, merge_size=3)
    assert encoder.image_medium(96, 144).grid == (1, 6, 9)
    options = build_sample_encoder("llava_onevision_2").fingerprint  # as of merged checkpoints
    sizes = {"min_pixels": 3136, "max_pixels": 4_000_000, "patch_size": 14, "merge_size": 2}
    assert {name: options[name] for name in sizes} == sizes


@pytest.mark.parametrize("family", STILL)
def test_families_of_stills_refuse_videos(family: str, world: World) -> None:
    encoder = build_sample_encoder(family, str(world.tokenizer(family)))
    sample = SourceSample("v", "vqa", (Turn("What?", "A bar."),), videos=("a",))
    with pytest.raises(SampleError, match=f"bad_video: family {family} takes no videos"):
        encoder.encode(sample, [], [make_video(4)])
