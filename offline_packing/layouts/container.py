"""The container of packs: WebDataset shards with Energon's metadata, whoever reads them.

train-000000.tar, train-000000.tar.idx    see tars.py; perhaps in a folder train-0000
.nv-meta/                                 see energon_metadata.py
media_roots.json                          where media are that packs refer to
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from offline_packing.errors import StageError
from offline_packing.index.table import Index
from offline_packing.layouts import LAYOUTS
from offline_packing.layouts.energon_metadata import write_energon_metadata
from offline_packing.layouts.shards import ShardFragment, ShardTask, fragment_file
from offline_packing.sources import Source, SourceOptions
from offline_packing.sources.options import MediaOptions
from offline_packing.sources.roots.roots import MediaRoot, Root, open_root
from offline_packing.storage.files import (
    atomic_file,
    hash_bytes,
    read_each,
    remove_folder,
    remove_path,
    to_json,
    write_atomically,
)
from offline_packing.storage.tars import (
    PackEntry,
    TarShardWriter,
    index_bytes,
    read_pack_entry,
    scan_tar,
)
from task_encoders.packs.manifest import Manifest
from task_encoders.packs.pack import Pack
from task_encoders.packs.stored_media import MEDIA_ROOTS, pack_of

_SHARD: Final = re.compile(r"[A-Za-z0-9_]+-\d{6}\.tar(\.idx)?")
_FOLDER: Final = re.compile(r"[A-Za-z0-9_]+-\d{4,}")


def shard_file(shard_name: str) -> str:
    """Return a shard's name in the manifest, relative to the output: 'train-000000.tar'."""
    return f"{shard_name}.tar"


def write_shard(task: ShardTask) -> ShardFragment:
    """Write a shard; no file has its final name before it is complete. Raises StageError."""
    name = shard_file(task.shard.name)
    path, num_tokens = task.folder / name, 0
    with atomic_file(path) as file:
        writer = TarShardWriter(file)
        for key, samples in task.packs(with_media=not task.refers):
            writer.add(key, LAYOUTS[task.layout].members(task, samples))
            for sample in samples:
                task.check_unchanged(sample)
                num_tokens += sample.num_tokens - sample.branches * sample.prefix_tokens
        digest = writer.finish()
    write_atomically(path.with_suffix(".tar.idx"), index_bytes(writer.entries))
    split, num_samples = task.shard.split, len(task.samples)
    return ShardFragment(name, split, num_samples, num_tokens, writer.size, digest, writer.entries)


def describe(folder: Path, manifest: Manifest, fragments: Sequence[Path]) -> list[str]:
    """Write Energon's metadata for all shards of an output into `folder`; return the names of the
    files. The manifest lacks only their hashes; `fragments` are of all shards, in order."""
    splits: dict[str, list[str]] = {split: [] for split in manifest.counts.packs}
    for shard in manifest.shards:
        splits[shard.split].append(shard.name)
    shards = read_each(folder, ShardFragment.load, fragments)
    packs = ((shard.name, shard.packs) for shard in shards)
    return write_energon_metadata(
        folder,
        manifest.task,
        splits,
        packs,
        content_hash=manifest.content_hash,
        generation=manifest.generation,
        instead=LAYOUTS[manifest.layout].metadata(manifest),
    )


def files_of(fragment: ShardFragment) -> dict[str, str]:
    """Return the hash of each file of a written shard, by its name relative to the output."""
    name = fragment.name
    return {
        name: fragment.xxh3_128,
        f"{name}.idx": hash_bytes(index_bytes(fragment.packs)),
        fragment_file(name.removesuffix(".tar")): hash_bytes(fragment.to_bytes()),
    }


def read_packs(folder: Path, shard: Path) -> Iterator[Pack]:
    """Yield the packs of a shard of an output in `folder`, their JSON parsed; media that they refer
    to are read when they are asked for. Raises StageError where the shard cannot be read."""
    entries = list(scan_tar(shard))
    with shard.open("rb") as file:
        for entry in entries:
            file.seek(entry.offset)
            yield _pack(folder, entry, file.read(entry.size))


def read_pack(folder: Path, shard: str, key: str) -> Pack:
    """Return one pack of a shard, as `read_packs` does."""
    return _pack(folder, *read_pack_entry(folder / shard, key))


def _pack(folder: Path, entry: PackEntry, data: bytes) -> Pack:
    starts = [(part, part.offset - entry.offset) for part in entry.parts]
    members = {part.name: data[start : start + part.size] for part, start in starts}
    return pack_of(entry.key, members, folder)


def remove_shards(folder: Path) -> None:
    """Remove all shards and what describes them."""
    inner = [path for path in folder.iterdir() if _FOLDER.fullmatch(path.name) and path.is_dir()]
    for path in [path for at in (folder, *inner) for path in at.iterdir()]:
        if _SHARD.fullmatch(path.name):
            path.unlink()
    for at in inner:
        with suppress(OSError):  # it holds files of others
            at.rmdir()
    remove_folder(folder / ".nv-meta")
    remove_path(folder / MEDIA_ROOTS)


def media_roots(sources: Sequence[SourceOptions]) -> bytes:
    """Return the content of MEDIA_ROOTS: the folders, or URLs, of media that are files of their
    own, and of tars that hold others. When a source moves, it changes and the packs do not. Raises
    StageError if a source is missing."""
    roots = {}
    for i, source in enumerate(sources):
        folder = source.image_root if isinstance(source, MediaOptions) else None
        roots[f"files{i}"] = _address(open_root(folder or source.path)[0])
        roots[f"tars{i}"] = _address(open_root(source.path)[0])
    return to_json(roots)


def _address(root: Root) -> str:
    return (root.folder if isinstance(root, MediaRoot) else root.path("")).rstrip("/") or "/"


def check_places(samples: Index, sources: Sequence[Source]) -> None:
    """Raise StageError if packs cannot refer to some medium: it is neither a file nor a member of
    an uncompressed tar."""
    for table in samples.parts("source_id", "media"):
        media = table["media"].combine_chunks()
        owners = table["source_id"].combine_chunks().take(pc.list_parent_indices(media))
        kinds = media.flatten().field("kind")
        odd = pc.invert(pc.is_in(kinds, pa.array(["file", "bytes"])))
        for row in pa.table([owners, kinds], ["source_id", "kind"]).filter(odd)[:1].to_pylist():
            source = sources[row["source_id"]]
            raise StageError(
                f"output.media=refer: packs cannot refer to the media of {source.path!r} "
                f"({source.options.format}: {row['kind']}), which are neither files nor in "
                "uncompressed tars; copy them: output.media=copy"
            )
