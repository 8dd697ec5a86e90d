"""NeMo AutoModel on packs, and against what its own packing makes of the same samples."""

import io
from collections.abc import Callable
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from nemo_automodel._transformers.utils import resolve_get_rope_index
from nemo_automodel.components.datasets.vlm.collate_fns import neat_packed_vlm_collater
from nemo_automodel.components.datasets.vlm.datasets import PreTokenizedDatasetWrapperConfig
from nemo_automodel.components.datasets.vlm.loader import VlmDataloaderConfig, VlmProcessorConfig
from nemo_automodel.components.datasets.vlm.neat_packing_vlm import (
    NeatPackConfig,
    PackedDatasetWrapperConfig,
)
from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
from nemo_automodel.components.loss.utils import calculate_loss
from nemo_automodel.components.models.common.packing import configure_packing_for_models
from nemo_automodel.components.utils.model_utils import filter_forward_kwargs
from PIL import Image, ImageOps
from torch import distributed
from torch.utils.data import DataLoader
from transformers import AutoModelForImageTextToText, Qwen2VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

from launch.data_manifest import read_packed_data
from launch.trainers.automodel import PacksConfig
from offline_packing.demo.training import tiny_qwen2_vl
from task_encoders.families.builtin_processor import builtin_processor
from task_encoders.samples import SourceSample, Turn
from task_encoders.text.pieces import to_chat
from tests.helpers.peers import (
    assert_same,
    check_order,
    largest_difference,
    open_packs,
    our_losses,
    stored_samples,
    task_environment,
    two_losses,
)

Say = Callable[[str], None]
VERSION = f"NeMo AutoModel {version('nemo-automodel')}"
#: A caption behind its images, without the headers of a dialogue.
CAPTION_TEMPLATE = (
    "{% for part in messages[0].content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "<|im_end|>"
)


def _processor(**_: Any) -> Any:
    return builtin_processor()


def make_loader(
    packed: Path, split: str = "train", rank: int = 0, world_size: int = 1, **options: Any
) -> DataLoader[Any]:
    """Packs through AutoModel's loader, as a recipe makes it."""
    config = VlmDataloaderConfig(
        dataset_config=PacksConfig(str(packed), split),
        processor_config=VlmProcessorConfig(_processor),  # it asks for one
        pretokenization=PreTokenizedDatasetWrapperConfig(),
        packing=NeatPackConfig(read_packed_data(packed).seq_length),
        shuffle=False,
    )
    built = config.build(
        pretrained_model_name_or_path=None,  # the packs name theirs
        dp_rank=rank,
        dp_world_size=world_size,
        batch_size=1,
        **options,
    )
    loader: DataLoader[Any] = built.dataloader
    return loader


def upright(data: bytes) -> Image.Image:
    """AutoModel does not turn images by their EXIF orientation."""
    return ImageOps.exif_transpose(Image.open(io.BytesIO(data)))


def conversation(sample: SourceSample, media: list[bytes]) -> dict[str, Any]:
    """A sample as AutoModel's datasets have it."""
    images = [{"type": "image", "image": upright(data)} for data in media]
    if sample.task == "captioning":
        content = [*images, {"type": "text", "text": sample.turns[0].answer}]
        return {"conversation": [{"role": "assistant", "content": content}]}
    messages, rest = to_chat(sample), iter(images)
    for message in messages:
        if isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]
        message["content"] = [
            next(rest) if part["type"] == "image" else part for part in message["content"]
        ]
    return {"conversation": messages}


def without_last_newline(result: Any, processor: Any) -> Any:
    """What the template puts behind the very last end of a turn."""
    for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
        result[name] = result[name][:, :-1]
    return result


def own_batch(samples: list[Any], processor: Any, model: Any, **options: Any) -> dict[str, Any]:
    """What AutoModel makes of samples in one pack."""
    tokenized = PreTokenizedDatasetWrapperConfig(max_retries=1, **options).build(
        dataset=samples, processor=processor
    )
    packed = PackedDatasetWrapperConfig(pack_size=1 << 20).build(
        inner_dataset=tokenized,
        bins=[list(range(len(samples)))],
        padding_idx=0,
        get_rope_index=resolve_get_rope_index(model),
    )
    return neat_packed_vlm_collater([packed[0]])


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


@pytest.mark.parametrize("task", ["captioning", "vqa", "bmr"])
def test_every_demo_pack_is_what_its_packing_would_give(
    task: str, demo: dict[str, Path], loaded: Any, monkeypatch: pytest.MonkeyPatch, say: Say
) -> None:
    model, processor = loaded
    for name, value in task_environment(task).items():
        monkeypatch.setenv(name, value)
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


def test_its_placeholder_images_are_attended(loaded: Any, say: Say) -> None:
    """AutoModel adds an image to every sample without one, so that no rank's vision tower idles,
    and masks it; its packing takes the mask away again. Packs have none."""
    model, processor = loaded
    text = {"conversation": to_chat(plain_dialogue())}
    batch = own_batch([text, text], processor, model)
    image = batch["input_ids"][0] == model.config.image_token_id
    attended = batch["attention_mask"][0, 0]
    assert image.any()
    assert attended[-1][image].any()  # by the last token, in its sample
    say(f"{VERSION}: its placeholder images are attended to once packed; packs have none")


def plain_dialogue() -> SourceSample:
    turns = (Turn("What is two and two?", "Four."),)
    return SourceSample(key="text", task="bmr", turns=turns)


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
    """Through AutoModel's packing contract, loss and arguments of the model; its recipe needs a
    GPU."""
    checkpoint, packed = case
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, attn_implementation="sdpa")
    contract = configure_packing_for_models([model])

    def loss_of(batch: dict[str, Any]) -> torch.Tensor:
        labels = batch.pop("labels")
        output = model(**filter_forward_kwargs(model, batch), use_cache=False)
        loss: torch.Tensor = calculate_loss(
            MaskedCrossEntropy(),
            logits=output.logits,
            labels=labels,
            model=model,
            num_label_tokens=int((labels != -100).sum()),
        )
        return loss

    losses = two_losses(model, make_loader(packed, packing_contract=contract), loss_of)
    difference = largest_difference(our_losses(packed, checkpoint, tmp_path / "ours"), losses)
    say(f"{VERSION}: loss before and after a step as launch.train's (to {difference:.0e})")
