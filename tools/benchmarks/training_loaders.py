"""The same samples in three forms: padded to the longest of a batch, packed online, packed offline.

All three are rows of the same kind for the same model and kernels; only the content of a row
differs. A padded batch of B samples is a row of B segments of the same length, padding included.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.energon import (
    DefaultTaskEncoder,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from torch.nn import functional as F

from offline_packing.layouts.container import read_packs
from offline_packing.layouts.energon_metadata import index_pack_folder
from offline_packing.planner.strategies.peers.placing import first_fit_decreasing
from offline_packing.runs.manifest import require_manifest
from offline_packing.storage.tars import TarShardWriter
from task_encoders.concatenate import PackedRow
from task_encoders.energon_samples import (
    PackedBatch,
    PackedRowSample,
    batch_rows,
    merge_row_samples,
)
from task_encoders.families import model_options
from task_encoders.loading.packed_dataset import get_packed_train_dataset
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.packs.pack import Pack, restore_pack
from task_encoders.packs.pack_format import JSON_PART, PackedSubSample, media_part_names, pack_json
from task_encoders.samples import SourceSample
from task_encoders.settings import PackingSettings


def write_unpacked(packed: Path, folder: Path, seed: int = 0) -> int:
    """Write the samples of a packed folder's train split one by one, in random order.

    Every sample becomes a pack, so that the same task encoder reads it. Returns how many.
    """
    singles = [
        single
        for shard in require_manifest(packed).shards
        if shard.split == "train"
        for pack in read_packs(packed, packed / shard.name)
        for single in _singles(pack)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "train-000000.tar", "wb") as file:
        writer = TarShardWriter(file)
        for i in np.random.default_rng(seed).permutation(len(singles)):
            writer.add(f"s{i:08d}", singles[i])
        writer.finish()
    index_pack_folder(folder)
    return len(singles)


def _singles(pack: Pack) -> list[list[tuple[str, bytes]]]:
    """Members of one pack per sub-sample."""
    restored = restore_pack(pack.record, pack.key)
    assert restored.task is not None  # written by this project
    singles = []
    for sample, num_tokens in zip(restored.sub_samples, restored.num_tokens or (), strict=True):
        assert isinstance(sample, SourceSample)
        extensions = tuple(name.rpartition(".")[2] for name in sample.media)
        media = [pack.media[name] for name in sample.media]
        record = pack_json([PackedSubSample(sample, extensions, num_tokens)], restored.task)
        names = media_part_names(extensions)
        singles.append([*zip(names, media, strict=True), (JSON_PART, record)])
    return singles


class PaddingEncoder(PackedTaskEncoder):
    """A batch is padded to its longest sample."""

    @stateless
    def batch(self, samples: list[PackedRowSample]) -> PackedBatch:
        """B samples to one row of B equally long segments."""
        longest = max(len(sample.row.tokens) for sample in samples)
        pad_id = self.encoder.pad_token_id
        padded = [replace_row(sample, pad_row(sample.row, longest, pad_id)) for sample in samples]
        return batch_rows(padded)


def replace_row(sample: PackedRowSample, row: PackedRow) -> PackedRowSample:
    """The sample with another row."""
    return PackedRowSample.derive_from(
        sample, row=row, sub_sample_keys=sample.sub_sample_keys, dropped=sample.dropped
    )


def pad_row(row: PackedRow, length: int, pad_token_id: int) -> PackedRow:
    """A row of one segment, padded inside that segment."""
    extra = length - len(row.tokens)
    after = int(row.position_ids.max()) + 1 + torch.arange(extra)
    return replace(
        row,
        tokens=F.pad(row.tokens, (0, extra), value=pad_token_id),
        loss_weights=F.pad(row.loss_weights, (0, extra)),
        attn_mask=F.pad(row.attn_mask, (0, extra), value=True),
        position_ids=torch.cat([row.position_ids, after.expand(3, -1)], dim=1),
        cu_lengths=torch.tensor([0, length], dtype=torch.int32),
    )


class JoiningEncoder(PackedTaskEncoder):
    """Joins packs of one sample each by Energon's own packing hooks, first-fit-decreasing."""

    def select_samples_to_pack(self, samples: list[PackedRowSample]) -> list[list[PackedRowSample]]:
        lengths = np.array([len(sample.row.tokens) for sample in samples])
        packs = first_fit_decreasing(lengths, self.seq_length)
        cut = np.split(packs.sample_ids, packs.pack_offsets[1:-1])
        return [[samples[number] for number in pack] for pack in cut]

    @stateless
    def pack_selected_samples(self, samples: list[PackedRowSample]) -> PackedRowSample:
        return merge_row_samples(samples)

    def build_batch(self, dataset: Any, **options: Any) -> Any:
        return DefaultTaskEncoder.build_batch(self, dataset, **options)


def build_loader(
    mode: str,
    *,
    packed: Path,
    unpacked: Path,
    num_workers: int,
    padded_batch_size: int,
    buffer_size: int,
) -> Iterable[PackedBatch]:
    """Make one pass over the samples in a mode of MODES, or over packs that share prefixes
    ("shared")."""
    manifest = require_manifest(packed)
    model = model_options(**manifest.config["model"])
    options: dict[str, Any] = {"model": model}
    task = manifest.task
    options["settings"] = PackingSettings(packed=True, vqa=task == "vqa", bmr=task == "bmr")
    options["seq_length"] = manifest.seq_length
    worker_config = WorkerConfig(rank=0, world_size=1, num_workers=num_workers)
    if mode in ("offline", "shared"):
        reader = PackedTaskEncoder(**options, trees=manifest.version == 2)
        dataset = get_packed_train_dataset(
            packed, reader, worker_config=worker_config, repeat=False
        )
        return get_savable_loader(dataset)
    encoder, batch_size, packing_buffer_size = {
        "padded": (PaddingEncoder, padded_batch_size, None),
        "online": (JoiningEncoder, 1, buffer_size),
    }[mode]
    dataset = get_train_dataset(
        unpacked,
        task_encoder=encoder(**options),
        batch_size=batch_size,
        packing_buffer_size=packing_buffer_size,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        shuffle_over_epochs_multiplier=None,
        parallel_shard_iters=1,
        worker_config=worker_config,
        repeat=False,
    )
    return get_savable_loader(dataset)


MODES: Sequence[str] = ("padded", "online", "offline")
