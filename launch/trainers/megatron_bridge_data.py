"""The rows that Megatron-Bridge's `vlm_step` reads; `megatron_bridge` has the recipes."""

from pathlib import Path
from typing import Any

import torch
from megatron.bridge.data.base import DatasetBuildContext
from megatron.bridge.models.qwen_vl.qwen25_vl_provider import Qwen25VLModelProvider
from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs
from megatron.energon import WorkerConfig

from launch.data.packed_data import read_packed_data
from launch.loop.loss import shift_labels
from launch.trainers.megatron_lm_data import DataIterator
from task_encoders.energon_samples import PackedBatch
from task_encoders.families.qwen_vl import QwenVLEncoder
from task_encoders.loading.packed_dataset import (
    get_packed_loader,
    get_packed_train_dataset,
    get_packed_val_dataset,
)
from task_encoders.model_inputs import to_packed_seq_params, to_transformers_kwargs
from task_encoders.packed_task_encoder import Qwen2VLTaskEncoder
from task_encoders.sample_encoder import IGNORE_INDEX

_MEDIA = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
_BOUNDARIES = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


def to_vlm_batch(batch: PackedBatch) -> dict[str, Any]:
    """A row as Bridge's own collator packs the same samples.

    Returns:
        tokens, labels (shifted), loss_mask and position_ids (1, S), the boundaries (P + 1,) int32,
        those of padded samples only if there is padding, max_seqlen_q/kv () int32 on the host.
        Positions count from the start of each sample; the models find M-RoPE's three themselves.
    """
    row = to_transformers_kwargs(batch)
    labels = shift_labels(batch.labels)
    params = to_packed_seq_params(batch)
    boundaries = {name: getattr(params, name) for name in _BOUNDARIES}
    longest = torch.tensor(params.max_seqlen_q, dtype=torch.int32)
    return {
        "tokens": batch.tokens,
        "labels": labels,
        "loss_mask": (labels != IGNORE_INDEX).float(),
        "attention_mask": None,
        "position_ids": row["position_ids"][:1].reshape(1, -1),
        **{name: value for name, value in boundaries.items() if value is not None},
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
        "visual_inputs": GenericVisualInputs(**{n: row[n] for n in _MEDIA if n in row}),
    }


class VLMIterator(DataIterator):
    """Rows without end, with the state that Bridge keeps in its checkpoints.

    Args:
        places_videos: whether the model places videos without the seconds of each step, which rows
            of packs lack.
    """

    def __init__(self, loader: Any, *, places_videos: bool) -> None:
        super().__init__(loader)
        self._places_videos = places_videos

    def __next__(self) -> Any:
        batch = super().__next__()
        if len(batch.video_grid_thw) and not self._places_videos:
            raise ValueError("Bridge places Qwen2.5-VL's videos by seconds, not kept in packs")
        return to_vlm_batch(batch)

    def save_state(self) -> Any:
        """Energon's classes, which Bridge's reader of states knows; it refuses some tensors."""
        return self._loader.save_state_rank()

    def restore_state(self, state: Any) -> None:
        """Go on where a state was saved. Only before the first row."""
        self._loader.restore_state_rank(state)


def build_iterators(
    path: str, model: Any, context: DatasetBuildContext, *, num_workers: int, **padding: Any
) -> tuple[VLMIterator | None, VLMIterator | None]:
    """To train and to validate on, if Bridge asks for samples of both; on every rank, as each of
    Bridge's ranks reads for itself.

    Args:
        model: Bridge's model provider.
        padding: of the task encoder.

    Raises:
        PackingSettingsError: the environment or the parallel sizes contradict the packs.
        ValueError: the packs' images are cut into other patches than the model's.
    """
    data = read_packed_data(Path(path))
    task_encoder = Qwen2VLTaskEncoder(seq_length=data.seq_length, model=data.model, **padding)
    patch, encoder = model.vision_config.patch_size, task_encoder.encoder
    if not isinstance(encoder, QwenVLEncoder) or encoder.vision.patch_size != patch:
        raise ValueError(f"{path}: {data.model.family} does not fit the model's patches of {patch}")
    ranks = context.pg_collection.dp
    config = WorkerConfig(rank=ranks.rank(), world_size=ranks.size(), num_workers=num_workers)
    places_videos = not isinstance(model, Qwen25VLModelProvider)

    def iterator(get_dataset: Any, num_samples: int) -> VLMIterator | None:
        if not num_samples:
            return None
        loader = get_packed_loader(get_dataset(path, task_encoder, worker_config=config))
        return VLMIterator(loader, places_videos=places_videos)

    return (
        iterator(get_packed_train_dataset, context.train_samples),
        iterator(get_packed_val_dataset, context.valid_samples),
    )
