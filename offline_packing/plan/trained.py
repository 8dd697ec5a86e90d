"""How often samples were trained by earlier runs: from the packs that their schedules dealt, over
the plans of these packs, to samples with the same key of the same source."""

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from offline_packing.config.packing import PackingConfig
from offline_packing.errors import StageError
from offline_packing.index.records import own_keys
from offline_packing.index.table import Index
from offline_packing.online.ranks.pack_costs import planned_outputs, schedule_of
from offline_packing.runs.manifest import read_manifest
from offline_packing.runs.training_run import Trained, TrainedStage
from offline_packing.sources.options import place_of
from offline_packing.storage.key_set import Hashes, hash_keys
from task_encoders.field_types import first_problem
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.loading.schedule import trained_items
from task_encoders.packs.manifest import Manifest
from task_encoders.storage.paths import path_of

#: Columns that say which sample a row is.
_NAMES = ("key", "source_id")


def count_trained(
    config: PackingConfig, samples: Index, runs: Mapping[str, Trained]
) -> npt.NDArray[np.int64]:
    """Count how often each sample was trained by the runs that its source skips, (num_samples,).

    Args:
        runs: the stages of each run, by its path.

    Raises:
        StageError: packs of a run are gone or were written anew, or none are of a source that
            names it; or conversations were cut in another way.
    """
    trained = {}
    for path, stages in runs.items():
        try:
            trained[path] = _keys_of(path, stages, samples)
        except (ValueError, OSError) as error:  # not what a run trained, or not here
            why = first_problem(error) if isinstance(error, ValidationError) else error
            raise StageError(f"source.skip: {path}: {why}; name another run") from error
    places = [place_of(source.model_dump()) for source in config.source]
    known: dict[tuple[int, str], Hashes] = {}
    for path, own in trained.items():
        named = [number for number, one in enumerate(config.source) if path in one.trained_by]
        if not any(places[number] in own for number in named):
            paths = ", ".join(config.source[number].path for number in named)
            raise StageError(
                f"source.skip: the run {path} trained no pack of {paths}; name the run that "
                "did, or remove it"
            )
    for number, prefix in enumerate(config.key_prefixes()):
        paths_of = config.source[number].trained_by
        every = [some for path in paths_of for some in trained[path].get(places[number], [])]
        if every:
            known[number, prefix] = np.sort(np.concatenate(every))
    found = [np.empty(0, np.int64)]
    for part in samples.parts(*_NAMES):
        counts = np.zeros(len(part), np.int64)
        rows = part.append_column("row", [np.arange(len(part))])
        for numbered, trained_keys in known.items():
            for keys, some in own_keys(rows, "source_id", [numbered]):
                hashes = hash_keys(keys.to_pylist())
                first = np.searchsorted(trained_keys, hashes, "left")
                last = np.searchsorted(trained_keys, hashes, "right")
                counts[some["row"].to_numpy()] = last - first
        found.append(counts)
    return np.concatenate(found)


def _keys_of(path: str, stages: Trained, samples: Index) -> dict[tuple[object, ...], list[Hashes]]:
    """Return the hashes of the keys that a run trained, without prefix, by the places of their
    sources; a key that was trained twice is there twice. Raises StageError as `count_trained`."""
    found = defaultdict(list)
    for manifest, theirs, times in (one for stage in stages for one in _trained_of(path, stage)):
        was, now = (
            {k: v for k, v in one.info.fingerprint.items() if k.startswith("pack.")}
            for one in (theirs, samples)
        )
        if (theirs.info.split or samples.info.split) and was != now:
            raise StageError(
                f"source.skip: conversations that the run {path} trained were cut with {was}, but "
                f"now with {now}; use the same settings, or name another run"
            )
        start = 0
        for part in theirs.parts(*_NAMES):
            own = times[start : (start := start + len(part))]
            rows = part.append_column("times", [own]).filter(own > 0)
            for number, source in enumerate(manifest.config["source"]):
                prefix = str(theirs.info.fingerprint[f"source.{number}.key_prefix"])
                for keys, some in own_keys(rows, "source_id", [(number, prefix)]):
                    hashes = hash_keys(keys.to_pylist())
                    found[place_of(source)].append(np.repeat(hashes, some["times"].to_numpy()))
    return found


def _trained_of(
    path: str, plain: Mapping[str, Any]
) -> Iterator[tuple[Manifest, Index, npt.NDArray[np.int64]]]:
    """Yield the outputs whose packs a stage trained: manifest, index, and how often each sample of
    the index was trained, (num_samples,). Raises StageError if an output was packed anew since."""
    stage = TrainedStage.model_validate(plain)
    for name, content_hash in stage.datasets.items():
        packed = read_manifest(path_of(name))
        if packed is None or packed.content_hash != content_hash:
            raise StageError(
                f"source.skip: the run {path} trained packs of {name}, which are missing or were "
                "packed again since; restore them, or name another run"
            )
    folder = PackedFolder(stage.path)

    @functools.cache
    def schedule(num_ranks: int) -> Any:
        options = {name: getattr(stage, name) for name in ("order", "seed", "repeat")}
        size = stage.micro_batch_size
        return schedule_of(folder, num_ranks=num_ranks, packs_per_row=size, **options)

    counts = np.zeros(len(folder), np.int64)
    for items in trained_items(stage.loader, schedule):
        np.add.at(counts, items, 1)
    for manifest, samples, plan, numbers, places in planned_outputs(folder):
        of_packs = np.zeros(plan.num_packs, np.int64)
        np.add.at(of_packs, places, counts[numbers])
        each = np.repeat(of_packs, np.diff(plan.pack_offsets))
        times = np.bincount(plan.sample_ids, each, samples.info.num_samples)
        yield manifest, samples, times.astype(np.int64)
