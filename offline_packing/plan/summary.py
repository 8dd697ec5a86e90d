"""The figures of a plan as text that can be shared."""

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from offline_packing.config.packing import PackingConfig
from offline_packing.config.sections import ReportConfig
from offline_packing.index.info import IndexInfo
from offline_packing.index.pack_table import pack_table, split_of_packs
from offline_packing.index.rows import sums_by_source
from offline_packing.index.table import Index
from offline_packing.layouts.shards import samples_of_splits, splits_of_plan
from offline_packing.planner.context_parallel import idle_in_slots
from offline_packing.planner.cost import count_values, saving
from offline_packing.planner.pack_plan import PackPlan
from task_encoders.families import ModelOptions, model_cost

_BINS = 16
_BAR_WIDTH = 40


def render_summary(
    config: PackingConfig,
    info: IndexInfo,
    lengths: npt.NDArray[np.integer],
    packs: PackPlan,
    set_aside: Mapping[str, int],
    sources: Sequence[str] = (),
    content: Sequence[tuple[str, str]] = (),
    warnings: Sequence[str] = (),
) -> str:
    """The figures as text, one per line: of packed samples with these `lengths` (num_packed,), and
    those `set_aside` while measuring and planning, by reason. `sources`: the lines of their table;
    `content`: what else the samples hold, see `render_content`.
    """
    more = [
        *content,
        *_resizing(config.model),
        *(("warning", line) for line in warnings),
    ]
    num_samples = info.num_samples + info.num_set_aside
    text = render_figures(config.report, num_samples, lengths, packs, set_aside, more, sources)
    return f"{'task':<24}{config.task}\n{text}"


def _resizing(model: ModelOptions) -> list[tuple[str, str]]:
    """The resampling of images, where there is a choice, and that of the trainer's processor."""
    resize = getattr(model, "resize", None)
    theirs = "transformers 5 takes torch where torchvision is installed, and for videos always"
    shown = f"{model.family}, resize {resize}; {theirs} (lengths are the same)"
    return [("model", shown)] if resize else []


def render_figures(
    compared: ReportConfig,
    num_samples: int,
    lengths: npt.NDArray[np.integer],
    packs: PackPlan,
    set_aside: Mapping[str, int],
    more: Sequence[tuple[str, str]] = (),
    sources: Sequence[str] = (),
) -> str:
    """The figures that need no more than lengths (num_packed,), `more` of them, and the lines of
    the sources' table."""
    found = saving(lengths, packs, compared.padded_batch_size, compared.global_batch_size)
    figures = [
        ("samples", f"{num_samples:,}"),
        ("set aside", f"{sum(set_aside.values()):,}"),
        *((f"  {reason}", f"{count:,}") for reason, count in sorted(set_aside.items())),
        *_plan_figures(packs, found),
        *more,
    ]
    table = ["", *sources] if sources else []
    rows = [f"{name:<24}{value}" for name, value in figures]
    bars = _bars(lengths, packs.info.seq_length)
    return "\n".join([*rows, *table, "", "samples by tokens", *bars, ""])


def _plan_figures(packs: PackPlan, found: Mapping[str, int | float]) -> list[tuple[str, str]]:
    info, tokens, num_samples = packs.info, found["tokens"], len(packs.sample_ids)
    span = "in all epochs" if info.epochs else "per epoch"
    return [
        *([("epochs", _epochs(packs))] if info.epochs else []),
        ("packed samples", f"{num_samples:,}"),
        ("tokens", f"{tokens:,} (mean {tokens / num_samples:,.1f} per sample)"),
        ("packs", f"{packs.num_packs:,} of {info.seq_length:,} tokens, strategy {info.strategy}"),
        *_slot_figures(packs),
        ("lower bound", f"{info.lower_bound:,} (gap {packs.gap:.3%})"),
        ("fill", f"{tokens / packs.room:.2%}"),
        ("packing factor", f"{packs.packing_factor:.2f} samples per pack"),
        (
            "padding",
            "{padding_before:.1%} -> {padding_after:.1%} of tokens in a batch (before: "
            "{padded_batch_size} samples padded to the longest)".format_map(found),
        ),
        (
            "iterations",
            "{iterations_before:,} -> {iterations_after:,} {span} at global batch size "
            "{global_batch_size:,} (global batch size {equal_batch_size:,} keeps the samples per "
            "step)".format_map({**found, "span": span}),
        ),
    ]


def _epochs(packs: PackPlan) -> str:
    again = f"{packs.pairs_again():.2%} of the pairs of samples in a pack meet again in the next"
    return f"{len(packs.info.epochs)}, all counted below; {again}"


def _slot_figures(packs: PackPlan) -> list[tuple[str, str]]:
    """Slots, and packs by the ranks that they go over; [] where all packs are alike."""
    ranks = packs.info.context_parallel
    if ranks is None:
        return []
    sizes, counts = np.unique(np.asarray(packs.cp_sizes), return_counts=True)
    over = ", ".join(f"{n:,} over {size}" for size, n in zip(sizes, counts.tolist(), strict=True))
    slots = len(packs.slot_offsets) - 1
    room = f"{ranks.ranks} ranks x {ranks.tokens_per_rank:,} tokens"
    return [("slots", f"{slots:,} of {room}"), ("packs over ranks", over)]


def render_idle(config: PackingConfig, samples: Index, packs: PackPlan) -> list[tuple[str, str]]:
    """'idle in slots': the share of time that ranks wait for others, by operations."""
    ranks = packs.info.context_parallel
    if ranks is None or packs.cp_sizes is None:
        return []
    table = pack_table(samples, packs, model_cost(config.model))
    idle = idle_in_slots(table.cost, packs.cp_sizes, ranks.ranks)
    return [("idle in slots", f"{idle:.2%}, by operations; communication is not counted")]


def render_split(config: PackingConfig, samples: Index, packs: PackPlan) -> list[tuple[str, str]]:
    """Padding for `pack.context_parallel.size`, and what a split of pictures by number makes of the
    packs."""
    pack, found = config.pack, split_of_packs(samples, packs, model_cost(config.model))
    if found is None:
        return []
    texts = [f"{found.idle:.2%} if ranks of a pack take equally many pictures each"]
    if found.num_unequal:
        texts.append(f"in {found.num_unequal:,} packs one is larger than an even share")
    return [
        ("ranks of a pack", f"{pack.cp_size}, samples padded to multiples of {pack.padding}"),
        ("idle of the tower", "; ".join(texts)),
    ]


def render_content(samples: Index, packs: PackPlan) -> list[tuple[str, str]]:
    """Tokens with loss; '200 images, 3 videos in 150 of 1,000 packed samples; 64 patches each'."""
    loss, tokens, patches = (
        samples.array(name)[packs.sample_ids].sum(dtype=np.int64)
        for name in ("num_loss_tokens", "num_tokens", "num_vision_patches")
    )
    images, videos = (
        samples.array(f"num_{kind}")[packs.sample_ids] for kind in ("images", "videos")
    )
    count = (images + videos).sum(dtype=np.int64)
    media = (
        f"{images.sum(dtype=np.int64):,} images, {videos.sum(dtype=np.int64):,} videos in "
        f"{np.count_nonzero(images + videos):,} of {len(images):,} packed samples; "
        f"{patches / max(count, 1):,.0f} patches each"
    )
    share = loss / max(tokens, 1)
    return [("tokens with loss", f"{loss:,} ({share:.1%})"), ("images and videos", media)]


def render_splits(config: PackingConfig, packs: PackPlan) -> list[tuple[str, str]]:
    """'train 950 samples (95.0%) in 80 packs; val 50 samples (5.0%) in 5 packs'; [] if there is one
    split."""
    shares = config.output.split
    if len(shares) == 1:
        return []
    counts = [(name, n, len(own)) for name, own, n in samples_of_splits(packs, shares)]
    total = max(sum(n for _, n, _ in counts), 1)
    parts = [f"{name} {n:,} samples ({n / total:.1%}) in {own:,} packs" for name, n, own in counts]
    return [("splits", "; ".join(parts))]


def render_ranks(config: PackingConfig, samples: Index, packs: PackPlan) -> list[tuple[str, str]]:
    """Shares of time that the ranks of `pack.order` wait in the first epoch of the first split, and
    what steps of one kind took. Without `pack.order` nothing."""
    from offline_packing.planner.order import RankLayout, idle_of_order, mixed_steps  # compiled

    if config.pack.order is None:
        return []
    layout = RankLayout(**config.pack.order.model_dump())
    first = next(filter(len, splits_of_plan(packs, config.output.split).values()))
    size = packs.info.epochs[0] if packs.info.epochs else len(first)
    media, tower, language = pack_table(samples, packs, model_cost(config.model))
    if size < layout.num_ranks:
        return [("order", f"{size:,} packs are not one for each of {layout.num_ranks:,} ranks")]
    one, two = idle_of_order((tower + language)[:size], tower[:size], layout)
    mixed = mixed_steps(media[:size], layout)
    done = packs.info.settings.get("uniform")
    changed = "; {halved:,} packs halved, {repeated:,} repeated".format_map(done) if done else ""
    return [
        (f"idle of {layout.num_ranks} ranks", f"{one:.2%}, waiting after the tower too {two:.2%}"),
        ("mixed steps", f"{mixed:,} of {-(-size // layout.num_ranks):,}{changed}"),
    ]


def _bars(lengths: npt.NDArray[np.integer], seq_length: int) -> list[str]:
    """Samples per bin of equal width from 1 to seq_length."""
    edges = np.linspace(0, seq_length, min(_BINS, seq_length) + 1)
    of_length = count_values(lengths, seq_length)
    counts = (
        np.histogram(np.arange(seq_length + 1), edges, weights=of_length)[0].astype(int).tolist()
    )
    return [
        f"{math.floor(low) + 1:>9,} – {math.floor(high):<9,}"
        f"{'█' * math.ceil(_BAR_WIDTH * count / max(counts)):<{_BAR_WIDTH}} {count:,}"
        for (low, high), count in zip(itertools.pairwise(edges.tolist()), counts, strict=True)
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
