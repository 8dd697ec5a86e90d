"""Shards: which packs go into which shard, and what a finished shard holds.

_packing/write/train-000000.json    a shard's fragment, which marks it as finished

With output.shards_per_folder the name of a shard, and so of its files, is train-0000/train-000000.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow.compute as pc

from offline_packing.errors import DamagedError, StageError
from offline_packing.index.table import Index
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.storage.files import hash_bytes, read_json, seal, write_atomically
from offline_packing.storage.tars import PackEntry, Part, member_size, tar_size
from task_encoders.storage.paths import REMEDY

#: Upper limit of what a member's name and a sample's part of the pack's JSON add to the text.
_EXTRA_BYTES = 96


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """Packs first_pack to first_pack + num_packs of the plan. `number` counts the shards of all
    splits, `packs_before` the packs of its split in earlier shards."""

    name: str
    split: str
    number: int
    first_pack: int
    num_packs: int
    packs_before: int = 0


def splits_of_plan(plan: PackPlan, shares: Mapping[str, float]) -> dict[str, range]:
    """Packs of each split, in the order of the shares."""
    counts = [plan.num_packs]  # of the only one
    if len(shares) > 1:
        counts = [plan.info.splits[name] for name in shares]  # plan.json sorts the names
    ends = np.cumsum(counts).tolist()
    ranges = map(range, [0, *ends], ends)
    return dict(zip(shares, ranges, strict=True))


def samples_of_splits(
    plan: PackPlan, shares: Mapping[str, float]
) -> Iterator[tuple[str, range, int]]:
    """Name and packs of each split, and the number of different samples in them."""
    for name, own in splits_of_plan(plan, shares).items():
        ids = plan.sample_ids[plan.pack_offsets[own.start] : plan.pack_offsets[own.stop]]
        yield name, own, len(np.unique(ids))


def lay_out_shards(
    pack_bytes: npt.NDArray[np.int64],
    splits: Mapping[str, range],
    packs_per_shard: int,
    max_shard_bytes: int | None = None,
    shards_per_folder: int | None = None,
) -> list[PlannedShard]:
    """Cut the packs into shards; no shard holds packs of two splits. A pack that is larger than
    max_shard_bytes by itself gets a shard of its own. `pack_bytes` (num_packs,) is what each pack
    takes in a tar, or more."""
    shards: list[PlannedShard] = []
    for split, packs in splits.items():
        cuts = list(packs[::packs_per_shard]) or [packs.start]
        if max_shard_bytes is not None:
            cuts = _cut_by_bytes(pack_bytes, packs, packs_per_shard, max_shard_bytes)
        for i, (start, end) in enumerate(zip(cuts, [*cuts[1:], packs.stop], strict=True)):
            if end > start:
                name = f"{split}-{i:06d}"
                if shards_per_folder is not None:
                    name = f"{split}-{i // shards_per_folder:04d}/{name}"
                before = start - packs.start
                shards.append(PlannedShard(name, split, len(shards), start, end - start, before))
    return shards


def _cut_by_bytes(
    pack_bytes: npt.NDArray[np.int64], packs: range, packs_per_shard: int, max_shard_bytes: int
) -> list[int]:
    """First packs of the shards of a split."""
    cuts, held = [packs.start], 0
    for pack, size in zip(packs, pack_bytes[packs.start : packs.stop].tolist(), strict=True):
        full = tar_size(held + size) > max_shard_bytes
        if pack > cuts[-1] and (full or pack - cuts[-1] == packs_per_shard):
            cuts.append(pack)
            held = 0
        held += size
    return cuts


def estimate_pack_bytes(
    samples: Index, plan: PackPlan, *, with_media: bool = True
) -> npt.NDArray[np.int64]:
    """(num_packs,) bytes of each pack in a tar. Exact for media; the pack's JSON is taken to be no
    larger than its records, whose text it holds, and 96 bytes per sample and image beside it."""
    per_sample = np.zeros(samples.info.num_samples, dtype=np.int64)
    first = 0
    for part in samples.parts("key", "json", "media"):
        media, own = part["media"].combine_chunks(), per_sample[first : first + len(part)]
        first += len(part)
        own += part["json"].combine_chunks().field("size").to_numpy() + _EXTRA_BYTES
        own += pc.binary_length(part["key"]).to_numpy()
        sizes = media.flatten().field("size").to_numpy()
        in_tar = with_media * (member_size(0) + -(-sizes // 512) * 512) + _EXTRA_BYTES
        np.add.at(own, pc.list_parent_indices(media).to_numpy(), in_tar)
    chosen = per_sample[plan.sample_ids]
    return np.add.reduceat(chosen, plan.pack_offsets[:-1]) + member_size(0) + 512


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
        """xxh3_128 of the file that `save` writes, without its seal."""
        return hash_bytes(orjson.dumps(self))

    def save(self, path: Path) -> None:
        """Write the fragment: from now on the shard is finished."""
        write_atomically(path, orjson.dumps(seal(orjson.loads(orjson.dumps(self)))))

    @classmethod
    def load(cls, path: Path) -> "ShardFragment":
        """Read a fragment. Raises StageError where there is none, or it is damaged."""
        content = read_json(path)
        if content is None:
            raise StageError(f"{path} is missing; run write again")
        try:
            packs = [
                PackEntry(**{**pack, "parts": tuple(Part(**part) for part in pack["parts"])})
                for pack in content["packs"]
            ]
            return cls(**{**content, "packs": packs})
        except (KeyError, TypeError) as error:
            raise DamagedError(f"{path} is damaged: {error}; {REMEDY}") from error

    @classmethod
    def is_whole(cls, path: Path, content_hash: str) -> bool:
        """Whether a fragment is the one that a manifest recorded."""
        try:
            return cls.load(path).content_hash == content_hash
        except StageError:
            return False
