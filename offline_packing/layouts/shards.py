"""Shards: which packs go in which one, the task that holds everything a worker needs to write or to
check one, and what a finished one holds.

_packing/write/train-000000.json    a shard's fragment, which marks it as finished

With output.shards_per_folder the name of a shard, and so of its files, is train-0000/train-000000.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from offline_packing.engines.local import advance
from offline_packing.errors import ChangedError, StageError
from offline_packing.index.measured import MODIFICATION_TIME, hash_medium, hash_sample, sample_stamp
from offline_packing.index.rows import LEADING, is_leading
from offline_packing.index.table import Index
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.sources import Locator, Source
from offline_packing.sources.base import ConversationPart
from offline_packing.sources.formats.tables import HuggingFaceSource, ParquetSource
from offline_packing.sources.reading.locators import read_ahead
from offline_packing.sources.reading.rows import WantedRows, record_columns, rows_at_hand
from offline_packing.sources.roots.roots import Root
from offline_packing.storage.files import hash_bytes, read_json, seal
from offline_packing.storage.tars import PackEntry, member_size, tar_size
from task_encoders.field_types import NonNegative
from task_encoders.packs.manifest import FileName, SplitName
from task_encoders.packs.pack_format import Tree, is_video_name, pack_key
from task_encoders.samples import SourceSample

_Item = TypeVar("_Item")

#: Upper limit of bytes that a member's name and a sample's part of the pack's JSON add to the text.
_EXTRA_BYTES = 96


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """Packs first_pack to first_pack + num_packs of the plan. `number` counts the shards of all
    splits."""

    name: str
    split: str
    number: int
    first_pack: int
    num_packs: int


def fragment_file(shard_name: str) -> str:
    """Return the name of a shard's fragment, relative to the output."""
    return f"_packing/write/{shard_name}.json"


def splits_of_plan(plan: PackPlan, shares: Mapping[str, float]) -> dict[str, range]:
    """Return the packs of each split, in the order of the shares."""
    counts = [plan.num_packs]  # of the only one
    if len(shares) > 1:
        counts = [plan.info.splits[name] for name in shares]  # plan.json sorts the names
    ends = np.cumsum(counts).tolist()
    ranges = map(range, [0, *ends], ends)
    return dict(zip(shares, ranges, strict=True))


def samples_of_splits(
    plan: PackPlan, shares: Mapping[str, float]
) -> Iterator[tuple[str, range, npt.NDArray[np.integer]]]:
    """Yield the name and packs of each split, and the samples in them, one after another."""
    for name, own in splits_of_plan(plan, shares).items():
        ids = plan.sample_ids[plan.pack_offsets[own.start] : plan.pack_offsets[own.stop]]
        yield name, own, ids


def lay_out_shards(
    pack_bytes: npt.NDArray[np.int64],
    splits: Mapping[str, range],
    packs_per_shard: int,
    max_shard_bytes: int | None = None,
    shards_per_folder: int | None = None,
) -> list[PlannedShard]:
    """Cut the packs into shards; no shard holds packs of two splits. A pack that is larger than
    max_shard_bytes by itself gets its own shard. `pack_bytes` (num_packs,): bytes of each pack
    in a tar, at least."""
    shards: list[PlannedShard] = []
    for split, packs in splits.items():
        cuts, held = [packs.start], 0
        for pack, size in zip(packs, pack_bytes[packs.start : packs.stop].tolist(), strict=True):
            is_full = max_shard_bytes is not None and tar_size(held + size) > max_shard_bytes
            if pack > cuts[-1] and (is_full or pack - cuts[-1] == packs_per_shard):
                cuts.append(pack)
                held = 0
            held += size
        for i, (start, end) in enumerate(zip(cuts, [*cuts[1:], packs.stop], strict=True)):
            if end > start:
                name = f"{split}-{i:06d}"
                if shards_per_folder is not None:
                    name = f"{split}-{i // shards_per_folder:04d}/{name}"
                shards.append(PlannedShard(name, split, len(shards), start, end - start))
    return shards


def estimate_pack_bytes(
    samples: Index, plan: PackPlan, *, refers: bool = False
) -> npt.NDArray[np.int64]:
    """Return (num_packs,) bytes of each pack in a tar, whose packs perhaps refer to media. Exact
    for media; the pack's JSON is taken to be no larger than its records, whose text it holds, and
    96 bytes per sample and medium, and the names of the media's files."""
    per_sample = np.zeros(samples.info.num_samples, dtype=np.int64)
    shared = np.zeros_like(per_sample)  # bytes of the media in each sample's prefix
    prefix = () if plan.branches is None else LEADING
    first = 0
    for part in samples.parts("key", "json", "media", *prefix):
        media, rows = part["media"].combine_chunks(), slice(first, first := first + len(part))
        own = per_sample[rows]
        own += part["json"].combine_chunks().field("size").to_numpy() + _EXTRA_BYTES
        own += pc.binary_length(part["key"]).to_numpy()
        sizes = media.flatten().field("size").to_numpy()
        names = pc.binary_length(media.flatten().field("container")).to_numpy()
        owner = pc.list_parent_indices(media).to_numpy()
        in_tar = names if refers else member_size(0) + -(-sizes // 512) * 512
        np.add.at(own, owner, in_tar + _EXTRA_BYTES)
        if prefix:
            np.add.at(shared[rows], owner, in_tar * is_leading(part, owner))
    chosen = per_sample[plan.sample_ids]
    if plan.branches is not None:
        chosen -= plan.branches * shared[plan.sample_ids]
    return np.add.reduceat(chosen, plan.pack_offsets[:-1]) + member_size(0) + 512


@dataclass(frozen=True)
class ShardFragment:
    """One finished shard."""

    #: name as in the manifest
    name: FileName
    split: SplitName
    num_samples: NonNegative
    num_tokens: NonNegative
    num_bytes: NonNegative
    xxh3_128: str
    packs: Sequence[PackEntry]

    @property
    def content_hash(self) -> str:
        """xxh3_128 of the fragment's file without its seal."""
        return hash_bytes(orjson.dumps(self))

    def to_bytes(self) -> bytes:
        """Return the content of the fragment's file."""
        return orjson.dumps(seal(orjson.loads(orjson.dumps(self))))

    @classmethod
    def load(cls, path: Path) -> "ShardFragment":
        """Read a fragment. Raises StageError where there is none, or it is damaged."""
        found: ShardFragment | None = read_json(path, form=cls)
        if found is None:
            raise StageError(f"{path} is missing; run write again")
        return found


#: Columns of the index that a task carries.
COLUMNS: Final = tuple(
    "key source_id num_tokens stamp grid_thw json media media_hash sample_hash part".split()
)
#: Further ones of a plan with trees.
PREFIX_COLUMNS: Final = ("prefix_tokens", "prefix_images", "prefix_videos")
_ROW_PLACE: Final = ("kind", "container", "column", "offset")
_ROW_KINDS: Final = pa.array([ParquetSource.KIND, HuggingFaceSource.KIND])
#: Packs whose samples are Python objects at a time.
_PACKS_AT_ONCE: Final = 64


@dataclass(frozen=True, slots=True)
class PlannedSample:
    """A sample to be written: the columns of its row of the index that a task needs."""

    key: str
    source_id: int
    num_tokens: int
    stamp: int
    #: (t, h, w) of each medium in patches, one after another
    grid_thw: list[int]
    json: Locator
    media: tuple[Locator, ...]
    #: `hash_medium` of each medium
    media_hash: list[int]
    #: `hash_sample` of its record
    sample_hash: int
    extensions: tuple[str, ...]
    #: the part of a record that it is; None: the whole record at `json`
    part: ConversationPart | None = None
    #: 1: it shares its prefix with the sample before it in its pack; set, as are the tokens and
    #: media of the prefix, in a plan with trees
    branches: int = 0
    prefix_tokens: int = 0
    prefix_images: int = 0
    prefix_videos: int = 0

    @property
    def record(self) -> Locator:
        """Place of its record."""
        return self.json if self.part is None else self.part.json

    @property
    def num_videos(self) -> int:
        """Number of videos among the media; they are the last."""
        return sum(map(is_video_name, self.extensions))

    def own(self, of_media: tuple[_Item, ...]) -> tuple[_Item, ...]:
        """Return what belongs to the media that its pack holds for it: to all, or for a branch to
        the media after its prefix."""
        if not self.branches:
            return of_media
        first = len(of_media) - self.num_videos
        return of_media[self.prefix_images : first] + of_media[first + self.prefix_videos :]


def trees_of(samples: Sequence[PlannedSample]) -> list[Tree]:
    """Return the trees of a pack, and each other sample as a tree of one."""
    firsts = [number for number, sample in enumerate(samples) if not sample.branches]
    ends = [*firsts[1:], len(samples)]
    return [
        Tree(first, end - first, one.prefix_tokens, one.prefix_images, one.prefix_videos)
        for first, end in zip(firsts, ends, strict=True)
        for one in [samples[first]]
    ]


#: Key and samples of a pack.
PlannedPack = tuple[str, list[PlannedSample]]


@dataclass(frozen=True, kw_only=True)
class ShardTask:
    """One shard: its samples in the order of the packs, as rows of the index, and the number of
    samples of each pack."""

    shard: PlannedShard
    #: the output, or the folder that takes its place
    folder: Path
    #: folder for copies of files without random access
    unpack_folder: Path
    samples: pa.Table
    #: number of samples of each pack, (num_packs,)
    pack_sizes: npt.NDArray[np.int64]
    sources: tuple[Source, ...] = ()
    task: str
    key_prefix: str
    #: a name in LAYOUTS
    layout: str
    #: generation of the packs, see runs.artifacts.generation_of
    generation: str
    #: whether packs refer to their media instead of holding them
    refers: bool = False
    #: whether a file of another modification time is refused
    refuses_edits: bool = True

    @property
    def fragment_path(self) -> Path:
        """The shard's fragment."""
        return self.folder / fragment_file(self.shard.name)

    def pack_keys(self) -> list[str]:
        """Return the keys of the packs."""
        first = self.shard.first_pack
        return [pack_key(first + i, self.key_prefix) for i in range(len(self.pack_sizes))]

    def packs(self, *, with_media: bool = True) -> Iterator[PlannedPack]:
        """Yield the key and samples of each pack. The task advances by one when it asks for the
        next. Remote records are read ahead, and media if `with_media`."""
        packs = self._planned()
        if any(source.beside_remote for source in self.sources):
            packs = read_ahead(packs, partial(self._places, with_media))
        for pack in packs:
            yield pack
            advance()

    def _planned(self) -> Iterator[PlannedPack]:
        keys, start = self.pack_keys(), 0
        for first in range(0, len(keys), _PACKS_AT_ONCE):
            some = slice(first, first + _PACKS_AT_ONCE)
            sizes = self.pack_sizes[some].tolist()
            samples = read_planned(self.samples.slice(start, sum(sizes)))
            start += sum(sizes)
            for key, size in zip(keys[some], sizes, strict=True):
                yield key, list(islice(samples, size))

    def _places(self, with_media: bool, pack: PlannedPack) -> Iterator[tuple[Root, Locator]]:
        """Yield the places of the records of a pack, and perhaps of its media."""
        for sample in pack[1]:
            source = self.sources[sample.source_id]
            yield source.root, sample.record
            if with_media:
                yield from ((source.media_root(at), at) for at in sample.media)

    def rows_at_hand(self) -> AbstractContextManager[None]:
        """Let samples in rows of tables be read in any order, while the block runs, at the cost of
        reading in order. Raises StageError where such a file cannot be read."""
        # A part's json has the size of its own turns, but the place of its record.
        places = self.samples["json"].combine_chunks()
        columns = [self.samples["source_id"], *map(places.field, _ROW_PLACE)]
        table = pa.table(columns, ["source_id", *_ROW_PLACE])
        table = table.filter(pc.is_in(table["kind"], _ROW_KINDS))
        files = table.group_by(["source_id", *_ROW_PLACE[:-1]]).aggregate([("offset", "list")])
        wanted = [
            WantedRows(
                self.sources[file["source_id"]].root,
                file["kind"],
                file["container"],
                np.unique(np.array(file["offset_list"])),
                tuple(record_columns(file["column"])[0]),
            )
            for file in files.to_pylist()
        ]
        return rows_at_hand(wanted, self.fragment_path.parent, self.unpack_folder)

    def read_sample(self, sample: PlannedSample) -> SourceSample:
        """Read and parse a sample's record again. Raises StageError if it has changed since it was
        measured."""
        num_images = len(sample.media) - sample.num_videos
        source = self.sources[sample.source_id]
        if sample.part is not None:
            return sample.part.read(source, sample.key)
        found = source.read_sample(sample.key, sample.json, num_images, sample.num_videos)
        if hash_sample(found, sample.media_hash) != sample.sample_hash:
            where = f"sample {sample.key!r} in {source.root.path(sample.json.container)}"
            raise ChangedError(where, "its record now gives other texts")
        return found

    def read_media(self, sample: PlannedSample, media: Iterable[Locator]) -> list[bytes]:
        """Read a sample's media, or some. Raises StageError if one changed since it was measured,
        by its size and its first bytes (`hash_medium`)."""
        source, found = self.sources[sample.source_id], []
        hashes = dict(zip(sample.media, sample.media_hash, strict=True))
        for at in media:
            data = source.read_media(at)
            if hash_medium(len(data), data) != hashes[at]:
                raise ChangedError(at.container, "it begins with other bytes")
            found.append(data)
        return found

    def check_unchanged(self, sample: PlannedSample) -> None:
        """Raise StageError if a file of the sample was written to since it was measured."""
        source = self.sources[sample.source_id]
        if self.refuses_edits and sample.stamp != sample_stamp(source, sample.record, sample.media):
            paths = sorted({locator.container for locator in (sample.record, *sample.media)})
            raise StageError(
                f"sample {sample.key!r} changed since it was measured: {' or '.join(paths)} has "
                "another modification time; restore it; if it was copied without its times, "
                f"copy it with cp -a or rsync -t or pass --accept-mismatch {MODIFICATION_TIME}; or "
                "pack again with another output.path"
            )


def read_planned(table: pa.Table) -> Iterator[PlannedSample]:
    """Yield the samples of a table with COLUMNS."""
    for row in table.to_pylist():
        extensions = tuple(medium.pop("extension") for medium in row["media"])
        row["media"] = tuple(Locator(**medium) for medium in row["media"])
        row["json"] = Locator(**row["json"])
        if (part := row["part"]) is not None:
            json, media = Locator(**part.pop("json")), tuple(part.pop("media"))
            row["part"] = ConversationPart(json=json, media=media, **part)
        yield PlannedSample(**row, extensions=extensions)
