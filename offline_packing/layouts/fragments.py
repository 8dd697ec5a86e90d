"""Fragments: what each finished shard holds, in _packing/write/. They mark it as finished."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from offline_packing.errors import StageError
from offline_packing.storage.files import hash_bytes, read_json, write_atomically
from offline_packing.storage.tars import FilePart, PackEntry, Part


@dataclass(frozen=True)
class ShardFragment:
    """One finished shard."""

    #: as in the manifest
    name: str
    split: str
    num_samples: int
    num_tokens: int
    num_bytes: int
    xxh3_128: str
    packs: Sequence[PackEntry]

    @property
    def num_packs(self) -> int:
        """Packs in the shard."""
        return len(self.packs)

    @property
    def content_hash(self) -> str:
        """xxh3_128 of the file that `save` writes."""
        return hash_bytes(orjson.dumps(self))

    def save(self, path: Path) -> None:
        """Write the fragment: from now on the shard is finished."""
        write_atomically(path, orjson.dumps(self))

    def as_recorded(self, content_hash: str) -> "ShardFragment":
        """The fragment in the form that a manifest recorded: earlier versions kept no hashes of
        single files."""
        if self.content_hash == content_hash:
            return self
        packs = [
            replace(pack, parts=tuple(Part(p.name, p.offset, p.size) for p in pack.parts))
            for pack in self.packs
        ]
        return replace(self, packs=packs)

    @classmethod
    def load(cls, path: Path) -> "ShardFragment":
        """Read a fragment. Raises StageError where there is none, or it is damaged."""
        content = read_json(path)
        if content is None:
            raise StageError(f"{path} is missing; run write again")
        try:
            packs = [
                PackEntry(**{**pack, "parts": tuple(map(_part, pack["parts"]))})
                for pack in content["packs"]
            ]
            return cls(**{**content, "packs": packs})
        except (KeyError, TypeError) as error:
            raise StageError(f"{path} is damaged: {error}; retry rewrites it") from error


def _part(content: Mapping[str, Any]) -> Part:
    return FilePart(**content) if "xxh3_128" in content else Part(**content)


@dataclass(frozen=True)
class ShardFragments:
    """Fragments in order, read one at a time: together they may not fit in memory."""

    paths: Sequence[Path]

    def __iter__(self) -> Iterator[ShardFragment]:
        return map(ShardFragment.load, self.paths)
