"""Packs as token ids in megatron-core's IndexedDataset; media stay where they are.

packed_seq_dataset.bin, .idx         the split train, see indexed_file.py
packed_seq_dataset_val.bin, .idx     any other split
media_roots.json                     where media lie
train-000000.bin                     documents of one shard, until they are put together
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from offline_packing.errors import StageError
from offline_packing.index.table import Index
from offline_packing.layouts.addresses import media_roots, time_of_medium
from offline_packing.layouts.base import JoinedLayout, encoder_of
from offline_packing.layouts.shards import PlannedSample, ShardFragment, ShardTask
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.sources import Locator, Source, SourceOptions
from offline_packing.sources.roots.roots import Root
from offline_packing.storage.files import atomic_file, to_json
from offline_packing.storage.tars import PackEntry, Part
from task_encoders.media.video import SampledVideo
from task_encoders.packs.indexed_file import (
    MEDIA_ROOTS,
    NO_TEXT,
    PREFIX,
    SEQUENCES,
    IndexedFile,
    IndexedPack,
    IndexedSubSample,
    index_file,
    make_document,
    read_media_roots,
)
from task_encoders.packs.manifest import Manifest, ShardLine, read_manifest
from task_encoders.packs.pack import Pack, PackFormatError
from task_encoders.packs.pack_format import index_of_key
from task_encoders.packs.tokenized import fingerprint_digest
from task_encoders.sample_encoder import SampleEncoder
from task_encoders.samples import SourceSample, Turn

_FILE: Final = re.compile(rf"({PREFIX}(_[A-Za-z0-9_]+)?\.(bin|idx)|[A-Za-z0-9_]+-\d{{6}}\.bin)")


class IndexedLayout(JoinedLayout):
    """Documents of token ids."""

    HOLDS_TOKENS = True
    PIECE = ".bin"
    MEDIA_ROOTS = MEDIA_ROOTS

    def pack_bytes(self, samples: Index, plan: PackPlan) -> npt.NDArray[np.int64]:
        num_media = samples.array("num_images") + samples.array("num_videos")
        per_sample = 9 * samples.array("num_tokens").astype(np.int64) + 256 + 512 * num_media
        return np.add.reduceat(per_sample[plan.sample_ids], plan.pack_offsets[:-1])

    def split_files(self, split: str) -> tuple[str, str]:
        return f"{_prefix(split)}.bin", f"{_prefix(split)}.idx"

    def sizes(self, fragment: ShardFragment) -> npt.NDArray[np.int64]:
        return np.array([[part.size for part in pack.parts] for pack in fragment.packs])

    def index(self, sizes: Sequence[npt.NDArray[np.int64]]) -> bytes:
        return index_file(sizes)

    def media_roots(self, manifest: Manifest, sources: Sequence[SourceOptions]) -> bytes:
        return to_json(dict(media_roots(sources)))

    def check_sources(self, samples: Index, sources: Sequence[Source]) -> None:
        for part in samples.parts("media"):
            media = part["media"].combine_chunks().flatten()
            is_kept = pc.is_in(media.field("kind"), pa.array(["file", "bytes"]))
            odd = media.filter(pc.invert(is_kept))
            if len(odd):
                first = odd[0].as_py()
                raise StageError(
                    f"layout indexed stores in which file a medium lies, and those of "
                    f"{first['container']} are in a {first['kind']}; set output.layout=energon, or "
                    "give the media as files or in uncompressed tars"
                )

    def write(self, task: ShardTask) -> ShardFragment:
        assert task.tokenizes is not None  # HOLDS_TOKENS
        encoder = encoder_of(task.tokenizes)
        digest, packs, size = xxhash.xxh3_128(), [], 0
        with atomic_file(task.folder / self.piece(task.shard.name)) as file:
            for key, samples in task.packs(with_media=False):
                subs = [_sub_sample(task, sample, encoder) for sample in samples]
                made_with = fingerprint_digest(encoder.fingerprint)
                document = make_document(key, task.task, subs, made_with, task.generation)
                ends = itertools.accumulate(map(len, document), initial=size)
                parts = tuple(
                    Part(name, end, len(data))
                    for name, end, data in zip(SEQUENCES, ends, document, strict=False)
                )
                for data in document:
                    file.write(data)
                    digest.update(data)
                packs.append(PackEntry(key, size, sum(map(len, document)), parts))
                size += packs[-1].size
        return self.fragment(task, task.shard.name, size, digest.hexdigest(), packs)

    def read_packs(self, task: ShardTask) -> Iterator[Pack]:
        path, begin = self.place(task)
        try:
            roots = read_media_roots(task.folder)
            with path.open("rb") as file:
                for entry in ShardFragment.load(task.fragment_path).packs:
                    file.seek(begin + entry.offset)
                    data = file.read(entry.size)
                    starts = [part.offset - entry.offset for part in entry.parts]
                    bounds = [*starts, len(data)]
                    pack = IndexedPack(
                        [np.frombuffer(data[a:b], "<i4") for a, b in itertools.pairwise(bounds)],
                        roots,
                    )
                    yield pack.pack
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StageError(f"{path} cannot be read: {error}") from error

    def read_pack(self, folder: Path, shard_file: str, key: str) -> Pack:
        lines = _shard_lines(folder)
        split = next(line.split for line in lines if line.name == shard_file)
        before = itertools.takewhile(lambda line: line.split != split, lines)
        number = index_of_key(key) - sum(line.packs for line in before)
        try:
            return IndexedFile(str(folder / _prefix(split)))[number].pack
        except (PackFormatError, LookupError) as error:
            raise StageError(f"pack {key!r} cannot be read: {error}") from error

    def remove(self, folder: Path) -> None:
        for path in folder.iterdir():
            if path.name == MEDIA_ROOTS or _FILE.fullmatch(path.name):
                path.unlink()

    def stored_form(self, sample: SourceSample) -> SourceSample:
        """The sample without its text, which is stored as token ids."""
        return SourceSample(
            sample.key, sample.task, (Turn(*NO_TEXT),), sample.images, videos=sample.videos
        )


def _prefix(split: str) -> str:
    """Name of a split's files, as NeVA has it, without endings."""
    return PREFIX if split == "train" else f"{PREFIX}_{split}"


def _shard_lines(folder: Path) -> Sequence[ShardLine]:
    manifest = read_manifest(folder)
    return manifest.shards if manifest else ()


def _sub_sample(task: ShardTask, sample: PlannedSample, encoder: SampleEncoder) -> IndexedSubSample:
    """A sample as its document holds it. Raises StageError if it changed since it was measured."""
    source = task.sources[sample.source_id]
    text = encoder.tokenize(task.read_sample(sample))
    grids = np.reshape(sample.grid_thw, (-1, 3)).tolist()[: len(sample.media) - sample.num_videos]
    expanded = encoder.expand(text, [tuple(grid) for grid in grids], _videos(task, sample, encoder))
    task.check_unchanged(sample)
    if len(expanded.tokens) != sample.num_tokens:
        raise StageError(
            f"sample {sample.key!r} changed since it was measured: it has {len(expanded.tokens)} "
            f"tokens, was {sample.num_tokens}; restore it, or pack again with another output.path"
        )
    media = [_stored(sample.source_id, source.media_root(at), at) for at in sample.media]
    return IndexedSubSample(sample.key, text, expanded, sample.extensions, media)


def _stored(source_id: int, root: Root, at: Locator) -> list[Any]:
    """Address of a medium in a document."""
    name, offset = ("files", None) if at.kind == "file" else ("tars", at.offset)
    return [f"{name}{source_id}", at.container, offset, at.size, time_of_medium(root, at)]


def _videos(task: ShardTask, sample: PlannedSample, encoder: SampleEncoder) -> list[SampledVideo]:
    source, sampled = task.sources[sample.source_id], []
    for at in sample.media[len(sample.media) - sample.num_videos :] if sample.num_videos else ():
        with source.open_located(at) as file:
            sampled.append(encoder.sample_video(encoder.video_header(file)))
    return sampled
