"""NeMo AutoModel on packs, and against what its own packing makes of the same samples: of images,
of videos, of families beside Qwen's, cut for context parallelism."""

import io
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from nemo_automodel.components.distributed.context_parallel.utils import make_cp_batch_for_te
from nemo_automodel.components.distributed.cp_vision_frame_shard import (
    _contiguous_balanced_bounds,
)
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    AutoModelForImageTextToText,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

from launch.model.config import config_of_preset, transformers_classes
from launch.trainers.automodel import PacksConfig
from offline_packing.demo.training import tiny_qwen2_vl
from task_encoders.energon_samples import PackedBatch
from task_encoders.families import build_sample_encoder, model_cost
from task_encoders.families.builtin_processor import builtin_processor
from task_encoders.media.video_file import read_video_header
from task_encoders.text.qwen_vocabulary import MEDIA_TOKEN_IDS
from tests.helpers.automodel import (
    CAPTION_TEMPLATE,
    conversation,
    losses_of_packs,
    make_loader,
    own_batch,
    without_last_newline,
)
from tests.helpers.context_ranks import (
    boundaries,
    differing_cuts,
    packs_for_ranks,
    use_partitioned_indices,
)
from tests.helpers.hf_trainers import several_packs
from tests.helpers.parity import check_losses
from tests.helpers.peers import (
    assert_same,
    check_order,
    check_uniform_steps,
    open_packs,
    small_checkpoint,
    small_packs,
    stored_samples,
)
from tests.helpers.video_packs import MODEL, video_packs

Say = Callable[[str], None]
VERSION = f"NeMo AutoModel {version('nemo-automodel')}"


@pytest.fixture(scope="module")
def loaded() -> Any:
    """A model with the whole vocabulary, and its processor."""
    builtin = builtin_processor()
    limits = {"min_pixels": 3136, "max_pixels": 100352}
    processor = Qwen2VLProcessor(
        Qwen2VLImageProcessorPil(**limits),
        builtin.tokenizer,
        Qwen2VLVideoProcessor(),
        chat_template=builtin.chat_template,
    )
    return tiny_qwen2_vl(), processor


def test_every_demo_pack_is_what_its_packing_would_give(
    task: str, demo: dict[str, Path], loaded: Any, monkeypatch: pytest.MonkeyPatch, say: Say
) -> None:
    model, processor = loaded
    options: dict[str, Any] = {"inject_fake_images": False}
    if task == "captioning":
        monkeypatch.setattr(processor, "chat_template", CAPTION_TEMPLATE)
    else:
        options["post_tokenize_hook"] = without_last_newline
    num_packs = 0
    for split in ("train", "val"):
        for pack, ours in zip(
            open_packs(demo[task], split), make_loader(demo[task], split), strict=True
        ):
            samples = [conversation(*sample) for sample in stored_samples(pack)]
            theirs = own_batch(samples, processor, model, **options)
            if task == "captioning":  # which it finds only between the headers of a dialogue
                assert (theirs.pop("labels") == -100).all()
                assert (ours["labels"] != -100).any()
            assert ours.keys() - {"labels"} == theirs.keys() - {"labels"}
            assert_same(ours, theirs, f"{task} {split} {pack.number}")
            num_packs += 1
    assert num_packs > 5
    say(f"{VERSION}: {num_packs} packs of {task} are what its own packing makes of their samples")


def numbers_read(packed: Path) -> list[int]:
    """Numbers of the packs that this rank trains on in an epoch."""
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    loader = make_loader(packed, rank=rank, world_size=world_size)
    return [pack_number(batch, packed) for batch in loader]


def pack_number(batch: dict[str, Any], packed: Path) -> int:
    packs = PacksConfig(str(packed)).build()
    tokens = batch["input_ids"][0]
    found = [i for i in range(len(packs)) if torch.equal(packs[i]["input_ids"], tokens)]
    assert len(found) == 1
    return found[0]


def test_order(case: Any, tmp_path: Path, say: Say) -> None:
    check_order(case[1], tmp_path, numbers_read)
    say(f"{VERSION}: order of packs kept on 1, 2 and 4 ranks")


def images_read(packed: Path) -> list[bool]:
    """Whether each row that this rank trains on has images."""
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    loader = make_loader(packed, rank=rank, world_size=world_size)
    return [batch.get("pixel_values") is not None for batch in loader]


def test_uniform_steps(case: Any, family: str, tmp_path: Path, say: Say) -> None:
    counted = check_uniform_steps(family, case[0], tmp_path, images_read)
    say(f"{VERSION}: mixed steps of uniform packs: {counted}")


def test_its_loader_goes_on_where_it_was_saved(case: Any, say: Say) -> None:
    _, packed = case
    whole = list(make_loader(packed))
    loader: Any = make_loader(packed)
    first = list(islice(loader, 3))
    state = loader.state_dict()
    resumed: Any = make_loader(packed)
    resumed.load_state_dict(state)
    rest = list(resumed)
    assert len(rest) > 3
    for number, (found, expected) in enumerate(zip([*first, *rest], whole, strict=True)):
        assert found.keys() == expected.keys()
        assert_same(found, expected, f"batch {number}")
    say(f"{VERSION}: its loader, saved in the middle of an epoch, goes on exactly")


def test_steps_are_those_of_our_own_trainer(case: Any, tmp_path: Path, say: Say) -> None:
    checkpoint, packed = case
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, attn_implementation="sdpa")
    losses = losses_of_packs(model, packed)
    difference = check_losses(packed, checkpoint, losses, tmp_path / "ours")
    say(f"{VERSION}: loss before and after a step as launch.train's (to {difference:.0e})")


@pytest.mark.parametrize("family", ["glm4v", "glm46v", "internvl3"])
def test_steps_are_those_of_the_samples_alone(family: str, tmp_path: Path, say: Say) -> None:
    checkpoint, packed = several_packs(family, tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, attn_implementation="sdpa")
    losses = losses_of_packs(model, packed)
    difference = check_losses(packed, checkpoint, losses, pixels=torch.bfloat16)
    say(
        f"{VERSION}, {family}: loss before and after a step as of the samples alone "
        f"(to {difference:.0e})"
    )


@pytest.mark.parametrize("family", ["gemma4", "gemma4_unified", "mistral3"])
def test_it_packs_no_gemma_and_no_mistral(family: str, tmp_path: Path) -> None:
    checkpoint = small_checkpoint(family, tmp_path / "checkpoint")
    packed = small_packs(family, checkpoint, tmp_path, samples=8)
    with pytest.raises(ValueError, match="AutoModel does not pack this model's images"):
        PacksConfig(str(packed)).build()[0]


LIMITS = {"min_pixels": MODEL["min_pixels"], "max_pixels": MODEL["max_pixels"]}
PROCESSORS = {"qwen2_vl": Qwen2VLProcessor, "qwen2_5_vl": Qwen2_5_VLProcessor}
VISION: dict[str, dict[str, int]] = {"qwen2_vl": {}, "qwen2_5_vl": {"tokens_per_second": 2}}


def processor_of(family: str, task: str) -> Any:
    builtin = builtin_processor()
    template = CAPTION_TEMPLATE if task == "captioning" else builtin.chat_template
    videos = Qwen2VLVideoProcessor(fps=2.0, cap_pixels_per_frame=False, **LIMITS)
    return PROCESSORS[family](
        Qwen2VLImageProcessor(**LIMITS), builtin.tokenizer, videos, chat_template=template
    )


def compared(family: str, task: str, root: Path) -> Iterator[tuple[Any, Any]]:
    """Our batches and AutoModel's. It is told which frames to take: by itself it takes those of
    qwen-vl-utils."""
    packed = video_packs(task, root, family=family)
    config = config_of_preset(family, "tiny", {}, VISION[family], **MEDIA_TOKEN_IDS)
    model = transformers_classes(family).model(config)
    processor, packs = processor_of(family, task), open_packs(packed)
    encoder = build_sample_encoder(family, **MODEL)

    def as_video(data: bytes) -> dict[str, Any]:
        file = root / f"{hash(data)}.mp4"
        file.write_bytes(data)
        frames = encoder.sample_video(read_video_header(io.BytesIO(data))).frames
        return {"type": "video", "video": str(file), "frame_indices": list(frames)}

    hook = None if task == "captioning" else without_last_newline
    for pack, ours in zip(packs, make_loader(packed), strict=True):
        samples = [conversation(*stored, as_video) for stored in stored_samples(pack)]
        options = {"inject_fake_images": False, "post_tokenize_hook": hook}
        yield ours, own_batch(samples, processor, model, **options)


@pytest.mark.parametrize("family", PROCESSORS)
def test_packs_with_videos_are_what_its_packing_would_give(
    task: str, family: str, tmp_path: Path, say: Say
) -> None:
    num_videos = other_positions = num_packs = 0
    for ours, theirs in compared(family, task, tmp_path):
        if task == "captioning":  # which it finds only between the headers of a dialogue
            assert (theirs.pop("labels") == -100).all()
        if family == "qwen2_5_vl":
            # It counts seconds as if every frame of the file had been taken.
            seconds = theirs.pop("second_per_grid_ts", torch.empty(0))
            assert {round(2 / float(step)) for step in seconds} <= {10, 3}  # frames per second
            other = theirs.pop("position_ids") != ours["position_ids"]
            other_positions += int(other.any())
            assert not other.any() or "video_grid_thw" in ours
        assert ours.keys() - theirs.keys() <= {"labels", "position_ids"}
        assert_same(ours, theirs, f"{task} {num_packs}")
        num_videos += len(ours.get("video_grid_thw", ()))
        num_packs += 1
    assert num_videos >= 12
    assert (other_positions > 0) == (family == "qwen2_5_vl")
    but = f", but for the seconds in positions of {other_positions}" * (other_positions > 0)
    say(f"{VERSION}: {num_packs} {family} packs of {task} with {num_videos} videos as its own{but}")


@pytest.mark.parametrize("size", [2, 4])
def test_its_cut_gives_each_rank_what_it_should(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: Callable[[str], None]
) -> None:
    """Tokens by Transformer Engine's indices; frames one after another, by cost, one at least."""
    use_partitioned_indices(monkeypatch)

    def cut(row: PackedBatch, params: PackedSeqParams) -> dict[str, torch.Tensor]:
        lengths = boundaries(params).diff()[None]
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
        parts = []
        for positions in row.position_ids:  # it takes one axis at a time
            batch = {
                "input_ids": row.tokens,
                "labels": row.labels,
                "position_ids": positions,
                "seq_lens": lengths,
                "seq_lens_padded": lengths,
            }
            found = make_cp_batch_for_te(mesh, batch)
            assert torch.equal(found["cu_seqlens"], boundaries(params))
            parts.append(found["position_ids"])
        ids, labels = found["input_ids"], found["labels"]
        return {"tokens": ids, "labels": labels, "position_ids": torch.stack(parts)}

    packs = packs_for_ranks(tmp_path, size)
    assert differing_cuts(packs, size, cut) == []
    cost = model_cost(packs.task_encoder.encoder.options)
    shares = []
    for number in range(len(packs)):
        row = packs.batch([number])
        grids = torch.cat([row.image_grid_thw, row.video_grid_thw])
        patches = grids[:, 1:].prod(dim=1).repeat_interleave(grids[:, 0])
        bounds = _contiguous_balanced_bounds(patches, size)
        assert (bounds is None) == (len(patches) < size)
        if bounds is not None:
            assert (np.diff(bounds) > 0).all()
            assert (bounds[0], bounds[-1]) == (0, len(patches))
            work = cost.tower_flops(patches.numpy().astype(float))
            shares.append(np.add.reduceat(work, bounds[:-1]))
    idle = 1 - np.sum(shares) / (size * np.max(shares, axis=1).sum())
    say(
        f"{VERSION}: CP {size} cuts {len(packs)} packs as launch does; the tower's idle time of "
        f"{len(shares)} with {size} pictures or more is {idle:.1%} by its own split"
    )
