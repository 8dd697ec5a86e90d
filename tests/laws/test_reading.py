"""Packs are read alike by their numbers and by Energon, as they were measured; and the loss of a
pack is that of its samples alone."""

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from launch.loop.loss import shift_labels
from launch.model.prefix_trees import segment_params
from launch.model.segments import isolate_segments, use_tree_attention
from launch.model.transformers_model import PackedTransformersModel
from offline_packing.demo.training import tiny_qwen2_vl
from offline_packing.layouts.shards import COLUMNS, read_planned
from offline_packing.runs.artifacts import open_index
from offline_packing.runs.run import Run, open_encoder, open_sources
from task_encoders.concatenate import split_row
from task_encoders.energon_samples import PackedBatch
from task_encoders.loading.packed_dataset import get_packed_train_dataset, get_packed_val_dataset
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.sample_encoder import EncodedSample
from task_encoders.samples import IGNORE_INDEX
from tests.helpers.datasets import index_rows
from tests.helpers.energon_batches import assert_same, batches_of
from tests.helpers.peers import inputs_of
from tests.helpers.tiny_checkpoints import packed_batch
from tests.helpers.tiny_families import tiny_model
from tests.laws.kills import DRAWN, EIGHT, FAMILIES, FORMATS, PLANS, sample_of
from tests.scenarios import SCENARIOS, packs_of
from tests.world import at, copy_of, task_encoder

DATASETS: dict[str, Callable[..., Any]] = {
    "train": get_packed_train_dataset,
    "val": lambda path, repeat, **options: get_packed_val_dataset(path, **options),
}
#: Layouts of other trainers are typed as theirs, and Energon knows no fsspec.
BY_ENERGON = [
    name for name, one in SCENARIOS.items() if one.layout == "energon" and one.storage != "memory"
]
#: transformers has no model of the other family.
OF_TRANSFORMERS = [name for name in SCENARIOS if name != "llava_onevision2"]
#: Scenarios whose packs hold the samples of other ones, stored elsewhere or in other shards.
STORED = (
    *("our packs", "index", "from memory", "to S3", "small shards", "refer to tars"),
    "trees, referred to, in memory",
)


def folders_of(run: Run) -> Iterator[tuple[str, PackedFolder]]:
    """Return the packs of each split."""
    encoder = task_encoder(run)
    for split in run.config.output.split:
        yield split, PackedFolder(run.workspace.root, encoder, split=split)


def test_rows_are_as_they_were_measured(whole: Run) -> None:
    measured = {
        row["key"]: (row["num_tokens"], row["num_loss_tokens"]) for row in index_rows(whole)
    }
    found = 0
    for _, folder in folders_of(whole):
        for number in range(len(folder)):
            row = folder.row(number)
            assert not row.dropped
            assert len(row.row.tokens) <= whole.config.pack.seq_length
            parts = split_row(row.row)
            for key, part in zip(row.sub_sample_keys, parts, strict=True):
                counts = int((~part.attn_mask).sum()), int((part.labels != IGNORE_INDEX).sum())
                assert counts == measured[key.partition("#")[0]], key
                found += 1
    assert found > 3


@pytest.mark.parametrize("name", sample_of(BY_ENERGON, *PLANS, *FORMATS, *DRAWN, *FAMILIES))
def test_energon_and_numbers_give_the_same(whole: Run, place: str) -> None:
    run = copy_of(whole, place)
    check_energon(run, workers=0)


@pytest.mark.parametrize("name", sample_of(EIGHT, *EIGHT[3:]))
def test_energons_workers_give_the_same(whole: Run) -> None:
    check_energon(whole, workers=1)


def check_energon(run: Run, workers: int) -> None:
    """Each pack once, in any order: `pack.order` puts those of a step side by side."""
    for split, folder in folders_of(run):
        if split in DATASETS:
            path, own = run.config.output.path, {"dataset_of": DATASETS[split]}
            theirs = batches_of(path, task_encoder(run), workers, **own)
            ours = [folder.batch([number]) for number in range(len(folder))]
            assert_same(*(sorted(found, key=lambda one: one.__key__) for found in (ours, theirs)))


def encoded_alone(run: Run, keys: Sequence[str], scratch: Path) -> list[EncodedSample]:
    """Encode samples as their source has them."""
    sources, encoder = open_sources(at(run, scratch).config), open_encoder(run.config.model)
    rows = {row.key: row for row in read_planned(open_index(run).table(*COLUMNS))}
    samples = []
    for key in keys:
        row = rows[key.partition("#")[0]]  # copies have a number
        source, count = sources[row.source_id], len(row.media) - row.num_videos
        media = [source.read_media(one) for one in row.media]
        if row.part is None:
            sample = source.read_sample(row.key, row.json, count, row.num_videos)
        else:
            sample = row.part.read(source, row.key)
        samples.append(encoder.encode(sample, media[:count], media[count:]))
    return samples


@functools.cache
def model_of(family: str, token_ids: tuple[tuple[str, int], ...], use: str) -> Any:
    """Return a tiny model whose weights all count; equal ones for each use."""
    if max(dict(token_ids).values()) > 1024:  # of the real vocabulary
        model = tiny_qwen2_vl(weight_std=0.08).eval()
    else:
        model = tiny_model(family, dict(token_ids))
    if use != "alone":
        isolate_segments(model)
    if use == "trees":
        use_tree_attention(model)
    return model


def losses_packed(model: Any, batch: PackedBatch) -> torch.Tensor:
    """Return the loss of each labelled token of a row, as `launch` trains it."""
    labels = shift_labels(batch.labels)
    losses = PackedTransformersModel(model, torch.float32)(batch, segment_params(batch), labels)
    found: torch.Tensor = losses[labels != IGNORE_INDEX]
    return found


def losses_alone(model: Any, inputs: dict[str, Any], labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of each labelled token of a sample, as anyone would train it: the model
    finds the positions itself."""
    places = (labels[1:] != IGNORE_INDEX).nonzero().flatten()
    inputs = {name: value for name, value in inputs.items() if name != "labels"}
    logits = model(**inputs, logits_to_keep=places).logits[0].float()
    return F.cross_entropy(logits, labels[places + 1], reduction="none")


@pytest.mark.parametrize("name", sample_of(OF_TRANSFORMERS, *PLANS, *FORMATS, *DRAWN, *STORED))
@torch.no_grad()
def test_the_loss_of_a_pack_is_that_of_its_samples(whole: Run, tmp_path: Path) -> None:
    """Of the pack with most samples, each read from the source again."""
    split, folder = next(folders_of(whole))
    sizes = [len(pack.keys) for own, pack in packs_of(whole) if own == split]
    batch = folder.batch([sizes.index(max(sizes))])
    samples = encoded_alone(whole, batch.sub_sample_keys, tmp_path)
    assert len(samples) > 1
    family, encoder = whole.config.model.family, open_encoder(whole.config.model)
    make = functools.partial(model_of, family, tuple(encoder.media_token_ids.items()))
    losses = [
        losses_alone(
            make("alone"), inputs_of(folder, packed_batch([one])), torch.tensor(one.labels)
        )
        for one in samples
    ]
    model = make("trees" if batch.parents.numel() else "packed")
    packed = losses_packed(model, batch)
    torch.testing.assert_close(packed, torch.cat(losses), atol=1e-4, rtol=0)
    weights = torch.cat([torch.tensor(one.loss_weights) for one in samples])
    assert torch.equal(batch.loss_mask[batch.loss_mask > 0], weights[weights > 0])
