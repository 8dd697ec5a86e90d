"""Figures of samples and their plan, computed once: `plan` prints them as text, `report` as a page.

They are plain values, as in report.json.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from offline_packing.config.packing import PackingConfig
from offline_packing.config.sections import ReportConfig, SharePrefixesConfig
from offline_packing.index.records import places_of_equal, record_numbers
from offline_packing.index.rows import (
    Prefixes,
    media_of_samples,
    of_uses,
    pack_table,
    sums_by_source,
)
from offline_packing.index.table import Index
from offline_packing.layouts.shards import samples_of_splits, splits_of_plan
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.planner.ranks.layout import RankLayout
from task_encoders.families import ModelOptions, model_cost
from task_encoders.families.base.cost import most_positions
from task_encoders.packs.manifest import PackColumns

#: The ranks whose waiting is computed if pack.order names none.
_NUM_RANKS: Final = 8
#: Columns summed up per source: columns num_NAME of the index.
_SUMS: Final = ("tokens", "loss_tokens", "images", "videos", "vision_patches", "turns")
_BINS: Final = 16
#: Stretches of a plan whose shares are shown, where these change.
_STRETCHES: Final = 20
_VALUES_AT_ONCE: Final = 1 << 20
#: Packs that shared prefixes must leave, at most, to be recommended.
_WORTH_SHARING: Final = 0.8

Figures = dict[str, Any]


def run_figures(
    config: PackingConfig,
    samples: Index,
    plan: PackPlan | None,
    set_aside: Mapping[str, int],
    table: PackColumns | None = None,
) -> Figures:
    """Figures of an index and, if there is one, its plan. `set_aside`: samples set aside while
    planning, by reason. With `table`, the plan's, they say how long ranks wait even without
    pack.order."""
    info, uses = samples.info, count_uses(samples, plan)
    reasons = Counter(info.set_aside) + Counter(set_aside)
    sources = _source_figures(config, samples, plan, uses)
    total = {name: sum(source[name] for source in sources) for name in _SUMS}
    found = {
        "task": config.task,
        "pad_multiple": config.pack.padding,
        "resize": _resizing(config.model),
        "split_turns": info.splitting,
        "warnings": run_warnings(config, samples, plan),
        **sample_figures(info.num_samples + info.num_set_aside, reasons),
        "sources": sources,
        "loss": {
            "tokens": total["tokens"],
            "loss_tokens": total["loss_tokens"],
            "share": total["loss_tokens"] / (total["tokens"] or 1),
        },
        "media": {
            **{name: total[name] for name in ("images", "videos", "vision_patches")},
            "samples": int(uses[media_of_samples(samples.array) > 0].sum()),
        },
    }
    if plan is None:
        return {**found, "seq_length": config.pack.seq_length, "plan": None, "saving": None}
    lengths = np.repeat(samples.array("num_tokens"), uses)
    if table is None and plan.order is not None:
        table = pack_table(samples, plan, model_cost(config.model))
    sharing = None
    if plan.branches is not None:
        sharing = _sharing(config, samples, plan, total, lengths)
    shared = sharing["tokens"][0] - sharing["tokens"][1] if sharing else 0
    found |= plan_figures(config.report, lengths, plan, shared)
    found["plan"] |= {
        "splits": _split_figures(config, plan),
        "sharing": sharing,
        "repeated": _repeated_media(config, samples, plan, uses) if len(lengths) else None,
        "mixture": _mixture_figures(config, samples, plan),
        "ranks_of_a_pack": config.pack.context_parallel,
        "waiting": None if table is None else _waiting(config, plan, table),
    }
    return found


def sample_figures(num_samples: int, set_aside: Mapping[str, int]) -> Figures:
    """Samples that were found, and set aside, the most frequent reason first."""
    aside = sorted(set_aside.items(), key=lambda item: (-item[1], item))
    total = sum(set_aside.values())
    return {
        "samples": {"found": num_samples, "set_aside": total},
        "set_aside": [{"reason": reason, "samples": count} for reason, count in aside],
    }


def plan_figures(
    compared: ReportConfig,
    lengths: npt.NDArray[np.integer],
    plan: PackPlan,
    shared: int = 0,
) -> Figures:
    """Figures of a plan that need only the tokens (num_packed,) of each use of a sample, at least
    one, and how many of the tokens packs do not hold because an earlier sample has them (`shared`).
    `saving` is that of packing, against batches of samples padded to their longest: tokens, shares
    of padding, and steps of an epoch."""
    info, seq_length, num_samples = plan.info, plan.info.seq_length, len(lengths)
    edges = np.linspace(0, seq_length, min(_BINS, seq_length) + 1)
    of_length = np.zeros(int(lengths.max()) + 1, np.int64)
    for start in range(0, num_samples, _VALUES_AT_ONCE):  # all at once would be copied to int64
        some = lengths[start : start + _VALUES_AT_ONCE]
        of_length += np.bincount(some, minlength=len(of_length))
    every = np.arange(len(of_length))
    tokens, batch = int(lengths.sum(dtype=np.int64)), compared.global_batch_size
    in_batches = padded_tokens(of_length, compared.padded_batch_size)
    return {
        "seq_length": seq_length,
        "plan": {
            "strategy": info.strategy,
            "packs": plan.num_packs,
            "samples": len(plan.sample_ids),
            "lower_bound": info.lower_bound,
            "gap": plan.gap,
            "fill": (tokens - shared) / plan.room,
            "packing_factor": plan.packing_factor,
        },
        "saving": {
            "tokens": tokens,
            "shared_tokens": shared,
            "tokens_in_packs": info.num_tokens,
            "padded_batch_size": compared.padded_batch_size,
            "tokens_in_padded_batches": in_batches,
            "tokens_padded_to_seq_length": num_samples * seq_length,
            "padding_before": 1 - tokens / in_batches,
            "padding_after": 1 - (tokens - shared) / info.num_tokens,
            "speedup": in_batches / info.num_tokens,
            "global_batch_size": batch,
            "iterations_before": math.ceil(num_samples / batch),
            "iterations_after": math.ceil(plan.num_packs / batch),
            # keeps the samples of a step
            "equal_batch_size": max(1, round(batch * plan.num_packs / num_samples)),
        },
        "packed_lengths": {
            "edges": edges.tolist(),
            "counts": np.histogram(every, edges, weights=of_length)[0].astype(int).tolist(),
        },
    }


def count_uses(samples: Index, plan: PackPlan | None) -> npt.NDArray[np.int32]:
    """(num_samples,) the number of packs that hold a sample; without a plan, 1 each."""
    if plan is None:
        return np.ones(samples.info.num_samples, np.int32)
    uses = np.zeros(samples.info.num_samples, np.int32)
    np.add.at(uses, plan.sample_ids, 1)
    return uses


def _resizing(model: ModelOptions) -> str | None:
    """The resampling of images, where there is a choice."""
    resize = getattr(model, "resize", None)
    return f"{model.family}, resize {resize}" if resize else None


def _source_figures(
    config: PackingConfig, samples: Index, plan: PackPlan | None, uses: npt.NDArray[np.integer]
) -> list[Figures]:
    """One entry per source: different samples `used`, and sums over all their uses. Shares are of
    the tokens that rows hold."""
    columns = [f"num_{name}" for name in _SUMS]
    sums = sums_by_source(samples, uses, len(config.source), columns)
    held: Sequence[float] = sums["num_tokens"]
    if plan is not None and plan.branches is not None:
        (held,) = _held_tokens(samples, plan, plan.pack_offsets[[0, -1]], len(config.source))
    total = sum(held) or 1
    weights: Sequence[float | None] = config.weights or [None] * len(config.source)
    lines = []
    for i, (source, name) in enumerate(zip(config.source, config.source_names(), strict=True)):
        own = {name: values[i] for name, values in sums.items()}
        lines.append(
            {
                "name": name,
                "path": source.path,
                "format": source.format,
                "repeat": source.repeat,
                "weight": weights[i],
                "used": own["used"],
                "packed": own["uses"],
                "times_used": own["uses"] / (own["used"] or 1),
                "bytes": own["bytes"],
                **{name: own[f"num_{name}"] for name in _SUMS},
                "share_of_tokens": held[i] / total,
            }
        )
    return lines


def _mixture_figures(config: PackingConfig, samples: Index, plan: PackPlan) -> list[list[Figures]]:
    """Return the share of the tokens that each source has, and was to have, in stretches of the
    packs of the first split; [] without pack.mixture."""
    mixture, names = config.pack.mixture, config.source_names()
    if mixture is None:
        return []
    num_packs = len(next(iter(splits_of_plan(plan, config.output.split).values())))
    count = min(_STRETCHES, num_packs)
    ends = plan.pack_offsets[np.arange(count + 1) * num_packs // max(count, 1)]
    return [
        [
            {"source": n, "share": own / sum(held), "asked": mixture.share(n, (i + 0.5) / count)}
            for n, own in zip(names, held, strict=True)
        ]
        for i, held in enumerate(_held_tokens(samples, plan, ends, len(names)))
    ]


def _held_tokens(
    samples: Index, plan: PackPlan, ends: npt.NDArray[np.integer], num_sources: int
) -> list[list[float]]:
    """Return the tokens of each source that rows hold, between each two `ends` among the uses."""
    sources = samples.array("source_id")[plan.sample_ids]
    tokens = of_uses(samples, plan, lambda index: index.array("num_tokens"))
    return [
        np.bincount(sources[start:end], tokens[start:end], num_sources).tolist()
        for start, end in itertools.pairwise(ends)
    ]


def _split_figures(config: PackingConfig, plan: PackPlan) -> list[Figures]:
    """Packs and different samples of each split; [] where there is one."""
    shares = config.output.split
    if len(shares) == 1:
        return []
    found = list(samples_of_splits(plan, shares))
    total = sum(samples for _, _, samples in found) or 1
    return [
        {
            "split": name,
            "asked": shares[name],
            "share": samples / total,
            "samples": samples,
            "packs": len(own),
        }
        for name, own, samples in found
    ]


def _sharing(
    config: PackingConfig,
    samples: Index,
    plan: PackPlan,
    whole: Mapping[str, int],
    lengths: npt.NDArray[np.integer],
) -> Figures:
    """Return figures with and without shared prefixes, [each sample whole, as planned]; packs of
    whole samples are counted by a lower bound. `whole` are sums over all uses of samples by the
    names of _SUMS, and `lengths` (num_packed,) the tokens of each."""
    from offline_packing.planner.strategies.budgets import size_lower_bound  # compiled

    assert plan.branches is not None
    is_branch, batch = plan.branches.astype(bool), config.report.global_batch_size
    in_trees = is_branch | np.append(is_branch[1:], False)
    names = ("tokens", "images", "videos", "vision_patches")
    prefixes = Prefixes(samples).table(*(f"num_{name}" for name in names))
    shared = plan.sample_ids[is_branch]
    held = {
        name: whole[name] - int(prefixes[f"num_{name}"].to_numpy()[shared].sum(dtype=np.int64))
        for name in names
    }
    padded = -(-lengths // config.pack.padding) * config.pack.padding
    sums, limits = {**whole, "samples": len(lengths)}, plan.info.settings["budgets"].items()
    bounds = [-(-sums[name] // limit) for name, limit in limits]
    least = max([*bounds, size_lower_bound(padded, plan.info.seq_length)])
    packs = (least, plan.num_packs)
    return {
        "trees": int(np.count_nonzero(in_trees & ~is_branch)),
        "samples": int(np.count_nonzero(in_trees)),
        "tokens": [whole["tokens"], held["tokens"]],
        "media": [one["images"] + one["videos"] for one in (whole, held)],
        "vision_patches": [whole["vision_patches"], held["vision_patches"]],
        "samples_per_pack": [len(lengths) / count for count in packs],
        "iterations": [math.ceil(count / batch) for count in packs],
    }


def _repeated_media(
    config: PackingConfig, samples: Index, plan: PackPlan, uses: npt.NDArray[np.integer]
) -> str | None:
    """Say how many packs pack.share_prefixes would need, by tokens; None: hardly fewer, or it would
    be refused. Prefixes of one hash count as equal, and only a record's first part as sharing."""
    if not config.may_share_prefixes:
        return None
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
        return None
    media = "pictures and videos" if videos[some].any() else "pictures"
    return (
        f"{len(first):,} distinct {media} in {len(some):,} samples; pack.share_prefixes would need "
        f"about {packs:,} packs"
    )


def _waiting(config: PackingConfig, plan: PackPlan, table: PackColumns) -> Figures:
    """Shares of time that data-parallel ranks wait for the slowest, in the order written, in
    the first split that has packs; and where they wait after the vision tower as well. `shares` are
    None where there are fewer packs than ranks. What steps of one kind took is in `uniform`."""
    layout = plan.order or RankLayout(_NUM_RANKS)
    first = next(filter(len, splits_of_plan(plan, config.output.split).values()))
    own, size = slice(first.start, first.stop), len(first)
    enough = size >= layout.num_ranks
    shares = layout.idle_shares(table.cost[own], table.tower[own]) if enough else (None, None)
    return {
        "num_ranks": layout.num_ranks,
        "num_workers": layout.num_workers,
        "ordered": plan.order is not None,
        "packs": size,
        "share": shares[0],
        "two_phase_share": shares[1],
        "steps": -(-size // layout.num_ranks),
        "mixed_steps": layout.mixed_steps(table.media[own]),
        "uniform": plan.info.settings.get("uniform"),
    }


def padded_tokens(counts: npt.NDArray[np.integer], batch_size: int) -> float:
    """Tokens of an epoch whose random batches are padded to the longest of their samples: the mean
    over all orders of the samples, in closed form. `counts` (longest + 1,) are the samples of each
    length, at least one in all."""
    num_batches, rest = divmod(int(counts.sum()), batch_size)
    total = num_batches * batch_size * _mean_longest(counts, batch_size)
    return total + (rest * _mean_longest(counts, rest) if rest else 0.0)


def _mean_longest(counts: npt.NDArray[np.integer], drawn: int) -> float:
    """Mean of the longest of some samples drawn without replacement; 0 where there are fewer."""
    up_to = np.cumsum(counts, dtype=np.int64)
    none_longer = np.ones(len(counts))
    for i in range(drawn):  # all of the drawn samples are among those up to this length
        none_longer *= np.maximum(up_to - i, 0) / max(up_to[-1] - i, 1)
    return float(np.diff(none_longer, prepend=0.0) @ np.arange(len(counts)))


Hashes = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]


def run_warnings(config: PackingConfig, samples: Index, packs: PackPlan | None) -> list[str]:
    """Return warnings, a line each: on the samples and their sources, and with a plan on media that
    stand in several splits. Reads the index part by part."""
    lines, total = samples.info.warnings, samples.info.num_samples
    several = 0
    if config.task == "vqa":
        several = int(np.count_nonzero(samples.array("num_turns") > 1))
    if several:
        lines.append(
            f"{several:,} of {total:,} samples have several turns under task vqa, which is meant "
            "for one question; bmr is for conversations"
        )
    lines.extend(_source_warnings(config.source_names(), samples))
    lines.extend(_position_warnings(config, samples))
    if config.pack.share_prefixes is not None:
        lines.extend(_prefix_warnings(samples))
    lines.extend(_split_warnings(config.output.split))
    splits = splits_of_plan(packs, config.output.split) if packs is not None else {}
    for name in [name for name, own in splits.items() if not own]:
        lines.append(
            f"split {name} is empty: no sample, with all that it leads to by images and videos or "
            f"its group, drew its share of {config.output.split[name]:.1%}; set another "
            "output.split_seed, a larger share in output.split, or source.fields.group, which "
            "counts instead of images and videos"
        )
    if packs is not None and len(splits) > 1 and config.names_groups:
        first, *others = splits
        in_first = _packed(packs, splits[first], total)
        for name in others:
            own = _packed(packs, splits[name], total)
            shared = [
                count_shared(*(hashes_of(samples, column, chosen) for chosen in (own, in_first)))
                for column in ("media_hash", "sample_hash")
            ]
            if any(count for count, _ in shared):
                media, same = (f"{count:,} of {whole:,}" for count, whole in shared)
                lines.append(
                    f"split {name}: {media} images and videos and {same} samples stand in split "
                    f"{first}, too; without source.fields.group they are on one side"
                )
    return lines


def _source_warnings(names: Sequence[str], samples: Index) -> Iterator[str]:
    """Warn of sources that hold samples of an earlier one: copies are trained on twice."""
    if len(names) == 1:
        return
    hashes, owners = samples.array("sample_hash"), samples.array("source_id")
    order = np.argsort(hashes, kind="stable")
    is_first = np.diff(hashes[order], prepend=~hashes[order[:1]]) != 0
    first_of = order[np.maximum.accumulate(np.where(is_first, np.arange(len(order)), 0))]
    pairs = np.stack([owners[first_of], owners[order]])
    different, counts = np.unique(pairs[:, pairs[0] != pairs[1]], axis=1, return_counts=True)
    for (one, other), count in zip(different.T.tolist(), counts.tolist(), strict=True):
        yield (
            f"source {names[other]}: {count:,} of {np.count_nonzero(owners == other):,} samples "
            f"stand in source {names[one]}, too"
        )


def _position_warnings(config: PackingConfig, samples: Index) -> Iterator[str]:
    """Warn of packs longer than the checkpoint's positions, which restart with each sample."""
    limit, seq_length = most_positions(config.model.processor), config.pack.seq_length
    if limit is not None and seq_length > limit:
        longer = np.count_nonzero(samples.array("num_tokens") > limit)
        yield (
            f"pack.seq_length {seq_length:,} > max_position_embeddings {limit:,} of "
            f"{config.model.processor}; {longer:,} of {samples.info.num_samples:,} samples are "
            "longer than that (positions restart with each sample)"
        )


def _prefix_warnings(samples: Index) -> Iterator[str]:
    """Warn of samples that show the media of others, but share no prefix with any."""
    columns = samples.table("prefix_media", "prefix_hash")
    media, hashes = (column.to_numpy() for column in columns.columns)
    is_alone = np.zeros(len(media), bool)
    is_alone[places_of_equal(media)] = True
    is_alone[places_of_equal(hashes)] = False
    if count := int(np.count_nonzero(is_alone & (media != 0))):
        yield (
            f"{count:,} of {len(media):,} samples show images or videos of other samples, but "
            "share no prefix, as text of their own stands before these; put images and videos at "
            "the beginning of the first prompt, below one system message for all"
        )


def _split_warnings(split: Mapping[str, float]) -> Iterator[str]:
    """Warn of shares that are probably a mistake: training reads train."""
    name, share = max(split.items(), key=lambda item: item[1])
    train = split.get("train", 0)
    if not train:
        yield (
            f"output.split has no train ({', '.join(split)}); training reads train: name one of "
            "them so, unless the output is for validation alone"
        )
    elif share > train:
        yield (
            f"output.split gives {name} {share:.1%} of the samples and train {train:.1%}; training "
            "reads train"
        )


def _packed(packs: PackPlan, own: range, num_samples: int) -> Flags:
    """(num_samples,) the samples of the index in some packs."""
    flags = np.zeros(num_samples, bool)
    start, stop = packs.pack_offsets[own.start], packs.pack_offsets[own.stop]
    flags[packs.sample_ids[start:stop]] = True
    return flags


def count_shared(own: Iterable[Hashes], others: Iterable[Hashes]) -> tuple[int, int]:
    """Return how many of some different hashes others have, too, and their number. Both come in
    parts; only `own` are held."""
    held = np.unique(np.concatenate([np.empty(0, np.uint64), *own]))
    found = np.zeros(len(held), bool)
    for part in others:
        found |= np.isin(held, part)
    return int(np.count_nonzero(found)), len(held)


def hashes_of(samples: Index, column: str, chosen: Flags) -> Iterator[Hashes]:
    """A column of hashes of some samples, or of their media, part by part."""
    first = 0
    for part in samples.parts(column):
        own = part[column].filter(pa.array(chosen[first : first + len(part)]))
        first += len(part)
        yield (pc.list_flatten(own) if column == "media_hash" else own).to_numpy()
