"""The manifest: what a packed dataset holds, and that it is complete.

The same input, configuration and seed give the same manifest on any number of workers. It is put
together from one fragment per shard, kept in _packing/write/.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from offline_packing.energon_metadata import write_energon_metadata
from offline_packing.errors import StageError
from offline_packing.files import hash_bytes, read_json, to_json, write_atomically
from offline_packing.index import IndexInfo
from offline_packing.stage import Stage
from offline_packing.tar_shards import PackEntry, Part

MANIFEST_VERSION: Final = 1


@dataclass(frozen=True)
class ShardFragment:
    """One finished shard."""

    name: str
    split: str
    num_samples: int
    num_tokens: int
    num_bytes: int
    xxh3_128: str
    packs: Sequence[PackEntry]

    def save(self, path: Path) -> None:
        """Write the fragment: from now on the shard is finished."""
        write_atomically(path, to_json(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> "ShardFragment":
        """Read a fragment. Raises StageError where there is none."""
        content = read_json(path)
        if content is None:
            raise StageError(f"{path} is missing; run write again")
        packs = [
            PackEntry(**{**pack, "parts": tuple(Part(**part) for part in pack["parts"])})
            for pack in content["packs"]
        ]
        return cls(**{**content, "packs": packs})


def write_manifest(
    stage: Stage,
    index: IndexInfo,
    plan: Mapping[str, Any],
    fragments: Sequence[ShardFragment],
) -> dict[str, Any]:
    """Write Energon's metadata and then the manifest, which makes the dataset complete.

    Args:
        plan: content of the plan's stage.json.
        fragments: all shards, in order.
    """
    manifest = build_manifest(stage, index, plan, fragments)
    splits: dict[str, list[str]] = {split: [] for split in stage.config.output.split}
    for fragment in fragments:
        splits[fragment.split].append(fragment.name)
    write_energon_metadata(
        stage.workspace.root,
        stage.config.task,
        splits,
        {fragment.name: fragment.packs for fragment in fragments},
        content_hash=manifest["content_hash"],
    )
    write_atomically(stage.workspace.manifest, to_json(manifest))
    return manifest


def build_manifest(
    stage: Stage,
    index: IndexInfo,
    plan: Mapping[str, Any],
    fragments: Sequence[ShardFragment],
) -> dict[str, Any]:
    """The manifest's content; `content_hash` covers everything but the versions of libraries."""
    config = stage.config
    set_aside = Counter(index.set_aside) + Counter(plan["set_aside"])
    packs = Counter[str]()
    for fragment in fragments:
        packs[fragment.split] += len(fragment.packs)
    content = {
        "version": MANIFEST_VERSION,
        "task": config.task,
        "seq_length": config.pack.seq_length,
        "pad_multiple": config.pack.pad_multiple,
        "counts": {
            "samples": index.num_samples + index.num_set_aside,
            "packed": sum(fragment.num_samples for fragment in fragments),
            "set_aside": dict(set_aside),
            "tokens": sum(fragment.num_tokens for fragment in fragments),
            "packs": {split: packs[split] for split in config.output.split},
        },
        "shards": [
            {
                "name": fragment.name,
                "split": fragment.split,
                "packs": len(fragment.packs),
                "samples": fragment.num_samples,
                "tokens": fragment.num_tokens,
                "bytes": fragment.num_bytes,
                "xxh3_128": fragment.xxh3_128,
            }
            for fragment in fragments
        ],
        "fingerprint": index.fingerprint,
        "config": config.model_dump(
            mode="json", exclude={"engine": True, "report": True, "output": {"path", "overwrite"}}
        ),
    }
    content_hash = hash_bytes(to_json(content))
    return {**content, "content_hash": content_hash, "library_versions": index.versions}
