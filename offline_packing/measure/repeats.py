"""How often each sample of a source is used: repeats, and the weights of blended sources.

`repeat: 2.3` uses every sample twice and three in ten of them once more; `repeat: 0.5` every second
one. Which ones is drawn from their keys: it depends on nothing but the seed. `weight` says which
share of all samples a source is to have; nothing is left out for it: the source that is largest for
its weight is used once, the others are repeated.
"""

import itertools
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import BinaryIO, Final

import xxhash

from offline_packing.errors import StageError
from offline_packing.runs.run import Run
from offline_packing.sources import Scan, Source, SourcePart
from offline_packing.sources.options import MAX_REPEAT
from offline_packing.storage.files import read_json, to_json, write_atomically

_WHOLE = 2**64
#: What a dry run reads: files, and records of each.
_SAMPLED_PARTS: Final = 8
_SAMPLED_RECORDS: Final = 1000


def repeats_of_weights(weights: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Repeats that give sources of these many samples shares in proportion to the weights.

    [1, 3] for counts [100, 100] -> [1.0, 3.0]; the smallest repeat is 1. A source without samples
    gets 1.
    """
    wanted = [
        weight / count if count else 0.0 for weight, count in zip(weights, counts, strict=True)
    ]
    smallest = min((ratio for ratio in wanted if ratio), default=1.0)
    return [ratio / smallest if ratio else 1.0 for ratio in wanted]


def num_copies(key: str, repeat: float, seed: int) -> int:
    """How often the sample with this key is used."""
    whole = int(repeat)
    if repeat == whole:
        return whole
    return whole + (xxhash.xxh3_64_intdigest(key.encode(), seed=seed) < (repeat - whole) * _WHOLE)


def copy_key(key: str, copy: int) -> str:
    """Key of a copy, the first being 0: 'a/17', 'a/17#2', 'a/17#3'."""
    return f"{key}#{copy + 1}" if copy else key


def source_repeats(run: Run, sources: Sequence[Source], scans: Sequence[Scan]) -> list[float]:
    """How often the samples of each source of a configuration are used."""
    configs = run.config.source
    weights = [config.weight for config in configs if config.weight is not None]
    if not weights:
        return [config.repeat for config in configs]
    counts = [count_records(run, *pair) for pair in zip(sources, scans, strict=True)]
    repeats = repeats_of_weights(weights, counts)
    for config, repeat in zip(configs, repeats, strict=True):
        if repeat > MAX_REPEAT:
            raise StageError(
                f"the weights ask for {repeat:,.0f} copies of each sample of {config.path}, at "
                f"most {MAX_REPEAT:,} are made; lower its weight"
            )
    return repeats


def count_records(run: Run, source: Source, scan: Scan) -> int:
    """Records in a source. Parts whose number the scan does not tell (tars, compressed files) are
    read from front to back, once: the count is kept with the listing's fingerprint."""
    known = sum(part.num_records for part in scan.parts if part.num_records is not None)
    unknown = [part for part in scan.parts if part.num_records is None]
    if not unknown:
        return known
    kept_counts = run.workspace.counts
    kept: dict[str, int] = read_json(kept_counts) or {}
    if scan.fingerprint not in kept:
        tasks = [_CountTask(i, source, part) for i, part in enumerate(unknown)]
        counts = run.engine.run(_count, tasks)  # on each rank: all need the number
        with run.bar("count", len(tasks), "file") as bar:
            total = 0
            for count in counts:
                total += count
                bar.update()
        kept[scan.fingerprint] = total
        kept_counts.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept_counts, to_json(kept))
    return known + kept[scan.fingerprint]


def estimate_records(source: Source, parts: Sequence[SourcePart]) -> tuple[int, bool]:
    """Records in parts of a source and whether that is exact. Parts whose number nobody knows are
    one file each: the first records of some are read; of the others it is taken that they hold as
    many."""
    known = sum(part.num_records for part in parts if part.num_records is not None)
    unknown = [part for part in parts if part.num_records is None]
    if not unknown:
        return known, True
    chosen = unknown[:: -(-len(unknown) // _SAMPLED_PARTS)]
    sampled = [_estimate_part(source, part) for part in chosen]
    mean = sum(count for count, _ in sampled) / len(sampled)
    is_exact = len(chosen) == len(unknown) and all(exact for _, exact in sampled)
    return known + round(mean * len(unknown)), is_exact


def _estimate_part(source: Source, part: SourcePart) -> tuple[float, bool]:
    """Records in a part, of one file, in proportion to how far the first ones reach into it."""
    opened: list[BinaryIO] = []
    watched = copy(source)

    def open_container(container: str, *, sequential: bool = False) -> BinaryIO:
        opened.append(source.open_container(container, sequential=sequential))
        return opened[-1]

    watched.open_container = open_container  # type: ignore[method-assign]
    records = watched.records(part)
    count = sum(1 for _ in itertools.islice(records, _SAMPLED_RECORDS))
    if count < _SAMPLED_RECORDS:
        return count, True
    if not opened:  # it is no single file
        return count + sum(1 for _ in records), True
    reached = max(1, opened[0].tell())
    return count * max(1.0, source.root.size(opened[0]) / reached), False


@dataclass(frozen=True, slots=True)
class _CountTask:
    number: int
    source: Source
    part: SourcePart


def _count(task: _CountTask) -> int:
    return sum(1 for _ in task.source.records(task.part))
