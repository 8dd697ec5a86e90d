"""What each source contributes to a plan: what weights and repeats make of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from offline_packing.config.packing import PackingConfig
from offline_packing.index.table import Index
from offline_packing.planner.pack_plan import PackPlan

#: Sizes of records and media, without their other columns.
_SIZES: Final = ("json.size", "media.list.element.size")


@dataclass(frozen=True, slots=True)
class SourceUse:
    """What the packs hold of one source."""

    name: str
    #: different samples
    samples: int
    #: uses per sample, in the mean
    times_used: float
    #: of all uses, and their share of those of all sources
    tokens: int
    share: float
    #: of the records and media of all uses
    num_bytes: int


def source_uses(config: PackingConfig, samples: Index, packs: PackPlan) -> list[SourceUse]:
    """One entry per source; reads the index part by part."""
    uses = np.zeros(samples.info.num_samples, np.int32)
    np.add.at(uses, packs.sample_ids, 1)
    num_sources = len(config.source)
    sums = np.zeros((4, num_sources), np.int64)  # samples, uses, tokens, bytes
    first = 0
    for number, part in enumerate(samples.parts("source_id", "num_tokens")):
        own = uses[first : first + len(part)].astype(np.int64)
        first += len(part)
        source_ids = part["source_id"].to_numpy()
        num_bytes = own * _sample_bytes(samples.path(number))
        values = (own > 0, own, own * part["num_tokens"].to_numpy(), num_bytes)
        for total, value in zip(sums, values, strict=True):
            np.add.at(total, source_ids, value)
    all_tokens = max(int(sums[2].sum()), 1)
    return [
        SourceUse(name, used, count / max(used, 1), tokens, tokens / all_tokens, num_bytes)
        for name, (used, count, tokens, num_bytes) in zip(
            config.source_names(), sums.T.tolist(), strict=True
        )
    ]


def _sample_bytes(path: Path) -> npt.NDArray[np.int64]:
    """(num_rows,) bytes of the record and the media of each sample in a part of the index."""
    table = pq.ParquetFile(path).read(columns=list(_SIZES))
    media = table["media"].combine_chunks()
    ends = np.concatenate([[0], np.cumsum(media.flatten().field("size").to_numpy())])
    in_media = np.diff(ends[np.cumsum(media.value_lengths().to_numpy())], prepend=0)
    return in_media + table["json"].combine_chunks().field("size").to_numpy()


def render_source_uses(sources: Sequence[SourceUse]) -> list[str]:
    """A table, one line per source."""
    width = max(24, *(len(source.name) + 2 for source in sources))
    head = f"{'samples':>12} {'times used':>11} {'tokens':>16} {'share':>7} {'bytes':>18}"
    return [
        f"{'source':<{width}}{head}",
        *(
            f"{s.name:<{width}}{s.samples:>12,} {s.times_used:>11.2f} {s.tokens:>16,} "
            f"{s.share:>7.1%} {s.num_bytes:>18,}"
            for s in sources
        ),
    ]
