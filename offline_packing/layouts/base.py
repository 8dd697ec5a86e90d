"""Interface of every layout: writing one shard, the metadata of all, and reading both again."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import xxhash

from offline_packing.errors import DamagedError
from offline_packing.index.table import Index
from offline_packing.layouts.shards import (
    PlannedSample,
    ShardFragment,
    ShardTask,
    estimate_pack_bytes,
    trees_of,
)
from offline_packing.layouts.unfit import Grids, Model, Sizes
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.sources import Source, SourceOptions
from offline_packing.storage.files import atomic_file, read_each, write_atomically
from offline_packing.storage.tars import PackEntry
from task_encoders.families import build_sample_encoder
from task_encoders.packs.manifest import Manifest
from task_encoders.packs.pack import Pack
from task_encoders.packs.pack_format import JSON_PART, PackedSubSample, media_part_names, pack_json
from task_encoders.samples import TASKS, SourceSample
from task_encoders.storage.paths import REMEDY

#: Bytes copied at a time.
_BLOCK: Final = 8 << 20

#: Name of a pack's member without its key, and content.
Member = tuple[str, bytes]


#: Built once per process.
encoder_of = lru_cache(maxsize=4)(build_sample_encoder)


class Layout(ABC):
    """Packs on disk. Stateless: tasks name it, and look it up in LAYOUTS."""

    #: the tasks whose packs it holds
    TASKS: ClassVar[Sequence[str]] = TASKS
    #: families whose samples its reader would encode otherwise, and how
    REFUSED: ClassVar[Mapping[str, str]] = {}
    #: whether its packs are token ids, so that writing tokenizes
    HOLDS_TOKENS: ClassVar[bool] = False
    #: whether all samples of a pack must have images, or videos, or neither
    ONE_MEDIUM: ClassVar[bool] = False
    #: whether its packs hold our JSON (`packs.pack_format`), with over how many ranks they go
    OWN_JSON: ClassVar[bool] = False
    #: whether its reader trains all answers
    TRAINS_ALL: ClassVar[bool] = False
    #: ending of a shard's own file, until the files of a split are joined; None: shards stay files
    PIECE: ClassVar[str | None] = None
    #: whether its packs hold copies of their media
    COPIES_MEDIA: ClassVar[bool] = True
    #: the file, relative to the output, with the folders of media that packs refer to
    MEDIA_ROOTS: ClassVar[str | None] = None
    #: files that `finish` writes, relative to the output
    METADATA: ClassVar[Sequence[str]] = ()

    @abstractmethod
    def shard_file(self, shard_name: str) -> str:
        """A shard's name in the manifest, relative to the output: 'train-000000.tar'."""

    def pack_bytes(self, samples: Index, plan: PackPlan) -> npt.NDArray[np.int64]:
        """(num_packs,) bytes of each pack of a plan on disk, at least."""
        return estimate_pack_bytes(samples, plan)

    def metadata(self, splits: Iterable[str]) -> Sequence[str]:
        """Files that `finish` writes for these splits, relative to the output; and MEDIA_ROOTS."""
        return self.METADATA

    def refuse(self, model: Model) -> None:  # noqa: B027 - most hold all
        """Raise StageError if it holds no packs of a model (its part of the fingerprint)."""

    @classmethod
    def has_rules(cls) -> bool:
        """Tell whether `unfit` and `added_tokens` say anything."""
        return cls.unfit is not Layout.unfit

    def unfit(self, sample: SourceSample, sizes: Sizes, model: Model) -> str | None:
        """Return what its reader cannot take of a checked sample whose images have these (height,
        width); None: it takes the sample. Planning sets such samples aside."""
        return None

    def added_tokens(self, sample: SourceSample, grids: Grids, model: Model) -> int:
        """Return the tokens by which its reader makes a sample longer than measured, at most: plans
        leave room for them. `grids` of its media, (t, h, w) in patches."""
        return 0

    def check_sources(  # noqa: B027 - bytes can be copied from any
        self, samples: Index, sources: Sequence[Source]
    ) -> None:
        """Raise StageError if the layout cannot use a source."""

    @abstractmethod
    def write(self, task: ShardTask) -> ShardFragment:
        """Write a shard; no file has its final name before it is complete."""

    def finish(  # noqa: B027 - where each pack says everything, nothing is needed
        self, folder: Path, manifest: Manifest, fragments: Sequence[Path]
    ) -> None:
        """Write METADATA, which describes all shards of the output `folder`. The manifest lacks
        only the hashes of these files; `fragments` are of all shards, in order."""

    def media_roots(self, manifest: Manifest, sources: Sequence[SourceOptions]) -> bytes:
        """Content of MEDIA_ROOTS. When a source moves, it changes and the packs do not. Raises
        StageError if a source is missing."""
        raise NotImplementedError

    @abstractmethod
    def is_there(self, shard_name: str, split: str, files: Collection[str]) -> bool:
        """Whether a written shard is among the files of an output, given by their names."""

    @abstractmethod
    def find_damage(self, task: ShardTask, expected_hash: str) -> list[tuple[str, str]]:
        """Damage to a shard as a whole: files, relative to the output, each with its fault:
        missing, or not as it was written."""

    @abstractmethod
    def read_packs(self, task: ShardTask) -> Iterator[Pack]:
        """The packs of a shard. Raises StageError where it cannot be read."""

    @abstractmethod
    def read_pack(self, folder: Path, shard_file: str, key: str) -> Pack:
        """One pack. Raises StageError where it cannot be read."""

    @abstractmethod
    def remove(self, folder: Path) -> None:
        """Remove all shards and their metadata."""

    def stored_form(self, sample: SourceSample) -> SourceSample:
        """The sample as it will be read back."""
        return sample

    def fragment(
        self, task: ShardTask, name: str, num_bytes: int, digest: str, packs: Sequence[PackEntry]
    ) -> ShardFragment:
        """The fragment of a task's shard, which is written."""
        num_tokens = int(pc.sum(task.samples["num_tokens"]).as_py() or 0)
        if "branches" in task.samples.column_names:  # of a trunk, once
            again = pc.multiply(task.samples["prefix_tokens"], task.samples["branches"])
            num_tokens -= int(pc.sum(again).as_py())
        split, num_samples = task.shard.split, len(task.samples)
        return ShardFragment(name, split, num_samples, num_tokens, num_bytes, digest, packs)

    def checked_members(self, task: ShardTask, samples: Sequence[PlannedSample]) -> list[Member]:
        """A pack's members. Raises StageError if a sample changed since it was measured."""
        members = self.members(task, samples)
        for sample in samples:
            task.check_unchanged(sample)
        return members

    def members(self, task: ShardTask, samples: Sequence[PlannedSample]) -> list[Member]:
        """The media in order, then the JSON."""
        media = [data for one in samples for data in task.read_media(one, one.own_media)]
        names = media_part_names([name for one in samples for name in one.own_extensions])
        return [*zip(names, media, strict=True), (JSON_PART, self.record(task, samples, media))]

    def record(
        self, task: ShardTask, samples: Sequence[PlannedSample], media: Sequence[bytes] = ()
    ) -> bytes:
        """A pack's JSON. `media`: the media that lie beside it."""
        read = [task.read_sample(sample) for sample in samples]
        subs = [
            PackedSubSample(content, sample.own_extensions, sample.num_tokens)
            for content, sample in zip(read, samples, strict=True)
        ]
        return pack_json(
            subs,
            task.task,
            trees=[tree for tree in trees_of(samples) if tree.num_samples > 1],
            generation=task.generation,
            media=media,
        )


class JoinedLayout(Layout):
    """The packs of a split in one file. Its shards are separate files, pieces, until all are
    written and joined into it. The manifest then has the bytes of each shard, and its fragment the
    place of each pack."""

    PIECE: ClassVar[str]

    @abstractmethod
    def split_files(self, split: str) -> tuple[str, str]:
        """Names of a split's file, and of the file with the places of its packs."""

    @abstractmethod
    def sizes(self, fragment: ShardFragment) -> npt.NDArray[np.int64]:
        """(num_packs, ...) bytes of each pack of a shard in a split's second file."""

    @abstractmethod
    def index(self, sizes: Sequence[npt.NDArray[np.int64]]) -> bytes:
        """Content of a split's second file, from the sizes in all shards."""

    def piece(self, shard_name: str) -> str:
        """Name of a shard's own file."""
        return f"{shard_name}{self.PIECE}"

    def shard_file(self, shard_name: str) -> str:
        return shard_name

    def metadata(self, splits: Iterable[str]) -> Sequence[str]:
        assert self.MEDIA_ROOTS is not None
        files = [name for split in dict.fromkeys(splits) for name in self.split_files(split)]
        return [*files, self.MEDIA_ROOTS]

    def finish(self, folder: Path, manifest: Manifest, fragments: Sequence[Path]) -> None:
        """Join the shards of each split: pieces just written, and ranges of files joined before."""
        there = {path.name for path in folder.iterdir()}  # one question, however many shards
        loaded = read_each(folder, ShardFragment.load, fragments)
        for split, own in itertools.groupby(loaded, key=attrgetter("split")):
            path, index = (folder / name for name in self.split_files(split))
            begin, sizes = 0, []
            with atomic_file(path) as file:
                for one in own:
                    is_own, digest = self.piece(one.name) in there, xxhash.xxh3_128()
                    place = (folder / self.piece(one.name), 0) if is_own else (path, begin)
                    for block in _blocks(*place, one.num_bytes):
                        file.write(block)
                        digest.update(block)
                    if digest.hexdigest() != one.xxh3_128:
                        raise DamagedError(f"{path}: shard {one.name} is damaged; {REMEDY}")
                    begin += one.num_bytes
                    sizes.append(self.sizes(one))
            write_atomically(index, self.index(sizes))
        for shard in manifest.shards:
            (folder / self.piece(shard.name)).unlink(missing_ok=True)

    def is_there(self, shard_name: str, split: str, files: Collection[str]) -> bool:
        return self.piece(shard_name) in files or self.split_files(split)[0] in files

    def place(self, task: ShardTask) -> tuple[Path, int]:
        """The file of a shard and the shard's offset in it: its piece, or in a complete output the
        split's file."""
        piece = task.folder / self.piece(task.shard.name)
        if piece.exists():
            return piece, 0
        return task.folder / self.split_files(task.shard.split)[0], task.span[0]

    def find_damage(self, task: ShardTask, expected_hash: str) -> list[tuple[str, str]]:
        path, begin = self.place(task)
        is_own, digest = path.name == self.piece(task.shard.name), xxhash.xxh3_128()
        try:
            size = path.stat().st_size if is_own else task.span[1]
            for block in _blocks(path, begin, size):
                digest.update(block)
        except (FileNotFoundError, IsADirectoryError):
            return [(path.name, "is missing")]
        if digest.hexdigest() == expected_hash:
            return []
        return [(path.name, f"is not what was written: {task.shard.name} differs")]


def _blocks(path: Path, begin: int, size: int) -> Iterator[bytes]:
    """Bytes of a range of a file, as far as they exist."""
    with path.open("rb", _BLOCK) as file:
        file.seek(begin)
        while size and (block := file.read(min(size, _BLOCK))):
            yield block
            size -= len(block)
