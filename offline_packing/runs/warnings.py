"""Warnings of probable mistakes in a run's samples, sources and settings."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from offline_packing.config.packing import PackingConfig
from offline_packing.index.records import places_of_equal
from offline_packing.index.table import Index
from offline_packing.layouts.shards import samples_of_splits
from offline_packing.planner.pack_plan import PackPlan
from task_encoders.families.base.cost import most_positions

Hashes = npt.NDArray[np.uint64]


def run_warnings(config: PackingConfig, samples: Index, packs: PackPlan | None) -> Iterator[str]:
    """Yield warnings, a line each, on the samples, their sources and the settings, and with a plan
    on its splits. Reads the index part by part."""
    yield from samples.info.warnings
    total, shares = samples.info.num_samples, config.output.split
    seq_length = config.pack.seq_length
    is_vqa = config.task == "vqa"
    if several := np.count_nonzero(samples.array("num_turns") > 1) if is_vqa else 0:
        yield (
            f"{several:,} of {total:,} samples have several turns under task vqa, which is meant "
            "for one question; bmr is for conversations"
        )
    yield from _source_warnings(config.source_names(), samples)
    limit = most_positions(config.model.processor)
    if limit is not None and seq_length > limit:
        longer = np.count_nonzero(samples.array("num_tokens") > limit)
        yield (
            f"pack.seq_length {seq_length:,} > max_position_embeddings {limit:,} of "
            f"{config.model.processor}; {longer:,} of {total:,} samples are longer than that "
            "(positions restart with each sample)"
        )
    if config.pack.share_prefixes is not None:
        columns = samples.table("prefix_media", "prefix_hash")
        media, hashes = (column.to_numpy() for column in columns.columns)
        is_alone = np.zeros(total, bool)  # shows the media of others, but shares no prefix
        is_alone[places_of_equal(media)] = True
        is_alone[places_of_equal(hashes)] = False
        if count := np.count_nonzero(is_alone & (media != 0)):
            yield (
                f"{count:,} of {total:,} samples show images or videos of other samples, but "
                "share no prefix, as other text is before these; put images and videos at the "
                "beginning of the first prompt, below one system message for all"
            )
    name, share = max(shares.items(), key=lambda item: item[1])
    train = shares.get("train", 0)
    if not train:
        yield (
            f"output.split has no train ({', '.join(shares)}); training reads train: name one of "
            "them so, unless the output is for validation alone"
        )
    elif share > train:
        yield (
            f"output.split gives {name} {share:.1%} of the samples and train {train:.1%}; training "
            "reads train"
        )
    if packs is not None:
        yield from _split_warnings(config, samples, packs)


def _source_warnings(names: Sequence[str], samples: Index) -> Iterator[str]:
    """Warn of sources with samples of an earlier source, which are trained twice."""
    if len(names) == 1:
        return
    hashes, owners = samples.array("sample_hash"), samples.array("source_id")
    order = np.argsort(hashes, kind="stable")
    is_first = np.diff(hashes[order], prepend=~hashes[order[:1]]) != 0
    first_of = order[np.maximum.accumulate(np.where(is_first, np.arange(len(order)), 0))]
    pairs = np.stack([owners[first_of], owners[order]])
    different, counts = np.unique(pairs[:, pairs[0] != pairs[1]], axis=1, return_counts=True)
    for (one, other), count in zip(different.T.tolist(), counts.tolist(), strict=True):
        yield (
            f"source {names[other]}: {count:,} of {np.count_nonzero(owners == other):,} samples "
            f"are also in source {names[one]}"
        )


def _split_warnings(config: PackingConfig, samples: Index, packs: PackPlan) -> Iterator[str]:
    """Warn of empty splits, and of media and samples that groups leave in several splits."""
    shares = config.output.split
    splits = {name: ids for name, _, ids in samples_of_splits(packs, shares)}
    for name in [name for name, own in splits.items() if not len(own)]:
        yield (
            f"split {name} is empty: no sample, with all that it leads to by images and videos or "
            f"its group, drew its share of {shares[name]:.1%}; set another output.split_seed, a "
            "larger share in output.split, or source.fields.group, which counts instead of images "
            "and videos"
        )
    first, *others = splits
    for name in others if config.names_groups else ():
        chosen = np.zeros((2, samples.info.num_samples), bool)
        for flags, own in zip(chosen, (splits[name], splits[first]), strict=True):
            flags[own] = True
        shared = [
            count_shared(*(hashes_of(samples, column, flags) for flags in chosen))
            for column in ("media_hash", "sample_hash")
        ]
        if any(count for count, _ in shared):
            media, same = (f"{count:,} of {whole:,}" for count, whole in shared)
            yield (
                f"split {name}: {media} images and videos and {same} samples are also in "
                f"split {first}; without source.fields.group they are on one side"
            )


def count_shared(own: Iterable[Hashes], others: Iterable[Hashes]) -> tuple[int, int]:
    """Count the distinct hashes of `own` that are also among `others`; return the count and the
    number of all. Both come in parts; only `own` is in memory."""
    held = np.unique(np.concatenate([np.empty(0, np.uint64), *own]))
    found = np.zeros(len(held), bool)
    for part in others:
        found |= np.isin(held, part)
    return int(np.count_nonzero(found)), len(held)


def hashes_of(samples: Index, column: str, chosen: npt.NDArray[np.bool_]) -> Iterator[Hashes]:
    """Yield a column of hashes of some samples, or of their media, part by part."""
    first = 0
    for part in samples.parts(column):
        own = part[column].filter(pa.array(chosen[first : first + len(part)]))
        first += len(part)
        yield (pc.list_flatten(own) if column == "media_hash" else own).to_numpy()
