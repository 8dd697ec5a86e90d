"""The figures of a plan: computed once, printed as text that can be shared."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offline_packing.config.packing import PackingConfig
from offline_packing.index.rows import sums_by_source
from offline_packing.index.table import Index, IndexInfo
from offline_packing.planner.cost import padded_tokens
from offline_packing.planner.pack_plan import PackPlan

_BINS = 16
_BAR_WIDTH = 40


@dataclass(frozen=True)
class PlanSummary:
    """What a plan amounts to. Lengths are in tokens."""

    config: PackingConfig
    packs: PackPlan
    num_samples: int
    set_aside: Mapping[str, int]
    num_unused_images: int
    num_packed: int
    num_tokens: int
    #: tokens over the room in all packs
    fill: float
    #: share of padding without packing, and with it
    padding_before: float
    padding_after: float
    iterations_before: int
    iterations_after: int
    #: sequences per step that keep the number of samples per step
    equal_batch_size: int
    #: samples per bin of equal width from 1 to seq_length
    histogram: tuple[int, ...]


def summarize(
    config: PackingConfig,
    info: IndexInfo,
    lengths: npt.NDArray[np.integer],
    packs: PackPlan,
    set_aside: Mapping[str, int],
) -> PlanSummary:
    """Figures of a plan. `lengths` (num_packed,) are the tokens of the packed samples, `set_aside`
    counts those left out while measuring and planning, by reason."""
    num_packed, num_tokens = len(lengths), int(lengths.sum(dtype=np.int64))
    batch = config.report.global_batch_size
    padded = padded_tokens(np.bincount(lengths), config.report.padded_batch_size)
    edges = np.linspace(0, config.pack.seq_length, min(_BINS, config.pack.seq_length) + 1)
    return PlanSummary(
        config,
        packs,
        num_samples=info.num_samples + info.num_set_aside,
        set_aside=dict(set_aside),
        num_unused_images=info.num_unused_images,
        num_packed=num_packed,
        num_tokens=num_tokens,
        fill=num_tokens / (packs.num_packs * config.pack.seq_length),
        padding_before=1 - num_tokens / padded,
        padding_after=1 - num_tokens / max(packs.info.num_tokens, 1),
        iterations_before=math.ceil(num_packed / batch),
        iterations_after=math.ceil(packs.num_packs / batch),
        equal_batch_size=max(1, round(batch / packs.packing_factor)),
        histogram=tuple(np.histogram(lengths, edges)[0].tolist()),
    )


def render_summary(summary: PlanSummary, sources: Sequence[str] = ()) -> str:
    """The figures as text, one per line; `sources`: the lines of their table."""
    s, packs, report = summary, summary.packs, summary.config.report
    info = packs.info
    before, after = s.iterations_before, s.iterations_after
    lines = [
        ("task", s.config.task),
        ("samples", f"{s.num_samples:,}"),
        ("set aside", f"{sum(s.set_aside.values()):,}"),
        *((f"  {reason}", f"{count:,}") for reason, count in sorted(s.set_aside.items())),
        *([("unused images", f"{s.num_unused_images:,}")] if s.num_unused_images else []),
        ("packed samples", f"{s.num_packed:,}"),
        ("tokens", f"{s.num_tokens:,} (mean {s.num_tokens / s.num_packed:,.1f} per sample)"),
        ("packs", f"{packs.num_packs:,} of {info.seq_length:,} tokens, strategy {info.strategy}"),
        ("lower bound", f"{info.lower_bound:,} (gap {packs.gap:.3%})"),
        ("fill", f"{s.fill:.2%}"),
        ("packing factor", f"{packs.packing_factor:.2f} samples per pack"),
        (
            "padding",
            f"{s.padding_before:.1%} -> {s.padding_after:.1%} of tokens in a batch "
            f"(before: {report.padded_batch_size} samples padded to the longest)",
        ),
        (
            "iterations",
            f"{before:,} -> {after:,} per epoch at global batch size {report.global_batch_size:,} "
            f"(global batch size {s.equal_batch_size:,} keeps the samples per step)",
        ),
    ]
    figures = [f"{name:<24}{value}" for name, value in lines]
    table = ["", *sources] if sources else []
    return "\n".join([*figures, *table, "", "samples by tokens", *_bars(s), ""])


def _bars(summary: PlanSummary) -> list[str]:
    highest = max(summary.histogram)
    width = summary.config.pack.seq_length / len(summary.histogram)
    return [
        f"{math.floor(i * width) + 1:>9,} – {math.floor((i + 1) * width):<9,}"
        f"{'█' * math.ceil(_BAR_WIDTH * count / highest):<{_BAR_WIDTH}} {count:,}"
        for i, count in enumerate(summary.histogram)
    ]


def render_sources(config: PackingConfig, samples: Index, packs: PackPlan) -> list[str]:
    """A table of what the packs hold of each source, one line per source: different samples, uses
    per sample in the mean, and of all uses the tokens, their share of those of all sources, and the
    bytes of records and media. Reads the index part by part."""
    uses = np.zeros(samples.info.num_samples, np.int32)
    np.add.at(uses, packs.sample_ids, 1)
    sums = sums_by_source(samples, uses, len(config.source), ["num_tokens"])
    names = config.source_names()
    columns = (sums[column] for column in ("used", "uses", "num_tokens", "bytes"))
    width = max(24, *(len(name) + 2 for name in names))
    all_tokens = max(sum(sums["num_tokens"]), 1)
    head = f"{'samples':>12} {'times used':>11} {'tokens':>16} {'share':>7} {'bytes':>18}"
    return [
        f"{'source':<{width}}{head}",
        *(
            f"{name:<{width}}{used:>12,} {count / max(used, 1):>11.2f} {tokens:>16,} "
            f"{tokens / all_tokens:>7.1%} {num_bytes:>18,}"
            for name, used, count, tokens, num_bytes in zip(names, *columns, strict=True)
        ),
    ]
