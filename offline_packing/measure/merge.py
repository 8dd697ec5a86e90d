"""Dialogues of several records, for `source.merge_same_image`.

Which records belong together follows from a column of the records' table. A dialogue is rendered
and measured as it will be trained, so its length is exact; of one that comes out longer than
`max_tokens`, the last records begin another.
"""

import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from offline_packing.index.measured import MeasuredSample, sample_stamp, sample_traits
from offline_packing.index.table import Index
from offline_packing.layouts.shard_tasks import COLUMNS, read_planned
from offline_packing.measure.hashes import hash_sample
from offline_packing.sources import Locator, Source
from offline_packing.sources.dialogues import RecordPart, merge_samples
from offline_packing.sources.options import MergeOptions
from task_encoders.sample_encoder import SampleEncoder
from task_encoders.samples import SampleError, SourceSample, Turn

#: Patches of a token of an image, in most families: only a guess before a dialogue is measured.
_PATCHES_PER_TOKEN: Final = 4

Ids = npt.NDArray[np.int64]


def tokens_once(encoder: SampleEncoder) -> tuple[int, int]:
    """Tokens that a dialogue has once however many records it has: those of the chat template with
    its own system message; and around each image."""
    turn, size = Turn("a", "b"), (56, 56)
    try:
        one, two, shown = (
            encoder.measure(SourceSample("", "bmr", (turn,) * count, ("",) * len(sizes)), sizes)
            for count, sizes in ((1, []), (2, []), (1, [size]))
        )
    except SampleError:  # a template without dialogues
        return 0, 0
    image = shown.num_tokens - one.num_tokens - shown.num_vision_patches // _PATCHES_PER_TOKEN
    return 2 * one.num_tokens - two.num_tokens, max(image, 0)


def find_dialogues(
    records: Index, options: Sequence[MergeOptions | None], encoder: SampleEncoder
) -> tuple[Ids, Ids, Ids]:
    """Records dialogue by dialogue, (num_records,); the number of records of each dialogue, and its
    part of the index, (num_dialogues,), ascending: that of the first of its records. By the
    lengths of the records, a dialogue has about `max_tokens` at most; it is not measured yet."""
    hashes = np.where(records.array("left_out"), np.uint64(0), records.array("dialogue_hash"))
    owners, rows = records.array("source_id"), np.arange(len(hashes))
    rank = rows.copy()
    limits = np.zeros(len(options), np.int64)
    for i, merge in enumerate(options):
        limits[i] = merge.max_tokens if merge is not None else 0
        own = rows[owners == i]
        if merge is not None and merge.order == "drawn":
            rank[own] = np.random.default_rng(merge.seed).permutation(own)
    order = np.lexsort((rank, owners, hashes))
    hashes, owners = hashes[order], owners[order]
    once, around = tokens_once(encoder)
    first = once + around * records.array("num_images")[order]
    first += records.array("num_vision_patches")[order] // _PATCHES_PER_TOKEN
    costs = np.maximum(records.array("num_tokens")[order] - first, 1)
    same = (hashes[1:] == hashes[:-1]) & (owners[1:] == owners[:-1]) & (hashes[1:] != 0)
    begins = np.concatenate([[True], ~same])[: len(order)]
    _cut_long(begins, costs, limits[owners] - first)
    starts = np.flatnonzero(begins)
    sizes = np.diff(np.append(starts, len(order)))
    leaders = np.minimum.reduceat(order, starts) if len(starts) else order
    by_leader = np.argsort(leaders)
    sizes, starts = sizes[by_leader], starts[by_leader]
    places = np.arange(len(order)) + np.repeat(starts - np.cumsum(sizes) + sizes, sizes)
    ends = np.cumsum(records.info.part_rows)
    return order[places], sizes, np.searchsorted(ends, leaders[by_leader], side="right")


def _cut_long(
    begins: npt.NDArray[np.bool_], costs: npt.NDArray[np.integer], rooms: npt.NDArray[np.integer]
) -> None:
    """Begin another dialogue wherever the next record would exceed the room of the current one."""
    starts = np.append(np.flatnonzero(begins), len(begins))
    if len(starts) == 1:
        return
    is_long = np.add.reduceat(costs, starts[:-1]) > rooms[starts[:-1]]
    for group in np.flatnonzero(is_long).tolist():
        held, first = 0, int(starts[group])
        for i, cost in enumerate(costs[first : int(starts[group + 1])].tolist(), first):
            begins[i] |= held + cost > rooms[first]
            held = cost if begins[i] else held + cost


class Dialogue:
    """Records that become one dialogue, or several."""

    def __init__(self, source: Source, encoder: SampleEncoder, rows: pa.Table) -> None:
        """Read and join the records. Raises StageError if one changed after it was measured."""
        self.records = list(read_planned(rows.select(COLUMNS)))
        self.hashes = rows["media_hash"].to_pylist()
        self.contents = rows["content_hash"].to_pylist()
        self.group_hash = rows["group_hash"][0].as_py()
        self.dialogue_hash = rows["dialogue_hash"][0].as_py()
        self.source, self.encoder = source, encoder
        merge = self.source.merge
        assert merge is not None
        self.max_tokens = merge.max_tokens
        self.read = [
            self.source.read_sample(one.key, one.json, len(one.media)) for one in self.records
        ]
        #: by media_hash: the first such picture, its extension, its size and all its bytes' hash
        self.pictures: dict[int, tuple[Locator, str, tuple[int, int], bytes]] = {}

    def samples(self) -> Iterator[int | MeasuredSample]:
        """The dialogues; the place of a record that stays by itself."""
        same = [self._shows_the_same(place) for place in range(len(self.records))]
        yield from self._fitting([place for place, is_same in enumerate(same) if is_same])
        yield from [place for place, is_same in enumerate(same) if not is_same]

    def _shows_the_same(self, place: int) -> bool:
        """Whether the pictures of a record are those of earlier ones with the same hash, which is
        of some of their bytes only; those that come first are kept."""
        record = self.records[place]
        for at, extension, media_hash in zip(
            record.media, record.extensions, self.hashes[place], strict=True
        ):
            known = self.pictures.get(media_hash)
            if known is not None and known[0] == at:
                continue
            data = self.source.read_media(at)
            digest = xxhash.xxh3_128_digest(data)
            if known is None:
                header = self.encoder.image_header(io.BytesIO(data))
                size = (header.height, header.width)
                self.pictures[media_hash] = (at, extension, size, digest)
            elif known[3] != digest:
                return False
        return True

    def _fitting(self, places: Sequence[int]) -> Iterator[int | MeasuredSample]:
        """Records as dialogues, each of as many as fit and as a template takes together."""
        while places:
            made, low, high = None, 1, len(places)
            count = high  # all of them, unless the guess was wrong
            while low < high:
                found = self._merge(places[:count])
                if found is None:
                    high = count - 1
                else:
                    made, low = found, count
                count = (low + high + 1) // 2
            yield places[0] if made is None else made
            places = places[low:]

    def _merge(self, places: Sequence[int]) -> MeasuredSample | None:
        records = [self.records[place] for place in places]
        hashes = list(dict.fromkeys(one for place in places for one in self.hashes[place]))
        own = [tuple(map(hashes.index, self.hashes[place])) for place in places]
        sample = merge_samples(records[0].key, [self.read[place] for place in places], own)
        pictures = [self.pictures[one] for one in hashes]
        sizes = [size for _, _, size, _ in pictures]
        try:
            length = self.encoder.measure(sample, sizes)
        except SampleError:
            return None
        if length.num_tokens > self.max_tokens:
            return None
        jsons, first = [record.json for record in records], records[0]
        return MeasuredSample(
            first.key,
            first.source_id,
            self.source.task,
            len(sample.turns),
            length,
            replace(first.json, size=sum(json.size for json in jsons)),
            tuple((at, extension) for at, extension, _, _ in pictures),
            sample_stamp(self.source, jsons, [at for at, _, _, _ in pictures]),
            sample_traits(sample, sizes),
            content_hash=self.contents[places[0]],
            sample_hash=hash_sample(sample, hashes),
            media_hashes=tuple(hashes),
            group_hash=self.group_hash,
            dialogue_hash=self.dialogue_hash,
            parts=tuple(
                RecordPart(record.key, self.contents[place], record.json, media)
                for place, record, media in zip(places, records, own, strict=True)
            ),
        )
