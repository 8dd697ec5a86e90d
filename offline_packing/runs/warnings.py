"""Warnings about data that is probably a mistake, shown by `plan` and in the report."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from offline_packing.config.packing import PackingConfig
from offline_packing.index.table import Index
from offline_packing.layouts.shards import splits_of_plan
from offline_packing.planner.pack_plan import PackPlan
from task_encoders.families.cost import most_positions

Hashes = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]


def run_warnings(config: PackingConfig, samples: Index, packs: PackPlan | None) -> list[str]:
    """A line each: what samples go without, what all have in common, and, of a plan, what stands in
    several splits. Reads the index part by part."""
    lines, total = samples.info.warnings, samples.info.num_samples
    several = np.count_nonzero(samples.array("num_turns") > 1) if config.task == "vqa" else 0
    if several:
        lines.append(
            f"{several:,} of {total:,} samples have several turns under task vqa, which is meant "
            "for one question; bmr is for conversations"
        )
    if total > 1 and _has_one_picture(samples):
        lines.append(f"all {total:,} samples have one image or video, by its file")
    lines.extend(_source_warnings(config.source_names(), samples))
    lines.extend(_position_warnings(config, samples))
    lines.extend(_split_warnings(config.output.split))
    splits = splits_of_plan(packs, config.output.split) if packs is not None else {}
    if packs is not None and len(splits) > 1:
        first, *others = splits
        in_first = _packed(packs, splits[first], total)
        for name in others:
            shared = _shared(samples, _packed(packs, splits[name], total), in_first)
            if any(count for count, _ in shared):
                media, same = (f"{count:,} of {whole:,}" for count, whole in shared)
                lines.append(
                    f"split {name}: {media} images and videos (by file) and {same} samples (by "
                    f"text and file) stand in split {first}, too"
                )
    return lines


def _source_warnings(names: Sequence[str], samples: Index) -> Iterator[str]:
    """Warn of sources that hold samples of an earlier one: copies are trained on twice."""
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
            f"(by text and file) stand in source {names[one]}, too"
        )


def _position_warnings(config: PackingConfig, samples: Index) -> Iterator[str]:
    """Warn of packs longer than the checkpoint's positions, which restart with each sample."""
    limit, seq_length = most_positions(config.model.processor), config.pack.seq_length
    if limit is not None and seq_length > limit:
        longer = np.count_nonzero(samples.array("num_tokens") > limit)
        yield (
            f"pack.seq_length {seq_length:,} > max_position_embeddings {limit:,} of "
            f"{config.model.processor}; {longer:,} of {samples.info.num_samples:,} samples are "
            "longer than that (positions restart with each sample)"
        )


def _split_warnings(split: Mapping[str, float]) -> Iterator[str]:
    """Warn of shares that are probably a mistake: training reads train."""
    name, share = max(split.items(), key=lambda item: item[1])
    train = split.get("train", 0)
    if share > train and len(split) > 1:
        yield (
            f"output.split gives {name} {share:.1%} of the packs and train {train:.1%}; training "
            "reads train"
        )


def _packed(packs: PackPlan, own: range, num_samples: int) -> Flags:
    """(num_samples,) the samples of the index in some packs."""
    flags = np.zeros(num_samples, bool)
    start, stop = packs.pack_offsets[own.start], packs.pack_offsets[own.stop]
    flags[packs.sample_ids[start:stop]] = True
    return flags


def _shared(samples: Index, own: Flags, others: Flags) -> list[tuple[int, int]]:
    """Count the different media, and samples, of some samples that stand in the others, and all of
    them: of media, then of samples. Only those of the first samples are held."""
    counts = []
    for hashes in (_media_hashes, _sample_hashes):
        held = np.unique(np.concatenate([np.empty(0, np.uint64), *hashes(samples, own)]))
        found = np.zeros(len(held) + 1, bool)
        for some in hashes(samples, others):
            places = np.searchsorted(held, some)
            is_held = held[np.minimum(places, len(held) - 1)] == some if len(held) else some > some
            found[places[is_held]] = True
        counts.append((int(np.count_nonzero(found)), len(held)))
    return counts


def _sample_hashes(samples: Index, chosen: Flags) -> Iterator[Hashes]:
    first = 0
    for part in samples.parts("sample_hash"):
        yield part["sample_hash"].to_numpy()[chosen[first : first + len(part)]]
        first += len(part)


def _media_hashes(samples: Index, chosen: Flags) -> Iterator[Hashes]:
    """Hash of each image and video of some samples, by its address."""
    first = 0
    for number, count in enumerate(samples.info.part_rows):
        own = chosen[first : first + count]
        first += count
        if own.any():
            hashes, owners = _locator_hashes(samples, number)
            yield hashes[own[owners]]


def _locator_hashes(samples: Index, number: int) -> tuple[Hashes, npt.NDArray[np.int64]]:
    """(num_media,) of a part: a hash of where each lies, and the row of its sample."""
    names = (f"media.list.element.{name}" for name in ("container", "column", "offset"))
    rows = pq.ParquetFile(samples.paths[number]).read(columns=["source_id", *names])
    media = rows["media"].combine_chunks()
    owners = np.repeat(np.arange(len(rows)), media.value_lengths().to_numpy())
    flat = media.flatten()
    container, column = (_hash_texts(flat.field(name)) for name in ("container", "column"))
    offset = flat.field("offset").to_numpy().astype(np.uint64)
    mixed = rows["source_id"].to_numpy()[owners].astype(np.uint64)
    for numbers in (container, column, offset):  # SplitMix64's multiplier; it wraps around
        mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9) + numbers
    return mixed, owners


def _hash_texts(texts: pa.Array) -> Hashes:
    """(num_texts,) the sum of each byte times a number drawn for its place, modulo 2**64."""
    texts = texts.cast(pa.large_string())
    lengths = pc.binary_length(texts).to_numpy().astype(np.int64)
    offsets = np.frombuffer(texts.buffers()[1], np.int64)[texts.offset :][: len(texts) + 1]
    data = np.frombuffer(texts.buffers()[2] or b"", np.uint8)[offsets[0] : offsets[-1]]
    starts = offsets[:-1] - offsets[0]
    places = np.arange(len(data)) - np.repeat(starts, lengths)
    drawn = np.random.default_rng(0).integers(2**64, size=lengths.max(initial=0), dtype=np.uint64)
    sums = np.zeros(len(data) + 1, np.uint64)
    np.cumsum((data + np.uint64(1)) * drawn[places], out=sums[1:])
    return sums[starts + lengths] - sums[starts]


def _has_one_picture(samples: Index) -> bool:
    """Whether several samples have media, and all the same; ends where two differ."""
    first: Hashes | None = None
    count = 0
    for number in range(len(samples.paths)):
        found, _ = _locator_hashes(samples, number)
        first = found[:1] if first is None and len(found) else first
        if first is not None and (found != first).any():
            return False
        count += len(found)
    return count > 1
