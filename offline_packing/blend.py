"""How often each sample of a source is used: repeats, and the weights of blended sources.

`repeat: 2.3` uses every sample twice and three in ten of them once more; `repeat: 0.5` every second
one. Which ones is drawn from their keys: it depends on nothing but the seed. `weight` says which
share of all samples a source is to have; nothing is left out for it: the source that is largest for
its weight is used once, the others are repeated.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from offline_packing.config import MAX_REPEAT
from offline_packing.errors import StageError
from offline_packing.sources import Scan, Source, SourcePart
from offline_packing.stage import Stage

_WHOLE = 2**64


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


def source_repeats(stage: Stage, sources: Sequence[Source], scans: Sequence[Scan]) -> list[float]:
    """How often the samples of each source of a configuration are used."""
    configs = stage.config.source
    weights = [config.weight for config in configs if config.weight is not None]
    if not weights:
        return [config.repeat for config in configs]
    counts = [count_records(stage, *pair) for pair in zip(sources, scans, strict=True)]
    repeats = repeats_of_weights(weights, counts)
    for config, repeat in zip(configs, repeats, strict=True):
        if repeat > MAX_REPEAT:
            raise StageError(
                f"the weights ask for {repeat:,.0f} copies of each sample of {config.path}, at "
                f"most {MAX_REPEAT:,} are made; lower its weight"
            )
    return repeats


def count_records(stage: Stage, source: Source, scan: Scan) -> int:
    """Records in a source. Parts whose number the scan does not tell (tars, compressed files) are
    read from front to back."""
    known = sum(part.num_records for part in scan.parts if part.num_records is not None)
    unknown = [part for part in scan.parts if part.num_records is None]
    tasks = [_CountTask(i, source, part) for i, part in enumerate(unknown)]
    # An engine that shares tasks with others would count its share only.
    counts = map(_count, tasks) if stage.engine.IS_SHARED else stage.engine.run(_count, tasks)
    return known + sum(counts)


@dataclass(frozen=True, slots=True)
class _CountTask:
    number: int
    source: Source
    part: SourcePart


def _count(task: _CountTask) -> int:
    return sum(1 for _ in task.source.records(task.part))
