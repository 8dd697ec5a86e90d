"""The manifest: what a packed dataset holds, and that it is complete.

The same input, configuration and seed give the same manifest on any number of workers. It is put
together from one fragment per shard, kept in _packing/write/. Data that were appended later have a
generation of their own, numbered from 1.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from offline_packing.config.packing import PackingConfig
from offline_packing.errors import StageError
from offline_packing.index.table import IndexInfo
from offline_packing.layouts import LAYOUTS
from offline_packing.layouts.energon_metadata import hash_metadata
from offline_packing.layouts.fragments import ShardFragment, ShardFragments
from offline_packing.layouts.shard_layout import Earlier
from offline_packing.runs.generations import earlier_generations
from offline_packing.runs.run import Stage
from offline_packing.storage.files import hash_bytes, read_json, to_json, write_atomically

MANIFEST_VERSION: Final = 1

#: What `content_hash` does not cover.
_APART: Final = ("content_hash", "library_versions", "metadata")

Manifest = Mapping[str, Any]


def read_manifest(stage: Stage) -> Manifest | None:
    """The manifest of a dataset that is complete as far as this stage's generation; or None.

    Raises:
        StageError: it is damaged, or was edited.
    """
    path = stage.workspace.manifest
    manifest = read_json(path)
    if manifest is None:
        return None
    if _content_hash(manifest) != manifest.get("content_hash"):
        raise StageError(
            f"{path} is not what was written: its content_hash differs; restore it from a copy, or "
            "remove it and run write, then each append, again"
        )
    if len(manifest["appended"]) < stage.generation:
        return None
    return dict(manifest)


def earlier_shards(stage: Stage) -> Earlier:
    """What the generations before this stage's wrote."""
    shards = _shards_before(stage, read_json(stage.workspace.manifest))
    return Earlier(
        num_packs=sum(shard["packs"] for shard in shards),
        num_shards=Counter(shard["split"] for shard in shards),
    )


def write_manifest(
    stage: Stage, index: IndexInfo, plan: Mapping[str, Any], fragments: ShardFragments
) -> Manifest:
    """Write the layout's metadata and then the manifest, which makes the dataset complete.

    Args:
        plan: content of the plan's stage.json.
        fragments: the shards of this stage's generation, in order.
    """
    workspace = stage.workspace
    before = read_json(workspace.manifest) if stage.generation else None
    content = build_manifest(stage, index, plan, fragments, before)
    manifest = finish_layout(stage, content)
    write_atomically(workspace.manifest, to_json(manifest))
    return manifest


def finish_layout(stage: Stage, manifest: Manifest) -> Manifest:
    """Write what the layout says of all shards in a manifest; returns the manifest with the hashes
    of these files."""
    workspace = stage.workspace
    splits: dict[str, list[str]] = {split: [] for split in manifest["counts"]["packs"]}
    for shard in manifest["shards"]:
        splits[shard["split"]].append(shard["name"])
    fragments = [
        workspace.of_generation(shard["generation"]).fragment(shard["name"])
        for shard in manifest["shards"]
    ]
    layout = LAYOUTS[manifest["layout"]]
    layout.finish(
        workspace.root,
        manifest["task"],
        splits,
        ShardFragments(fragments),
        manifest["content_hash"],
    )
    hashes = {name: hash_metadata(workspace.root / name) for name in layout.METADATA}
    return {**manifest, "metadata": hashes}


def stages_of_manifest(stage: Stage, manifest: Manifest) -> Iterator[Stage]:
    """The stage that made the dataset, and those that appended, from the configuration of either:
    the manifest holds those of all."""
    earlier = earlier_generations(replace(stage, generation=len(manifest["appended"]) + 1))
    own = _without_names(stage.config)
    appended = any(_without_names(generation.config) == own for generation in earlier[1:])
    yield replace(stage, config=earlier[0].config) if appended else stage
    for i, generation in enumerate(earlier[1:], start=1):
        yield replace(stage, config=generation.config, generation=i)


def build_manifest(
    stage: Stage,
    index: IndexInfo,
    plan: Mapping[str, Any],
    fragments: ShardFragments,
    before: Manifest | None,
) -> dict[str, Any]:
    """The manifest's content but `metadata`, which `finish_layout` adds.

    Args:
        before: the manifest that data are appended to.
    """
    shards = [*_shards_before(stage, before), *_describe(fragments, stage.generation)]
    set_aside = Counter(index.set_aside) + Counter(plan["set_aside"])
    num_samples = index.num_samples + index.num_set_aside
    if before is not None:
        set_aside += Counter(before["counts"]["set_aside"])
        num_samples += before["counts"]["samples"]
    content = {
        "version": MANIFEST_VERSION,
        "task": stage.config.task,
        "layout": stage.config.output.layout,
        "seq_length": stage.config.pack.seq_length,
        "pad_multiple": stage.config.pack.pad_multiple,
        "counts": {
            "samples": num_samples,
            "packed": sum(shard["samples"] for shard in shards),
            "set_aside": dict(set_aside),
            "tokens": sum(shard["tokens"] for shard in shards),
            "packs": {
                split: sum(shard["packs"] for shard in shards if shard["split"] == split)
                for split in _splits(stage, before)
            },
        },
        "shards": shards,
        **_origin(stage, index, plan, before),
    }
    return {
        **content,
        "content_hash": _content_hash(content),
        "library_versions": index.versions,
    }


def _content_hash(manifest: Manifest) -> str:
    """Of all that does not depend on versions of libraries."""
    content = {name: value for name, value in manifest.items() if name not in _APART}
    return hash_bytes(to_json(content))


def hash_plan(info: Mapping[str, Any]) -> str:
    """Of what a plan's stage.json says of the plan, whatever the times of the source's files and
    the versions of libraries are."""
    fingerprint = {name: value for name, value in info["fingerprint"].items() if name != "index"}
    named = {"fingerprint": fingerprint, "hash": info["hash"], "set_aside": info["set_aside"]}
    return hash_bytes(to_json(named))


def _shards_before(stage: Stage, manifest: Manifest | None) -> list[dict[str, Any]]:
    shards = [] if manifest is None else manifest["shards"]
    return [shard for shard in shards if shard["generation"] < stage.generation]


def _describe(fragments: ShardFragments, generation: int) -> Iterator[dict[str, Any]]:
    def describe(fragment: ShardFragment) -> dict[str, Any]:
        return {
            "name": fragment.name,
            "split": fragment.split,
            "packs": fragment.num_packs,
            "samples": fragment.num_samples,
            "tokens": fragment.num_tokens,
            "bytes": fragment.num_bytes,
            "xxh3_128": fragment.xxh3_128,
            "fragment_xxh3_128": fragment.content_hash,
            "generation": generation,
        }

    return map(describe, fragments)


def _splits(stage: Stage, before: Manifest | None) -> list[str]:
    """Names of the splits, those of earlier generations first."""
    earlier = [] if before is None else before["counts"]["packs"]
    return list(dict.fromkeys([*earlier, *stage.config.output.split]))


def stored_config(config: PackingConfig) -> dict[str, Any]:
    """What decides the content of an output: not where it lies, nor what ran the tasks."""
    excluded: dict[str, Any] = {
        "engine": True,
        "report": True,
        "output": {"path", "overwrite"},
        "pack": {"max_set_aside"},
    }
    return config.model_dump(mode="json", exclude=excluded)


def _origin(
    stage: Stage, index: IndexInfo, plan: Mapping[str, Any], before: Manifest | None
) -> dict[str, Any]:
    """What the shards were made from: first the original data, then what was appended."""
    origin = {
        "fingerprint": index.fingerprint,
        "config": stored_config(stage.config),
        "plan": hash_plan(plan),
    }
    if before is None:
        return {**origin, "appended": []}
    appended = [*before["appended"][: stage.generation - 1], origin]
    return {
        "fingerprint": before["fingerprint"],
        "config": before["config"],
        "plan": before["plan"],
        "appended": appended,
    }


def _without_names(config: PackingConfig) -> dict[str, Any]:
    """`stored_config` without the names of sources, which append may have given them."""
    content = stored_config(config)
    return {**content, "source": [{**source, "name": None} for source in content["source"]]}


def require_manifest(stage: Stage) -> Manifest:
    """The manifest. Raises StageError if the dataset is not complete."""
    manifest = read_manifest(stage)
    if manifest is None:
        raise StageError(f"no manifest in {stage.workspace.root}; run write first")
    return manifest
