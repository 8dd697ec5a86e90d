"""Samples to pack, their uses and splits, and the plan made of them."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from offline_packing.config.packing import PackingConfig
from offline_packing.config.sections import PackConfig
from offline_packing.errors import StageError
from offline_packing.index.records import find_duplicates, record_numbers
from offline_packing.index.rows import (
    SampleIds,
    media_of_samples,
    name_samples,
    sample_flops,
    units_of_samples,
)
from offline_packing.index.set_aside import AsideSamples, group_set_aside
from offline_packing.index.table import Index
from offline_packing.layouts import LAYOUTS
from offline_packing.layouts.base import Admission
from offline_packing.plan.uses import Uses, choose_uses
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.planner.passes import PlanOptions
from offline_packing.runs.run import Run, listed
from offline_packing.runs.set_aside import aside_while_measuring, explain
from task_encoders.families import model_cost

#: Sources whose shares of the tokens optimizer steps are to have alike.
_MOST_SOURCES: Final = 8


@dataclass(frozen=True)
class Planned:
    """A plan over the ids of the index, and what it leaves out."""

    packs: PackPlan
    set_aside: AsideSamples


def make_plan(run: Run, samples: Index) -> Planned:
    """Plan without writing. Raises StageError where there is nothing to pack, an over-long sample
    under on_overlong: error, or an option that the strategy does not have."""
    admission = LAYOUTS[run.config.output.layout].admit(samples)
    num_tokens = samples.array("num_tokens")
    if np.any(admission.added_tokens):
        num_tokens = num_tokens + admission.added_tokens
    aside = _find_set_aside(run, samples, admission)
    kept: SampleIds = np.arange(
        len(num_tokens), dtype=np.int32 if len(num_tokens) < 2**31 else np.int64
    )
    if len(aside.ids):
        kept = np.delete(kept, aside.ids)
    uses = choose_uses(run.config, samples, kept)
    packs = _pack_uses(run, samples, num_tokens, uses)
    left_out = _left_out(run, packs, num_tokens[packs.set_aside_ids])
    planned = Planned(packs, AsideSamples.merge([aside, uses.not_drawn, left_out]))
    _check_planned(run, samples, planned)
    return planned


def _pack_uses(
    run: Run, samples: Index, num_tokens: npt.NDArray[np.integer], uses: Uses
) -> PackPlan:
    """The plan of all uses, split after split, over the ids of the index."""
    pack = run.config.pack
    plans: dict[str, list[PackPlan]] = {}
    apart = _kept_apart(samples, uses)
    try:
        for name, ids in uses.ids.items():
            copy_of = None if apart is None else apart[ids]
            is_all = not uses.repeated and len(ids) == len(num_tokens)  # each once, in order
            lengths = num_tokens if is_all else num_tokens[ids]
            arguments = plan_arguments(run.config, samples, ids)
            for plan in plan_epochs(
                1 if plans else pack.epochs, lengths, copy_of=copy_of, **arguments
            ):
                plans.setdefault(name, []).append(plan if is_all else plan.of(ids))
    except (TypeError, ValueError) as error:  # TypeError: an option that the strategy lacks
        raise StageError(f"plan: {' '.join(str(error).split())}") from error
    if pack.epochs == 1 and len(plans) == 1 and not uses.repeated:
        return next(iter(plans.values()))[0]
    return join_plans(plans)


def plan_epochs(
    epochs: int, num_tokens: npt.NDArray[np.integer], **arguments: Any
) -> list[PackPlan]:
    """A plan for each epoch, all samples in each: several are mixed at random, with a seed each."""
    # Its compiled parts take time to import.
    from offline_packing.planner.plan_packs import plan_packs

    seed = arguments.pop("seed")
    return [
        plan_packs(num_tokens, seed=seed + epoch, mixed=epochs > 1, **arguments)
        for epoch in range(epochs)
    ]


def _kept_apart(samples: Index, uses: Uses) -> SampleIds | None:
    """(num_samples,) samples with one number share no pack: copies, and parts of a conversation.
    None: any may."""
    if not samples.info.split and not uses.repeated:
        return None
    return record_numbers(samples)


def join_plans(planned: Mapping[str, Sequence[PackPlan]]) -> PackPlan:
    """The plans of all splits and epochs, one after the other. Samples that none of them packs are
    set aside, once each."""
    from offline_packing.planner.strategies.strategy import Packs, join_packs

    plans = [plan for own in planned.values() for plan in own]
    sizes = {name: [plan.num_packs for plan in own] for name, own in planned.items()}
    first = next(iter(sizes.values()))
    packs = join_packs([Packs(plan.sample_ids, plan.pack_offsets) for plan in plans])
    info = replace(
        plans[0].info,
        num_tokens=sum(plan.info.num_tokens for plan in plans),
        lower_bound=sum(plan.info.lower_bound for plan in plans),
        splits={name: sum(own) for name, own in sizes.items()} if len(sizes) > 1 else {},
        epochs=first if len(first) > 1 else [],
    )
    cp_sizes = None
    if plans[0].cp_sizes is not None:
        cp_sizes = np.concatenate([np.asarray(plan.cp_sizes) for plan in plans])
    ids = np.concatenate([plan.set_aside_ids for plan in plans])
    aside, firsts = np.unique(ids, return_index=True)
    is_packed = np.zeros(max(some.max(initial=-1) for some in (ids, packs.sample_ids)) + 1, bool)
    is_packed[packs.sample_ids] = True
    lost = ~is_packed[aside]
    reasons = np.concatenate([plan.set_aside_reasons for plan in plans])[firsts[lost]]
    settings = dict(info.settings)
    if "uniform" in settings:  # what was done, in all of them
        done = [plan.info.settings["uniform"] for plan in plans]
        settings["uniform"] = {name: sum(one[name] for one in done) for name in done[0]}
    info = replace(info, num_copies=len(packs.sample_ids) - int(is_packed.sum()), settings=settings)
    return PackPlan(*packs, aside[lost], reasons, info, cp_sizes)


def _find_set_aside(run: Run, samples: Index, admission: Admission) -> AsideSamples:
    """Samples that are not planned."""
    layout = run.config.output.layout
    why = "an earlier sample has this key"
    found = [(find_duplicates(samples), "duplicate_key", why)]
    for what, ids in admission.unfit:
        found.append((ids, "not_in_layout", f"layout {layout} holds no {what}"))
    return AsideSamples.merge([AsideSamples.of(ids, *reason) for ids, *reason in found])


def _left_out(run: Run, packs: PackPlan, num_tokens: npt.NDArray[np.integer]) -> AsideSamples:
    """Samples that the planner left out; `num_tokens` are those of `packs.set_aside_ids`."""
    kinds = packs.set_aside_reasons.astype(np.int64) << 32 | num_tokens
    different, codes = np.unique(kinds, return_inverse=True)
    texts = tuple(
        set_aside_reason(packs.info.reason_names[kind >> 32], kind & 0xFFFFFFFF, run.config.pack)
        for kind in different.tolist()
    )
    return AsideSamples(packs.set_aside_ids.astype(np.int64), codes.astype(np.int32), texts)


def _check_planned(run: Run, samples: Index, planned: Planned) -> None:
    overlong = planned.set_aside.first("overlong")
    if overlong is not None and run.config.pack.on_overlong == "error":
        sample_id, detail = overlong
        key = name_samples(samples, np.array([sample_id]))["key"][0].as_py()
        raise StageError(
            f"sample {key!r} has {detail} ({planned.set_aside.reasons['overlong']:,} such samples);"
            " set pack.on_overlong: set_aside, or a longer pack.seq_length"
        )
    if planned.packs.num_packs == 0:
        reasons = Counter(samples.info.set_aside) + planned.set_aside.reasons
        groups = group_set_aside(
            aside_while_measuring(run.workspace, samples.info),
            planned.set_aside.tables(samples, [one.path for one in run.config.source]),
        )
        example = max(groups, key=lambda group: group.count, default=None)
        if samples.info.num_skipped and not reasons:
            raise StageError(
                f"nothing to pack in {run.workspace.root}: no sample is new, source.skip holds "
                f"all {samples.info.num_skipped:,}"
            )
        remarks = [] if example is None else [explain(run.config, example)]
        if not samples.info.num_samples:
            remarks.append("check source.path and source.task")
        raise StageError(
            f"nothing to pack in {run.workspace.root}; set aside: {listed(reasons.items())}; "
            + "; ".join(remarks)
        )


def plan_arguments(config: PackingConfig, samples: Index, kept: SampleIds) -> dict[str, Any]:
    """Keyword arguments of `plan_packs` beside lengths. `kept` (num_kept,) are the
    samples that are planned, one that is used twice appears twice; the arrays are theirs."""

    def column(name: str) -> npt.NDArray[Any]:
        return samples.array(name)[kept]

    arguments = pack_arguments(config.pack, column, kept)
    arguments["window_packs"] = config.output.packs_per_shard
    if LAYOUTS[config.output.layout].ONE_MEDIUM and not config.pack.homogeneous:
        groups = _media_groups(column("num_images"), column("num_videos"))
        if groups is not None:
            arguments |= {"homogeneous": True, "groups": groups}
    if config.pack.cp_size > 1:
        arguments |= {
            "picture_ranks": config.pack.cp_size,
            "units": units_of_samples(samples)[kept],
            "tower_cost": sample_flops(samples, model_cost(config.model)).tower[kept],
        }
    if config.pack.order is not None or config.pack.slots is not None:
        flops = sample_flops(samples, model_cost(config.model))
        arguments["cost"] = flops.total[kept]
        if config.pack.order is not None:
            arguments |= {"tower_cost": flops.tower[kept], "features": _features(column)}
    return arguments


def pack_arguments(
    pack: PackConfig,
    column: Callable[[str], npt.NDArray[Any]],
    source_order: npt.NDArray[np.integer],
) -> dict[str, Any]:
    """Arguments of `plan_packs` from a `pack` section and columns of the samples."""
    arguments = {name: getattr(pack, name) for name in PlanOptions.model_fields}
    arguments["pad_multiple"] = pack.padding
    arguments["budgets"] = {
        name: (column(f"num_{name}"), limit) for name, limit in pack.budgets.items()
    }
    # Assignment of samples, and order of packs:
    if pack.homogeneous:
        with_media = column("num_images") + column("num_videos") > 0
        arguments |= {"homogeneous": True, "groups": with_media.astype(np.int32)}
    if pack.has_locality:
        arguments["source_order"] = source_order
    if "balance" in pack.assignment:
        arguments["balance_by"] = column("num_vision_patches")
    if pack.layout is not None and pack.layout.uniform:
        arguments["media"] = media_of_samples(column)
    arguments |= {"order": pack.layout, "context_parallel": pack.slots}
    return arguments


def _features(column: Callable[[str], npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
    """Tokens with loss, and those of each source but the last: what optimizer steps are to have
    nearly the same of."""
    tokens, sources = column("num_tokens"), column("source_id")
    count = min(int(sources.max(initial=0)), _MOST_SOURCES)
    own = [np.where(sources == one, tokens, 0) for one in range(count)]
    return [column("num_loss_tokens"), *own]


def _media_groups(
    num_images: npt.NDArray[np.integer], num_videos: npt.NDArray[np.integer]
) -> npt.NDArray[np.int32] | None:
    """Samples that may share a pack of one type of media have one number; None: all may."""
    groups = (num_images + num_videos > 0).astype(np.int32) + (num_videos > 0)
    return groups if len(np.unique(groups)) > 1 else None


def set_aside_reason(name: str, num_tokens: int, pack: PackConfig) -> tuple[str, str]:
    """Reason and detail in the set-aside table of a sample of `num_tokens` tokens that the planner
    left out; `name` is the planner's own name of the reason."""
    if name.startswith("over_budget:"):
        budget = name.partition(":")[2]
        return "over_budget", f"it alone exceeds the limit of {budget} {pack.budgets[budget]}"  # type: ignore[index]
    limit = f"seq_length {pack.seq_length}"
    if pack.padding > 1:
        limit += f" (in multiples of {pack.padding})"
    return "overlong", f"{num_tokens} tokens > {limit}"
