"""ms-swift on packs, and against what its own template makes of the same samples; on families
beside Qwen's where its templates pack: on GLM-V and InternVL3."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import swift
import torch
from PIL import Image
from swift.model import get_model_processor
from swift.template import get_template
from swift.utils import import_external_file
from torch.utils.data import Dataset
from transformers import (
    AutoTokenizer,
    Glm4vImageProcessor,
    Glm4vProcessor,
    Glm4vVideoProcessor,
    Glm46VImageProcessor,
    Glm46VProcessor,
    Glm46VVideoProcessor,
    GotOcr2ImageProcessor,
    InternVLProcessor,
    InternVLVideoProcessor,
)

from offline_packing.demo.training import tiny_qwen2_vl
from offline_packing.online.collate import padding_free_collator
from offline_packing.online.datasets import PackedDatasetWrapper
from task_encoders.families.builtin_processor import builtin_processor
from tests.helpers.hf_trainers import number_of, several_packs
from tests.helpers.hf_videos import save_processor, with_processor
from tests.helpers.ms_swift import (
    LENGTH,
    PLUGIN,
    assistant,
    make_template,
    make_trainer,
    own_sample,
    packs_of_plugin,
)
from tests.helpers.parity import check_losses
from tests.helpers.peers import (
    assert_same,
    check_order,
    open_packs,
    stored_samples,
)
from tests.helpers.tiny_families import encoder_options

Say = Callable[[str], None]
QWEN2_VL = {"model_type": "qwen2_vl", "template": "qwen2_vl"}
VERSION = f"ms-swift {swift.__version__}"


@pytest.fixture(scope="module")
def family() -> str:
    return "qwen2_vl"


@pytest.fixture(scope="module")
def case(case: Any) -> Any:
    limits = {name: encoder_options("qwen2_vl")[name] for name in ("min_pixels", "max_pixels")}
    with_processor(case[0], **limits)
    return case


def recorded_run(
    checkpoint: Path, packed: Path, output: Path, **options: Any
) -> tuple[list[int], list[float], list[torch.Tensor]]:
    """Packs and loss of each of six steps, and the weights at the end."""
    packs = open_packs(packed)
    trainer = make_trainer(
        checkpoint, packed, output, **QWEN2_VL, max_steps=6, save_steps=3, **options
    )
    seen: list[int] = []
    trainer.model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(number_of(kwargs["input_ids"], packs)),
        with_kwargs=True,
    )
    trainer.train(options.get("resume_from_checkpoint"))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return seen, losses, [weight.detach().clone() for weight in trainer.model.parameters()]


def test_steps_are_those_of_our_own_trainer_and_are_resumed(
    case: Any, tmp_path: Path, say: Say
) -> None:
    packs, losses, weights = recorded_run(*case, tmp_path / "whole")
    assert packs == list(range(6))
    difference = check_losses(case[1], case[0], losses, tmp_path / "ours")
    resumed = recorded_run(
        *case, tmp_path / "again", resume_from_checkpoint=str(tmp_path / "whole/checkpoint-3")
    )
    assert resumed[0] == packs[3:]
    assert resumed[1] == losses  # those of the first three are in the checkpoint
    assert all(map(torch.equal, resumed[2], weights))
    say(
        f"{VERSION}: loss before and after a step as launch.train's (to {difference:.0e}), "
        "6 steps resumed after 3 to the last bit"
    )


def numbers_read(packed: Path, checkpoint: Path, output: Path) -> list[int]:
    """Numbers of the packs that this rank trains on in an epoch."""
    packs = open_packs(packed)
    trainer = make_trainer(checkpoint, packed, output, **QWEN2_VL)
    return [number_of(row["input_ids"], packs) for row in trainer.get_train_dataloader()]


def test_order(case: Any, tmp_path: Path, say: Say) -> None:
    checkpoint, packed = case
    check_order(packed, tmp_path, numbers_read, checkpoint, tmp_path / "out", drop_last=True)
    say(f"{VERSION}: order of packs kept on 1, 2 and 4 ranks")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model with the whole vocabulary, and its processor, as ms-swift loads them."""
    import_external_file(str(PLUGIN))
    folder = tmp_path_factory.mktemp("model")
    builtin = builtin_processor(min_pixels=3136, max_pixels=100352)
    tiny_qwen2_vl().save_pretrained(folder)
    save_processor(folder, builtin.tokenizer, builtin.chat_template)
    model, processor = get_model_processor(str(folder), model_type="qwen2_vl")
    # The backend that the packs name: torchvision's values differ in the last bits.
    processor.image_processor = builtin.image_processor
    return model, processor


def test_every_demo_pack_is_what_its_packing_would_give(
    task: str, demo: dict[str, Path], loaded: Any, say: Say
) -> None:
    """The collator's rows of our packs, and of the same samples encoded by its template."""
    model, processor = loaded
    dialogue = {"use_chat_template": task != "captioning"}
    template = make_template(model, processor, "qwen2_vl", **dialogue)
    num_packs = 0
    for split in ("train", "val"):
        packs = open_packs(demo[task], split)
        vision = packs.task_encoder.encoder.vision
        limits = {"min_pixels": vision.min_pixels, "max_pixels": vision.max_pixels}
        plugged = make_template(model, processor, "qwen2_vl", **dialogue)
        dataset = packs_of_plugin(plugged, model.model_dir, demo[task], split)
        for number, pack in enumerate(packs):
            own = [own_sample(template, *sample, limits) for sample in stored_samples(pack)]
            theirs = template.data_collator([own])
            ours = plugged.data_collator([dataset[number]])
            assert ours.keys() == theirs.keys()
            assert_same(ours, theirs, f"{task} {split} {number}")
            num_packs += 1
    assert num_packs > 5
    say(f"{VERSION}: {num_packs} packs of {task} are what its own packing makes of their samples")


class Encoded(Dataset[dict[str, Any]]):
    """Samples that its template encodes when they are asked for, some with an image."""

    def __init__(self, template: Any) -> None:
        self._template = template

    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> dict[str, Any]:
        images = [Image.new("RGB", (80, 60 + 20 * (number % 4)), "red")] * min(number % 3, 1)
        question = "<image>" * len(images) + f"What is {number}?"
        turns = [{"role": "user", "content": question}, assistant("bar " * (1 + number % 30))]
        sample = self._template.encode({"messages": turns, "images": images}, **LENGTH)
        tokens = torch.tensor(sample["input_ids"])
        sample["mm_token_type_ids"] = (tokens == self._template.model.config.image_token_id).long()
        return sample


def test_packs_made_while_training_are_joined_as_by_its_collator(loaded: Any, say: Say) -> None:
    model, processor = loaded
    template = get_template(processor, template_type="qwen2_vl")
    template.set_mode("train")
    template.model = model
    packs = list(PackedDatasetWrapper(Encoded(template), template, 256, 16))
    assert sum(map(len, packs)) == 40
    for pack in packs:
        theirs = template.data_collator([[dict(sample) for sample in pack]])
        for sample in pack:
            inputs = {"input_ids": torch.tensor(sample["input_ids"])[None]}
            inputs["mm_token_type_ids"] = sample["mm_token_type_ids"][None]
            sample |= template._get_position_ids({**sample, **inputs})
        ours = padding_free_collator(pack)
        theirs["position_ids"] = torch.cat(
            [theirs.pop("text_position_ids")[None], theirs["position_ids"]]
        )
        assert theirs.keys() == ours.keys() - {"use_cache"}
        for name, value in theirs.items():
            assert torch.equal(torch.as_tensor(ours[name]).to(value.dtype), value), name
    say(f"{VERSION}: {len(packs)} packs of PackedDatasetWrapper joined alike by both collators")


#: Model type and template of ms-swift, and transformers' processors.
TRAINED: dict[str, tuple[str, str, tuple[Any, ...]]] = {
    "glm4v": ("glm4v", "glm4v", (Glm4vProcessor, Glm4vImageProcessor, Glm4vVideoProcessor)),
    "glm46v": ("glm4v", "glm4_5v", (Glm46VProcessor, Glm46VImageProcessor, Glm46VVideoProcessor)),
    "internvl3": (
        "internvl",
        "internvl_hf",
        (InternVLProcessor, GotOcr2ImageProcessor, InternVLVideoProcessor),
    ),
}


def save_its_processor(checkpoint: Path, whole: Any, images: Any, videos: Any) -> None:
    """The one that ms-swift loads; packs do without."""
    names = {"start_image": "<img>", "end_image": "</img>", "context_image": "<IMG_CONTEXT>"}
    names = {f"{name}_token": token for name, token in names.items()} | {"video_token": "<video>"}
    options = {"extra_special_tokens": names} if whole is InternVLProcessor else {}
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, **options)
    template = tokenizer.chat_template
    whole(images(), tokenizer, videos(), chat_template=template).save_pretrained(checkpoint)


@pytest.mark.parametrize("family", TRAINED)
def test_steps_are_those_of_the_samples_alone(family: str, tmp_path: Path, say: Say) -> None:
    model_type, template, processors = TRAINED[family]
    checkpoint, packed = several_packs(family, tmp_path)
    save_its_processor(checkpoint, *processors)
    names = {"model_type": model_type, "template": template}
    trainer = make_trainer(checkpoint, packed, tmp_path / "output", **names, max_steps=2)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    difference = check_losses(packed, checkpoint, losses)
    say(
        f"{VERSION}, {family}: loss before and after a step as of the samples alone "
        f"(to {difference:.0e})"
    )
