"""NeMo AutoModel's own packing of samples, and its loader of packs."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from torch.utils.data import DataLoader

from launch.data.packed_data import read_packed_data
from launch.trainers.automodel import PacksConfig
from task_encoders.families.builtin_processor import builtin_processor
from task_encoders.samples import SourceSample
from task_encoders.text.pieces import to_chat
from tests.helpers.peers import two_losses

#: A caption after its media, without the headers of a dialogue.
CAPTION_TEMPLATE = (
    "{% for part in messages[0].content %}{% if part.type == 'text' %}{{ part.text }}{% else %}"
    "<|vision_start|><|{{ part.type }}_pad|><|vision_end|>{% endif %}{% endfor %}<|im_end|>"
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


def conversation(
    sample: SourceSample,
    media: list[bytes],
    as_video: Callable[[bytes], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """A sample as AutoModel's datasets have it; `as_video` makes a video's part of a content."""
    count = len(sample.images)
    images = [{"type": "image", "image": upright(data)} for data in media[:count]]
    videos = [as_video(data) for data in media[count:] if as_video]
    if sample.task == "captioning":
        content = [*images, *videos, {"type": "text", "text": sample.turns[0].answer}]
        return {"conversation": [{"role": "assistant", "content": content}]}
    messages = to_chat(sample)
    rest = {"image": iter(images), "video": iter(videos)}
    for message in messages:
        if isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]
        message["content"] = [
            next(rest[part["type"]]) if part["type"] in rest else part
            for part in message["content"]
        ]
    return {"conversation": messages}


def without_last_newline(result: Any, processor: Any) -> Any:
    """The tokens that the template puts after the very last end of a turn."""
    for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
        result[name] = result[name][:, :-1]
    return result


def own_batch(samples: list[Any], processor: Any, model: Any, **options: Any) -> dict[str, Any]:
    """One pack of these samples as AutoModel makes it."""
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


def losses_of_packs(model: Any, packed: Path) -> list[float]:
    """Losses before and after a step through AutoModel's packing contract, loss and arguments of
    the model; its recipe needs a GPU."""
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

    return two_losses(model, make_loader(packed, packing_contract=contract), loss_of)
