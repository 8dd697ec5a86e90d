"""Figures of samples and their plan: `plan` prints them, `report` shows them on a page and as JSON.

A figure is a row, a table or bars of a section. Each feature yields its own figures.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import methodcaller
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from offline_packing.config.packing import PackingConfig
from offline_packing.config.sections import ReportConfig, SharePrefixesConfig
from offline_packing.index.records import record_numbers
from offline_packing.index.rows import media_of_samples, of_uses, pack_table, sums_by_source
from offline_packing.index.table import Index
from offline_packing.layouts.shards import samples_of_splits, splits_of_plan
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.planner.ranks.layout import RankLayout
from offline_packing.runs.warnings import run_warnings
from task_encoders.families import model_cost
from task_encoders.packs.manifest import PackColumns
from task_encoders.samples import REASONS

#: The number of ranks whose waiting is computed if pack.order names none.
_NUM_RANKS: Final = 8
#: Columns num_NAME of the index that the samples of a tree share.
_SHARED: Final = ("tokens", "images", "videos", "vision_patches")
#: Columns num_NAME of the index that are summed by source.
_SUMS: Final = ("tokens", "loss_tokens", "images", "videos", "vision_patches", "turns")
#: The number of stretches of a plan with a mixture whose shares are shown.
_STRETCHES: Final = 10
_VALUES_AT_ONCE: Final = 1 << 20
#: Shared prefixes are recommended if at most this share of the packs remains.
_WORTH_SHARING: Final = 0.8
#: The number of bins per doubling in a histogram of lengths.
_BINS_PER_DOUBLING: Final = 2
_QUANTILES: Final = {"min": 0, "p5": 5, "p50": 50, "p95": 95, "max": 100}
_BAR_WIDTH: Final = 40


class Row(NamedTuple):
    """A figure with a name."""

    section: str
    name: str
    text: str
    value: Any
    #: an explanation, which only the page shows
    note: str = ""


class Table(NamedTuple):
    """Values in columns, each with the format of its cells."""

    section: str
    columns: Mapping[str, str]
    rows: Sequence[Sequence[Any]]
    #: an explanation, which only the page shows
    note: str = ""

    def cells(self) -> list[list[str]]:
        """Return the values as text, None as an empty one."""
        forms = self.columns.values()
        pairs = (zip(row, forms, strict=True) for row in self.rows)
        return [["" if v is None else format(v, form) for v, form in row] for row in pairs]


class Bars(NamedTuple):
    """Counts of whole numbers: bin i holds edges[i] < value <= edges[i + 1]."""

    section: str
    edges: Sequence[int]
    counts: Sequence[int]

    def cells(self) -> list[tuple[str, int]]:
        """Return (numbers of a bin as text, count) of each bin."""
        bins = itertools.pairwise(self.edges)
        names = [f"{low + 1:,} – {high:,}" if high > low + 1 else f"{high:,}" for low, high in bins]
        return list(zip(names, self.counts, strict=True))


Figure = Row | Table | Bars


def by_section(figures: Iterable[Figure]) -> dict[str, list[Figure]]:
    """Return the figures of each section, its rows first."""
    found: dict[str, list[Figure]] = {}
    for one in figures:
        found.setdefault(one.section, []).append(one)
    return {name: sorted(own, key=lambda one: type(one) is not Row) for name, own in found.items()}


def as_values(figures: Iterable[Figure]) -> dict[str, dict[str, Any]]:
    """Return plain values by section: rows by their names, a table as `rows`, bars as they are."""
    found: dict[str, dict[str, Any]] = {}
    for one in figures:
        own = found.setdefault(one.section, {})
        if isinstance(one, Row):
            own[one.name] = one.value
        elif isinstance(one, Table):
            own["rows"] = [dict(zip(one.columns, row, strict=True)) for row in one.rows]
        else:
            own |= {"edges": one.edges, "counts": one.counts}
    return found


def as_text(figures: Iterable[Figure]) -> str:
    """Return the figures as text, a section after the other."""
    lines: list[str] = []
    for section, own in by_section(figures).items():
        lines += ["", section]
        for one in own:
            if isinstance(one, Row):
                lines.append(f"  {one.name:<22}{one.text}")
            elif isinstance(one, Table):
                cells = [list(one.columns)] * (len(one.columns) > 1) + one.cells()
                signs = ["<", *(">" if form else "<" for form in [*one.columns.values()][1:])]
                widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
                for row in cells:
                    parts = zip(row, signs, widths, strict=True)
                    line = "  ".join(f"{cell:{sign}{width}}" for cell, sign, width in parts)
                    lines.append(f"  {line}".rstrip())
            else:
                most = max(one.counts) or 1
                for name, count in one.cells():
                    bar = "█" * math.ceil(_BAR_WIDTH * count / most)
                    lines.append(f"  {name:>17}  {bar:<{_BAR_WIDTH}} {count:,}")
    return "\n".join([*lines[1:], ""])


def run_figures(
    config: PackingConfig,
    samples: Index,
    plan: PackPlan | None,
    set_aside: Mapping[str, int],
    table: PackColumns | None = None,
) -> Iterator[Figure]:
    """Yield the figures of an index and its plan, if there is one. `set_aside` counts samples set
    aside while planning, by reason. With the plan's `table`, the waiting of ranks is shown even
    without pack.order."""
    info, lengths = samples.info, samples.array("num_tokens")
    uses = np.full(info.num_samples, plan is None, np.int32)  # packs of each sample, or 1
    if plan is not None:
        np.add.at(uses, plan.sample_ids, 1)
    reasons = Counter(info.set_aside) + Counter(set_aside)
    found, aside = info.num_samples + info.num_set_aside, reasons.total()
    yield Row("samples", "task", config.task, config.task)
    yield Row("samples", "found", f"{found:,}", found)
    yield Row("samples", "set aside", f"{aside:,}", aside)
    if info.splitting:
        yield Row("samples", "too long", info.splitting, info.splitting)
    if resize := getattr(config.model, "resize", None):
        text = f"{config.model.family}, resize {resize}; transformers 5 takes torch where "
        text += "torchvision is installed, and for videos always (lengths are the same)"
        yield Row("samples", "model", text, resize)
    for reason, count in sorted(reasons.items(), key=lambda item: (-item[1], item)):
        yield Row("set aside", reason, f"{count:,}", count, REASONS[reason])
    if warnings := [[line] for line in run_warnings(config, samples, plan)]:
        yield Table("warnings", {"warning": ""}, warnings)
    sums = sums_by_source(samples, uses, len(config.source), [f"num_{name}" for name in _SUMS])
    total = {name: sum(sums[f"num_{name}"]) for name in _SUMS}
    if plan is None:
        yield from _contents(samples, uses, total)
    else:
        packed, held = np.repeat(lengths, uses), total
        if plan.branches is not None:  # what packs hold, a shared prefix once
            of_name = {name: methodcaller("array", f"num_{name}") for name in _SHARED}
            held = {n: int(of_uses(samples, plan, of).sum()) for n, of in of_name.items()}
        yield from plan_figures(config.report, packed, plan, total["tokens"] - held["tokens"])
        if config.pack.context_parallel > 1:
            ranks, multiple = config.pack.context_parallel, config.pack.padding
            text = f"{ranks}, samples padded to multiples of {multiple}"
            yield Row("packs", "ranks of a pack", text, ranks)
        yield from _contents(samples, uses, total)
        if len(packed):
            yield from _repeated_media(config, samples, plan, uses)
        if plan.branches is not None:
            yield from _sharing(config, plan, packed, total, held)
        if config.pack.mixture is not None:
            yield from _mixture(config, samples, plan)
        if len(shares := config.output.split) > 1:
            of_splits = samples_of_splits(plan, shares)
            splits = [(name, own, len(np.unique(ids))) for name, own, ids in of_splits]
            number = sum(some for _, _, some in splits) or 1
            rows = [[name, shares[name], n / number, n, len(own)] for name, own, n in splits]
            columns = {"split": "", "asked": ".1%", "share": ".1%", "samples": ",", "packs": ","}
            yield Table("splits", columns, rows)
        if table is None and plan.order is not None:
            table = pack_table(samples, plan, model_cost(config.model))
        if table is not None:
            yield from _ranks(config, plan, table)
    yield _sources(config, samples, plan, sums)
    if len(lengths):
        found_spread = spread(lengths)
        text = ", ".join(f"{name} {value:,.6g}" for name, value in found_spread.items())
        yield Row("samples by tokens", "spread", text, found_spread)
        yield log_histogram("samples by tokens", lengths, config.pack.seq_length)


def plan_figures(
    compared: ReportConfig, lengths: npt.NDArray[np.integer], plan: PackPlan, shared: int = 0
) -> Iterator[Figure]:
    """Yield figures of a plan that need only the tokens (num_packed,) of each use of a sample, of
    which there is at least one. `shared` counts tokens that an earlier sample holds."""
    info, num_samples, num_packs = plan.info, len(lengths), plan.num_packs
    of_length = np.zeros(int(lengths.max()) + 1, np.int64)
    for start in range(0, num_samples, _VALUES_AT_ONCE):  # all at once would be copied to int64
        some = lengths[start : start + _VALUES_AT_ONCE]
        of_length += np.bincount(some, minlength=len(of_length))
    tokens, batch = int(lengths.sum(dtype=np.int64)), compared.global_batch_size
    fill, factor = (tokens - shared) / plan.room, plan.packing_factor
    packs = f"{num_packs:,} of {info.seq_length:,} tokens, strategy {info.strategy}"
    each = f"{tokens:,} (mean {tokens / num_samples:,.1f} per sample)"
    yield Row("packs", "packs", packs, num_packs)
    yield Row(
        "packs", "lower bound", f"{info.lower_bound:,} (gap {plan.gap:.3%})", info.lower_bound
    )
    yield Row("packs", "packed samples", f"{num_samples:,}", num_samples)
    yield Row("packs", "tokens", each, tokens)
    yield Row("packs", "fill", f"{fill:.2%}", fill)
    yield Row("packs", "packing factor", f"{factor:.2f} samples per pack", factor)
    size = compared.padded_batch_size
    padded = {
        f"batches of {size} padded to their longest": padded_tokens(of_length, size),
        f"each sample padded to {info.seq_length:,}": num_samples * info.seq_length,
    }
    rows = [[name, n, 1 - tokens / n, n / info.num_tokens] for name, n in padded.items()]
    rows.append(["these packs", info.num_tokens, 1 - fill, 1])
    columns = {"an epoch of": "", "tokens": ",.0f", "empty": ".2%", "cost": ".2f"}
    note = "Cost is in multiples of these packs, by tokens; what a trainer gains depends on its "
    yield Table("saving", columns, rows, note + "attention kernel.")
    before, after = math.ceil(num_samples / batch), math.ceil(num_packs / batch)
    equal = max(1, round(batch * num_packs / num_samples))  # keeps the samples of a step
    text = f"{before:,} -> {after:,} per epoch at global batch size {batch:,} (global batch size "
    text += f"{equal:,} keeps the samples per step)"
    yield Row("saving", "iterations", text, [before, after])


def _contents(
    samples: Index, uses: npt.NDArray[np.integer], total: Mapping[str, int]
) -> Iterator[Row]:
    """Yield the contents of the samples; `total` has sums over all uses by the names of _SUMS."""
    tokens, loss = total["tokens"], total["loss_tokens"]
    yield Row("contents", "tokens with loss", f"{loss:,} ({loss / (tokens or 1):.1%})", loss)
    images, videos = total["images"], total["videos"]
    each = total["vision_patches"] / max(images + videos, 1)
    some = int(uses[media_of_samples(samples.array) > 0].sum())
    text = f"{images:,} images, {videos:,} videos in {some:,} of {int(uses.sum()):,} samples; "
    yield Row("contents", "images and videos", f"{text}{each:,.0f} patches each", [images, videos])


def _sharing(
    config: PackingConfig,
    plan: PackPlan,
    lengths: npt.NDArray[np.integer],
    whole: Mapping[str, int],
    held: Mapping[str, int],
) -> Iterator[Row]:
    """Yield figures without and with shared prefixes; without them, packs are a lower bound.
    `lengths` (num_packed,) are the tokens of each use; `whole` are sums over samples, `held` sums
    over what packs hold."""
    from offline_packing.planner.strategies.budgets import size_lower_bound  # compiled

    assert plan.branches is not None
    is_branch, batch = plan.branches.astype(bool), config.report.global_batch_size
    in_trees = is_branch | np.append(is_branch[1:], False)
    num_trees, some = np.count_nonzero(in_trees & ~is_branch), np.count_nonzero(in_trees)
    padded = -(-lengths // config.pack.padding) * config.pack.padding
    sums, limits = {**whole, "samples": len(lengths)}, plan.info.settings["budgets"].items()
    bounds = [-(-sums[name] // limit) for name, limit in limits]
    packs = max([*bounds, size_lower_bound(padded, plan.info.seq_length)]), plan.num_packs
    text = f"{num_trees:,} trees of {some:,} samples; each sample whole -> as packed:"
    yield Row("shared prefixes", "trees", text, int(num_trees))
    for name, form, values in (
        ("tokens", ",d", [one["tokens"] for one in (whole, held)]),
        ("images and videos", ",d", [one["images"] + one["videos"] for one in (whole, held)]),
        ("vision patches", ",d", [one["vision_patches"] for one in (whole, held)]),
        ("samples per pack", ",.1f", [len(lengths) / count for count in packs]),
        ("iterations", ",d", [math.ceil(count / batch) for count in packs]),
    ):
        text = f"{values[0]:{form}} -> {values[1]:{form}}"
        yield Row("shared prefixes", name, text, values)


def _repeated_media(
    config: PackingConfig, samples: Index, plan: PackPlan, uses: npt.NDArray[np.integer]
) -> Iterator[Row]:
    """Estimate the packs that pack.share_prefixes would need, by tokens; yield the estimate if they
    are far fewer and the option would be accepted. Prefixes of one hash count as equal, and only a
    record's first part as sharing."""
    if not config.may_share_prefixes:
        return
    table = samples.table("prefix_hash", "prefix_tokens", "num_tokens", "num_videos")
    hashes, prefixes, tokens, videos = (column.to_numpy() for column in table.columns)
    used = np.flatnonzero(uses)
    some = used[np.unique(record_numbers(samples)[used], return_index=True)[1]]
    some = some[hashes[some] != 0]
    _, first, groups, counts = np.unique(hashes[some], True, True, True)
    shared = prefixes[some[first]].astype(np.int64)
    own = np.bincount(groups, (tokens - prefixes)[some], len(first))
    trees = np.maximum(
        np.ceil(counts / SharePrefixesConfig().max_branches),
        np.ceil(own / (config.pack.longest_sample - shared)),
    )
    saved = ((counts - trees) * shared).sum() / tokens[used].sum(dtype=np.int64)
    most = config.pack.max_samples or plan.info.seq_length
    packs = max(math.ceil(plan.num_packs * (1 - saved)), -(-len(plan.sample_ids) // most))
    if packs > _WORTH_SHARING * plan.num_packs:
        return
    media = "pictures and videos" if videos[some].any() else "pictures"
    text = f"{len(first):,} distinct {media} in {len(some):,} samples; pack.share_prefixes would "
    yield Row("contents", "repeated media", f"{text}need about {packs:,} packs", packs)


def _mixture(config: PackingConfig, samples: Index, plan: PackPlan) -> Iterator[Figure]:
    """Yield each source's share of the tokens, and the share asked for, in stretches of the first
    split's packs."""
    mixture, names = config.pack.mixture, config.source_names()
    assert mixture is not None
    num_packs = len(next(iter(splits_of_plan(plan, config.output.split).values())))
    count = min(_STRETCHES, num_packs)
    ends = plan.pack_offsets[np.arange(count + 1) * num_packs // max(count, 1)]
    rows: list[list[Any]] = []
    most = 0.0
    for i, held in enumerate(_held_tokens(samples, plan, ends, len(names))):
        rows.append([f"{i / count:.0%} – {(i + 1) / count:.0%}"])
        for name, own in zip(names, held, strict=True):
            share, asked = own / sum(held), mixture.share(name, (i + 0.5) / count)
            rows[-1] += share, asked
            most = max(most, abs(share - asked))
    yield Row("mixture", "farthest off", f"{100 * most:.2f} points from what was asked", most)
    columns = {one: ".1%" for name in names for one in (name, f"{name}, asked")}
    yield Table("mixture", {"packs": "", **columns}, rows)


def _held_tokens(
    samples: Index, plan: PackPlan, ends: npt.NDArray[np.integer], num_sources: int
) -> list[list[float]]:
    """Return the tokens of each source that packs hold between each two `ends` among the uses."""
    sources = samples.array("source_id")[plan.sample_ids]
    tokens = of_uses(samples, plan, lambda index: index.array("num_tokens"))
    return [
        np.bincount(sources[start:end], tokens[start:end], num_sources).tolist()
        for start, end in itertools.pairwise(ends)
    ]


def _ranks(config: PackingConfig, plan: PackPlan, table: PackColumns) -> Iterator[Row]:
    """Yield the shares of time that data-parallel ranks wait for the slowest, in the order written,
    in the first split with packs; and with pack.order the number of steps that are not of one kind.
    """
    layout, ordered = plan.order or RankLayout(_NUM_RANKS), plan.order is not None
    first = next(filter(len, splits_of_plan(plan, config.output.split).values()))
    own, size, num_ranks = slice(first.start, first.stop), len(first), layout.num_ranks
    if size < num_ranks:
        text = f"{size:,} packs are not one for each of {num_ranks:,} ranks"
        yield Row("ranks", "order", text, size)
        return
    shares = layout.idle_shares(table.cost[own], table.tower[own])
    text = f"{shares[0]:.2%} of {num_ranks} ranks, {shares[1]:.2%} waiting after the tower too"
    note = f"share of time that ranks with {layout.num_workers} loader workers wait for the slowest"
    note += ", by forward operations, in the order written; pack.order "
    yield Row("ranks", "idle", text, shares, note + ("evens" if ordered else "would even") + " it")
    if ordered:
        mixed, steps = layout.mixed_steps(table.media[own]), -(-size // num_ranks)
        text = f"{mixed:,} of {steps:,}"
        if done := plan.info.settings.get("uniform"):
            text += "; {halved:,} packs halved, {repeated:,} repeated".format_map(done)
        yield Row("ranks", "mixed steps", text, mixed)


def _sources(
    config: PackingConfig, samples: Index, plan: PackPlan | None, sums: Mapping[str, list[int]]
) -> Table:
    """Return distinct samples and their mean uses by source, and sums over all uses; shares are of
    the tokens that packs hold."""
    held: Sequence[float] = sums["num_tokens"]
    if plan is not None and plan.branches is not None:
        (held,) = _held_tokens(samples, plan, plan.pack_offsets[[0, -1]], len(config.source))
    rows, total = [], sum(held) or 1
    for i, name in enumerate(config.source_names()):
        own = {column: values[i] for column, values in sums.items()}
        tokens = own["num_tokens"]
        times, loss = own["uses"] / (own["used"] or 1), own["num_loss_tokens"] / (tokens or 1)
        sizes = tokens, held[i] / total, loss, own["num_images"], own["bytes"]
        rows.append([name, own["used"], times, *sizes])
    columns = {"source": "", "samples": ",", "times used": ".2f", "tokens": ",", "share": ".1%"}
    columns |= {"with loss": ".1%", "images": ",", "bytes": ","}
    return Table("sources", columns, rows)


def spread(values: npt.NDArray[Any]) -> dict[str, float | int]:
    """Return mean, min, p5, p50, p95 and max; quantiles are values that occur. Not for empty
    arrays."""
    points = np.percentile(values, list(_QUANTILES.values()), method="inverted_cdf")
    quantiles = {name: p.item() for name, p in zip(_QUANTILES, points, strict=True)}
    return {"mean": float(values.mean(dtype=np.float64)), **quantiles}


def log_histogram(section: str, values: npt.NDArray[np.integer], limit: int) -> Bars:
    """Count positive integers, from the first bin that holds anything to the last, in bins that do
    not depend on the data: edges 0, 1, 2, 3, 4, 6, 8, 12, 16, 23, …, and `limit`. Not for empty
    arrays."""
    steps = 2.0 ** (np.arange(32 * _BINS_PER_DOUBLING) / _BINS_PER_DOUBLING)
    edges = np.union1d(np.ceil(steps).astype(np.int64), [0, limit])
    counts = np.histogram(values, edges + 1)[0]
    first, last = np.flatnonzero(counts)[[0, -1]]
    return Bars(section, edges[first : last + 2].tolist(), counts[first : last + 1].tolist())


def padded_tokens(counts: npt.NDArray[np.integer], batch_size: int) -> float:
    """Compute the tokens of an epoch whose random batches are padded to their longest sample: the
    mean over all orders of the samples, in closed form. `counts` (longest + 1,) are the samples of
    each length, at least one in all."""
    num_batches, rest = divmod(int(counts.sum()), batch_size)
    total = num_batches * batch_size * _mean_longest(counts, batch_size)
    return total + (rest * _mean_longest(counts, rest) if rest else 0.0)


def _mean_longest(counts: npt.NDArray[np.integer], drawn: int) -> float:
    """Average the longest of some samples drawn without replacement; 0 if there are fewer."""
    up_to = np.cumsum(counts, dtype=np.int64)
    none_longer = np.ones(len(counts))
    for i in range(drawn):  # all of the drawn samples are among those up to this length
        none_longer *= np.maximum(up_to - i, 0) / max(up_to[-1] - i, 1)
    return float(np.diff(none_longer, prepend=0.0) @ np.arange(len(counts)))
