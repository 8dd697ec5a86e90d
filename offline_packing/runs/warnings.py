"""What data hold and was hardly meant: told by `plan` and in the report."""

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from offline_packing.config.packing import PackingConfig
from offline_packing.index.table import Index
from offline_packing.layouts.shards import splits_of_plan
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.sources.roots.listing import container_hash

Hashes = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]
_HASHED: Final = ("source_id", "media")


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
    splits = splits_of_plan(packs, config.output.split) if packs is not None else {}
    if packs is not None and len(splits) > 1:
        first, *others = splits
        in_first = _rows(packs, splits[first], total)
        for name in others:
            shared = _shared(samples, _rows(packs, splits[name], total), in_first)
            if any(count for count, _ in shared):
                media, same = (f"{count:,} of {whole:,}" for count, whole in shared)
                lines.append(
                    f"split {name}: {media} images and videos (by file) and {same} samples (by "
                    f"text and file) stand in split {first}, too"
                )
    return lines


def _rows(packs: PackPlan, own: range, num_samples: int) -> Flags:
    """(num_samples,) the rows of the index in some packs."""
    flags = np.zeros(num_samples, bool)
    start, stop = packs.pack_offsets[own.start], packs.pack_offsets[own.stop]
    flags[packs.sample_ids[start:stop]] = True
    return flags


def _shared(samples: Index, own: Flags, others: Flags) -> list[tuple[int, int]]:
    """How many different media, and samples, of some rows stand in the others, and how many there
    are: of media, then of samples. Only those of the first rows are held."""
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


def _sample_hashes(samples: Index, rows: Flags) -> Iterator[Hashes]:
    first = 0
    for part in samples.parts("sample_hash"):
        yield part["sample_hash"].to_numpy()[rows[first : first + len(part)]]
        first += len(part)


def _media_hashes(samples: Index, rows: Flags) -> Iterator[Hashes]:
    """Of each image and video of some rows, by where it lies."""
    first = 0
    for part in samples.parts(*_HASHED):
        own = rows[first : first + len(part)]
        first += len(part)
        if own.any():
            yield _locator_hashes(part.filter(pa.array(own)))


def _locator_hashes(rows: pa.Table) -> Hashes:
    """(num_media,)"""
    media = rows["media"].combine_chunks()
    flat = media.flatten()
    sources = np.repeat(rows["source_id"].to_numpy(), media.value_lengths().to_numpy())
    columns = (_hash_texts(flat.field(name)) for name in ("container", "column"))
    # SplitMix64's multiplier between what is mixed; it wraps around.
    mixed = sources.astype(np.uint64)
    for column in (*columns, flat.field("offset").to_numpy().astype(np.uint64)):
        mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9) + column
    return mixed


def _hash_texts(texts: pa.Array) -> Hashes:
    """(num_texts,) each different one is hashed once."""
    coded = texts.dictionary_encode()
    hashes = [container_hash(text.encode()) for text in coded.dictionary.to_pylist()]
    return np.array(hashes, np.uint64)[coded.indices.to_numpy()]


def _has_one_picture(samples: Index) -> bool:
    """Whether several samples have media, and all the same; ends where two differ."""
    first: Hashes | None = None
    count = 0
    for part in samples.parts(*_HASHED):
        found = _locator_hashes(part)
        first = found[:1] if first is None and len(found) else first
        if first is not None and (found != first).any():
            return False
        count += len(found)
    return count > 1
