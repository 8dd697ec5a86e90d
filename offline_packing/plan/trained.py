"""How often samples were trained by earlier runs: from the packs that their schedules dealt, over
the plans of these packs, to samples with the same key of the same source."""

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from offline_packing.config.packing import PackingConfig
from offline_packing.errors import StageError
from offline_packing.index.records import Hashes, own_keys
from offline_packing.index.table import Index
from offline_packing.online.ranks.pack_costs import artifacts_of, numbers_in_plans, schedule_of
from offline_packing.runs.manifest import read_manifest
from offline_packing.runs.training_run import Trained
from offline_packing.sources.options import place_of
from offline_packing.storage.key_set import hash_keys
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.loading.schedule import trained_items
from task_encoders.loading.slots import SlotRows
from task_encoders.storage.paths import path_of

#: Columns that say which sample a row is.
_NAMES = ("key", "source_id")
#: Hashes of keys, ascending, and how often each was trained.
_Counts = tuple[Hashes, npt.NDArray[np.int64]]


def count_trained(
    config: PackingConfig, samples: Index, runs: Mapping[str, Trained]
) -> npt.NDArray[np.int64]:
    """(num_samples,) how often each sample was trained by the runs that its source skips.

    Args:
        runs: the stages of each run, by its path.

    Raises:
        StageError: packs of a run are gone or were written anew, or none of them are of a source;
            or conversations were cut in another way.
    """
    trained = {path: _trained_of(path, stages, samples) for path, stages in runs.items()}
    found, known = np.zeros(samples.info.num_samples, np.int64), {}
    for number, source in enumerate(config.source):
        place = place_of(source.model_dump())
        for path in source.trained_by:
            if place not in trained[path]:
                raise StageError(
                    f"source.skip: no pack that {path} trained is of {source.path}; name the run "
                    "that trained it, or take it out"
                )
        if source.trained_by:
            known[number] = _sum([trained[path][place] for path in source.trained_by])
    start = 0
    for part in samples.parts(*_NAMES) if known else ():
        rows = part.append_column("row", [np.arange(start, start := start + len(part))])
        prefixes = [(number, config.key_prefixes()[number]) for number in known]
        for keys, own in own_keys(rows, "source_id", prefixes):
            if len(own):
                hashes, counts = known[own["source_id"][0].as_py()]
                wanted = hash_keys(keys.to_pylist())
                places = np.minimum(np.searchsorted(hashes, wanted), max(len(hashes) - 1, 0))
                if len(hashes):
                    same = hashes[places] == wanted
                    found[own["row"].to_numpy()] = np.where(same, counts[places], 0)
    return found


def _trained_of(path: str, stages: Trained, samples: Index) -> dict[tuple[object, ...], _Counts]:
    """The keys that a run trained, without prefix, by the places of their sources. Raises
    StageError as `count_trained`."""
    found = defaultdict(list)
    for stage in stages:
        for root, uses in _uses_of(path, stage):
            theirs, _ = artifacts_of(root, manifest := read_manifest(root))
            assert manifest is not None  # `artifacts_of` refuses None
            _check_cutting(path, root, theirs, samples)
            prefixes = {
                i: str(theirs.info.fingerprint[f"source.{i}.key_prefix"])
                for i in range(len(manifest.config["source"]))
            }
            places = [place_of(source) for source in manifest.config["source"]]
            for place in places:
                found[place].append((np.empty(0, np.uint64), np.empty(0, np.int64)))
            start = 0
            for part in theirs.parts(*_NAMES):
                own_uses = uses[start : (start := start + len(part))]
                rows = part.append_column("uses", [own_uses]).filter(own_uses > 0)
                for keys, own in own_keys(rows, "source_id", prefixes.items()):
                    if len(own):
                        place = places[own["source_id"][0].as_py()]
                        counts = own["uses"].to_numpy()
                        found[place].append((hash_keys(keys.to_pylist()), counts))
    return {place: _sum(counts) for place, counts in found.items()}


def _sum(counts: list[_Counts]) -> _Counts:
    hashes, inverse = np.unique(
        np.concatenate([hashes for hashes, _ in counts]), return_inverse=True
    )
    every = np.concatenate([own for _, own in counts])
    return hashes, np.bincount(inverse, every, len(hashes)).astype(np.int64)


def _uses_of(path: str, stage: Mapping[str, Any]) -> Iterator[tuple[Path, npt.NDArray[np.int64]]]:
    """The outputs whose packs a stage trained, and how often it trained each sample of their
    indexes, (num_samples,)."""
    for root, content_hash in stage["datasets"].items():
        manifest = read_manifest(path_of(root))
        if manifest is None or manifest.content_hash != content_hash:
            what = "is no longer there" if manifest is None else "was packed anew since"
            raise StageError(f"source.skip: {path} trained packs of {root}, which {what}")
    folder = PackedFolder(stage["path"])
    options = {name: stage[name] for name in ("order", "seed", "repeat")}

    @functools.cache
    def schedule(num_ranks: int) -> Any:
        rows = stage["micro_batch_size"]
        return schedule_of(folder, num_ranks=num_ranks, packs_per_row=rows, **options)

    rows = _slot_rows(folder)
    size = len(folder) if rows is None else len(rows)
    counts = np.zeros(size, np.int64)
    try:
        for items in trained_items(stage["loader"], schedule):
            counts += np.bincount(items, minlength=size)
    except ValueError as error:
        raise StageError(f"source.skip: {path} trained {stage['path']}: {error}") from error
    if rows is not None:
        counts = counts[rows.slots.begins]  # each rank of a pack has a row of it
    for root, numbers, planned in numbers_in_plans(folder):
        samples, plan = artifacts_of(root, read_manifest(root))
        of_packs = np.zeros(plan.num_packs, np.int64)
        np.add.at(of_packs, planned, counts[numbers])
        each = np.repeat(of_packs, np.diff(plan.pack_offsets))
        uses = np.bincount(plan.sample_ids, each, samples.info.num_samples)
        yield root, uses.astype(np.int64)


def _slot_rows(folder: PackedFolder) -> SlotRows | None:
    manifest = read_manifest(folder.shards[0].root)
    has_slots = manifest and manifest.context_parallel and manifest.context_parallel.ranks > 1
    return SlotRows(folder) if has_slots else None


def _check_cutting(path: str, root: Path, theirs: Index, samples: Index) -> None:
    """Raise StageError if parts of conversations are others than those that were trained."""
    if not (theirs.info.split or samples.info.split):
        return
    for name in ("pack.on_overlong", "pack.split_turns", "pack.seq_length", "pack.budgets"):
        was, now = (one.info.fingerprint.get(name) for one in (theirs, samples))
        if was != now:
            raise StageError(
                f"source.skip: {path} trained {root}, whose conversations were cut with {name} "
                f"{was!r}, not {now!r}: their parts are others"
            )
