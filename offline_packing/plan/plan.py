"""plan: index -> plan. Duplicate keys and over-long samples are set aside, the rest is packed.

_packing/plan/*.npy, plan.json      the plan; sample ids are row numbers of the index
_packing/plan/set_aside.parquet     not_chosen, duplicate_key, overlong …, with their details
_packing/plan/summary.txt           the figures, to be shared
_packing/plan.json                  the receipt: inputs, hashes of the files above; written last
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from offline_packing.config.packing import PackingConfig
from offline_packing.config.sections import PackConfig
from offline_packing.errors import StageError
from offline_packing.index import table as index
from offline_packing.index.chosen import left_out
from offline_packing.index.records import Hashes, find_duplicates, record_numbers
from offline_packing.index.rows import (
    Prefixes,
    SampleIds,
    media_of_samples,
    name_copies,
    name_samples,
    sample_flops,
)
from offline_packing.index.set_aside import AsideSamples, group_set_aside
from offline_packing.index.table import Index
from offline_packing.layouts import LAYOUTS
from offline_packing.layouts.shards import splits_of_plan
from offline_packing.plan.uses import Uses, choose_uses
from offline_packing.planner.options import PlanRequest
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.planner.samples import Column, Table
from offline_packing.runs.artifacts import (
    StoredPlan,
    check_plan,
    load_plan,
    plan_files,
    plan_fingerprint,
    plan_identity,
)
from offline_packing.runs.figures import as_text, run_figures
from offline_packing.runs.run import PlanFacts, Run, listed
from offline_packing.runs.set_aside import aside_while_measuring, explain
from offline_packing.runs.stage import Stage, Task, bring
from offline_packing.storage.files import hash_file, write_atomically
from offline_packing.storage.receipts import Fingerprint, changed_fields
from task_encoders.families import model_cost

if TYPE_CHECKING:
    from offline_packing.plan.prefixes import Trees

logger = logging.getLogger(__name__)

#: Sources whose shares of tokens are balanced over optimizer steps.
_MOST_SOURCES: Final = 8


@dataclass(frozen=True)
class Planned:
    """A plan over the ids of the index, and the samples it leaves out."""

    packs: PackPlan
    set_aside: AsideSamples


def plan(run: Run, samples: Index) -> StoredPlan:
    """Make the plan, or find it complete. Raises StageError as `bring`, where there is nothing to
    pack, or an over-long sample under on_overlong: error."""
    bring(run, stage := Plan(run, samples))
    receipt = run.workspace.read_plan()
    assert receipt is not None
    made = stage.planned
    return load_plan(run.workspace, receipt) if made is None else StoredPlan(made.packs, receipt)


class Plan(Stage):
    """The plan, made in one task. It may be replaced until shards are written from it."""

    name = "plan"

    def __init__(self, run: Run, samples: Index) -> None:
        super().__init__(run)
        self.samples = samples
        self.planned: Planned | None = None

    def inputs(self) -> Fingerprint:
        return plan_fingerprint(self.run)

    def check(self, found: Fingerprint, *, repairs: bool, complete: bool) -> None:
        check_plan(self.run, found)

    def is_replaceable(self) -> bool:
        return not self.run.workspace.written_with()

    def tasks(self) -> Sequence[Task]:
        return [Task(plan_files(self.run.config), None)]

    def make(self, tasks: Sequence[Task], folder: Path) -> None:
        self.planned = planned = make_plan(self.run, self.samples)
        _warn_of_uneven_packs(self.run.config, planned.packs)
        folder = folder / "_packing" / "plan"
        planned.packs.save(folder, id_type=np.int64)
        schema, paths = index.SET_ASIDE_SCHEMA, [s.path for s in self.run.config.source]
        with index.table_writer(folder / "set_aside.parquet", schema) as write_aside:
            for table in planned.set_aside.tables(self.samples, paths):
                write_aside(table)
        reasons = planned.set_aside.reasons
        text = summary_text(self.run, self.samples, planned.packs, reasons)
        write_atomically(folder / "summary.txt", text.encode())

    def record(self) -> tuple[dict[str, str], dict[str, Any]]:
        root = self.run.workspace.root
        if self.planned is None:  # killed before its receipt
            self.make(self.tasks(), root)
        assert self.planned is not None
        files = {name: hash_file(root / name) for name in plan_files(self.run.config)}
        facts = PlanFacts(
            plan_identity(files),
            dict(self.planned.set_aside.reasons),
            self.planned.packs.info.num_copies,
            {path: [*map(dict, stages)] for path, stages in self.run.trained.items()},
        )
        return files, asdict(facts)

    def agrees(self, files: Mapping[str, str]) -> bool | None:
        written = self.run.workspace.written_with()
        return written.get("plan") == plan_identity(files) if written else None

    def describe_change(self) -> str:
        return "the settings, or the version of offline-packing, give another plan"


def _warn_of_uneven_packs(config: PackingConfig, packs: PackPlan) -> None:
    """Warn if the ranks that `pack.order` names get different numbers of packs."""
    order = packs.order
    if order is None:
        return
    for split, own in splits_of_plan(packs, config.output.split).items():
        if len(own) % order.round:
            logger.warning(
                "plan: %s packs of split %s do not divide evenly among %d ranks x %d workers; "
                "the balance of pack.order holds for the first epoch only",
                f"{len(own):,}",
                split,
                order.num_ranks,
                max(1, order.num_workers),
            )


def preview_plan(run: Run, samples: Index) -> str:
    """Return the summary of the plan that `plan` would make, if there is not one; nothing is
    written."""
    receipt = run.workspace.read_plan()
    if receipt is not None and not changed_fields(receipt.inputs, plan_fingerprint(run)):
        packs = load_plan(run.workspace, receipt).packs
        return f"plan: complete ({packs.num_packs:,} packs), nothing to do\n"
    planned = make_plan(run, samples)
    return summary_text(run, samples, planned.packs, planned.set_aside.reasons)


def summary_text(run: Run, samples: Index, packs: PackPlan, plan_reasons: Mapping[str, int]) -> str:
    """Return the figures of a plan as text. `plan_reasons`: samples set aside while planning."""
    return as_text(run_figures(run.config, samples, packs, plan_reasons))


def make_plan(run: Run, samples: Index) -> Planned:
    """Plan without writing. Raises StageError where there is nothing to pack, an over-long sample
    under on_overlong: error, or an option that the strategy does not have."""
    layout, num_tokens = run.config.output.layout, samples.array("num_tokens")
    has_rules = LAYOUTS[layout].has_rules()
    if has_rules:
        if samples.info.fingerprint.get("index.layout") != layout:
            raise StageError(
                f"the index was not measured for layout {layout}; run measure again with "
                "output.overwrite=true, or choose another output.path"
            )
        num_tokens = num_tokens + samples.array("room")
    where, repeats = run.config.pack.where, find_duplicates(samples)
    found = [AsideSamples.of(repeats, "duplicate_key", "an earlier sample has this key")]
    if run.trained:
        from offline_packing.plan.trained import count_trained  # compiled

        known = np.flatnonzero(count_trained(run.config, samples, run.trained))
        found.append(AsideSamples.of(known, "trained", f"by {', '.join(run.trained)}"))
    if where is not None:
        found.append(left_out(samples, where))
    if has_rules:
        unfit = samples.table("unfit")["unfit"].dictionary_encode().combine_chunks()
        codes = unfit.indices.fill_null(-1).to_numpy()
        for code, what in enumerate(unfit.dictionary.to_pylist()):
            reason = "not_in_layout", f"layout {layout} holds no {what}"
            found.append(AsideSamples.of(np.flatnonzero(codes == code), *reason))
    aside = AsideSamples.merge(found)
    id_type = np.int32 if len(num_tokens) < 2**31 else np.int64
    kept: SampleIds = np.arange(len(num_tokens), dtype=id_type)
    if len(aside.ids):
        kept = np.delete(kept, aside.ids)
    grow = amounts = None
    if (sharing := run.config.pack.share_prefixes) is not None:
        from offline_packing.plan.prefixes import form_trees, group_samples  # compiled
        from offline_packing.planner.strategies.kernels import kernels_for

        groups, longest = group_samples(run, samples), run.config.pack.longest_sample

        def grow(ids: SampleIds, table: Table) -> "Trees":
            with kernels_for(len(ids), run.config.pack.seq_length):
                return form_trees(ids, groups[ids], table, longest, sharing.max_branches)

        def amounts(ids: SampleIds) -> tuple[npt.NDArray[np.int64], Hashes]:
            table = tabulate(run.config, samples, ids, num_tokens[ids], record_numbers(samples))
            return grow(ids, table).amounts(samples.array("key_hash")[ids])

    uses = choose_uses(run.config, samples, kept, amounts)
    packs = _pack_uses(run.config, samples, num_tokens, uses, grow)
    reasons = packs.set_aside_reasons.astype(np.int64) << 32 | num_tokens[packs.set_aside_ids]
    different, codes = np.unique(reasons, return_inverse=True)
    texts = tuple(
        set_aside_reason(packs.info.reason_names[one >> 32], one & 0xFFFFFFFF, run.config.pack)
        for one in different.tolist()
    )
    lost = AsideSamples(packs.set_aside_ids.astype(np.int64), codes.astype(np.int32), texts)
    planned = Planned(packs, AsideSamples.merge([aside, uses.not_drawn, lost]))
    _check_planned(run, samples, planned)
    return planned


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


def _pack_uses(
    config: PackingConfig,
    samples: Index,
    num_tokens: npt.NDArray[np.integer],
    uses: Uses,
    grow: "Callable[[SampleIds, Table], Trees] | None",
) -> PackPlan:
    """Plan all uses, split after split, over the ids of the index. `grow` forms the trees of a
    split's uses; None: samples share no prefixes."""
    plans: dict[str, PackPlan] = {}
    # Samples with one number share no pack: copies, and parts of a conversation.
    apart = record_numbers(samples) if samples.info.split or uses.repeated else None
    try:
        for name, ids in uses.ids.items():
            is_all = not uses.repeated and len(ids) == len(num_tokens)  # each once, in order
            tokens = num_tokens if is_all else num_tokens[ids]
            table = tabulate(config, samples, ids, tokens, apart)
            if grow is None:
                own = _plan_table(config, table)
            else:
                trees = grow(ids, table)
                own = trees.expand(_plan_table(config, trees.table))
            plans[name] = own if is_all else own.of(ids)
    except ValueError as error:
        raise StageError(f"plan: {' '.join(str(error).split())}") from error
    if len(plans) == 1 and not uses.repeated:
        return next(iter(plans.values()))
    return _join_plans(plans)


def _join_plans(planned: Mapping[str, PackPlan]) -> PackPlan:
    """Join the plans of all splits, one after another. A sample that is set aside is so in all its
    uses, and is listed once."""
    from offline_packing.planner.strategies.strategy import Packs, join_packs

    plans = list(planned.values())
    sizes = {name: plan.num_packs for name, plan in planned.items()}
    packs = join_packs([Packs(plan.sample_ids, plan.pack_offsets) for plan in plans])
    ids = np.concatenate([plan.set_aside_ids for plan in plans])
    aside, firsts = np.unique(ids, return_index=True)
    reasons = np.concatenate([plan.set_aside_reasons for plan in plans])[firsts]
    is_packed = np.zeros(packs.sample_ids.max(initial=-1) + 1, bool)
    is_packed[packs.sample_ids] = True
    settings = dict(plans[0].info.settings)
    # notes of the passes, over all plans that have packs
    if done := [plan.info.settings["uniform"] for plan in plans if "uniform" in plan.info.settings]:
        settings["uniform"] = {name: sum(one[name] for one in done) for name in done[0]}
    info = replace(
        plans[0].info,
        num_tokens=sum(plan.info.num_tokens for plan in plans),
        lower_bound=sum(plan.info.lower_bound for plan in plans),
        splits=sizes if len(sizes) > 1 else {},
        num_copies=len(packs.sample_ids) - int(is_packed.sum()),
        settings=settings,
    )
    branches = None
    if plans[0].branches is not None:
        branches = np.concatenate([plan.branches for plan in plans])
    return PackPlan(*packs, aside, reasons, info, branches)


def tabulate(
    config: PackingConfig,
    samples: Index,
    kept: SampleIds,
    num_tokens: npt.NDArray[np.integer],
    records: npt.NDArray[np.integer] | None,
) -> Table:
    """Return all that planning needs of the samples `kept` (num_kept,), one twice if it is used
    twice, and what a tree has of each column. `num_tokens` is theirs; samples of one number in
    `records` (num_samples,) share no pack."""
    pack = config.pack

    def column(name: str) -> npt.NDArray[Any]:
        return samples.array(name)[kept]

    def sums(index: Index) -> dict[str, npt.NDArray[Any]]:
        """Return the quantities that add up in a pack, of whole samples or of their prefixes."""
        found: dict[str, npt.NDArray[Any]] = {
            n: index.array(f"num_{n}")[kept] for n in pack.budgets
        }
        if pack.order is not None:
            tower, language = sample_flops(index, model_cost(config.model))[:, kept]
            found |= {"cost": tower + language, "tower_cost": tower}
            # Tokens with loss, and tokens per source (all but the last).
            tokens, sources = index.array("num_tokens")[kept], column("source_id")
            found["features[0]"] = index.array("num_loss_tokens")[kept]
            for i in range(min(sources.max(initial=0), _MOST_SOURCES)):
                found[f"features[{i + 1}]"] = np.where(sources == i, tokens, 0)
        return found

    whole, shared, of_prefix = sums(samples), dict[str, npt.NDArray[Any]](), None
    if pack.share_prefixes is not None:
        shared, of_prefix = sums(prefixes := Prefixes(samples)), prefixes.array("num_tokens")[kept]
    columns = {name: Column(own, "sum", shared.get(name)) for name, own in whole.items()}
    budgets = {str(name): (columns.pop(name), most) for name, most in pack.budgets.items()}
    if pack.max_samples is not None:
        ones = np.ones(len(kept), np.int32)
        budgets["samples"] = Column(ones, "sum", 0 * ones), pack.max_samples
    alike = dict[str, npt.NDArray[Any]]()  # in all samples of a tree
    if pack.assignment == "locality":
        alike["source_order"] = kept
    if pack.layout is not None and pack.layout.uniform:
        alike["media"] = media_of_samples(column)
    if pack.homogeneous or LAYOUTS[config.output.layout].ONE_MEDIUM:
        groups = np.minimum(media_of_samples(column), 2)  # neither, images alone, videos
        if pack.homogeneous or len(np.unique(groups)) > 1:
            alike["groups"] = groups
    if pack.mixture is not None:
        # In random order, the same in each round of uses: so copies are as far apart as can be.
        rounds = np.cumsum(np.diff(kept, prepend=-1) <= 0)
        turns = np.random.default_rng(pack.seed).permutation(samples.info.num_samples)
        alike |= {"source_order": rounds * len(turns) + turns[kept], "source": column("source_id")}
    columns |= {name: Column(values, "first") for name, values in alike.items()}
    if records is not None:
        columns["copy_of"] = Column(records[kept], "joined")
    return Table(Column(num_tokens, "sum", of_prefix), budgets, columns)


def _plan_table(config: PackingConfig, table: Table) -> PackPlan:
    """Plan a table as the configuration asks."""
    # Its compiled parts take time to import.
    from offline_packing.planner.plan_packs import plan_table

    pack, mixture = config.pack, None
    if pack.mixture is not None:
        from offline_packing.planner.mixture import Mixture  # compiled

        lines = [[pack.mixture.share(n, end) for n in config.source_names()] for end in (0, 1)]
        mixture = Mixture(*map(tuple, lines))
    options = {"pad_multiple": pack.padding, "homogeneous": "groups" in table.columns}
    chosen = pack.model_copy(update={**options, "max_samples": None})  # among the table's budgets
    window_packs = config.output.packs_per_shard
    return plan_table(table, PlanRequest(chosen, table.budgets, pack.layout, window_packs, mixture))


def set_aside_reason(name: str, num_tokens: int, pack: PackConfig) -> tuple[str, str]:
    """Return the reason and the detail that the set-aside table gives for a sample of `num_tokens`
    tokens; `name` is the planner's own name of the reason."""
    if name.startswith("over_budget:"):
        budget = name.partition(":")[2]
        return "over_budget", f"it alone exceeds the limit of {budget} {pack.budgets[budget]}"  # type: ignore[index]
    limit = f"seq_length {pack.seq_length}"
    if pack.padding > 1:
        limit += f" (in multiples of {pack.padding})"
    return "overlong", f"{num_tokens} tokens > {limit}"


def write_assignment(samples: pa.Table, plan: PackPlan, path: Path) -> None:
    """Write a Parquet file with a row per use of a sample, in the order of the packs: the columns
    of `samples`, among them key and at the end num_tokens, and before the last pack and position in
    the pack. Rows at the end, without a pack, are samples set aside."""
    samples = samples.combine_chunks()
    is_aside = np.ones(len(samples), bool)
    is_aside[plan.sample_ids] = False
    aside = np.flatnonzero(is_aside)
    sizes = np.diff(plan.pack_offsets)
    places = {
        "pack": np.repeat(np.arange(plan.num_packs), sizes),
        "position": np.arange(len(plan.sample_ids)) - np.repeat(plan.pack_offsets[:-1], sizes),
    }
    rows = samples.take(pa.array(np.concatenate([plan.sample_ids, aside])))
    if (copies := plan.copy_numbers()) is not None:
        rows = name_copies(rows, np.append(copies, np.zeros(len(aside), copies.dtype)))
    none = pa.nulls(len(aside), pa.int64())
    for name, values in places.items():
        column = pa.chunked_array([pa.array(values, pa.int64()), none])
        rows = rows.add_column(len(rows.column_names) - 1, name, column)
    path.parent.mkdir(parents=True, exist_ok=True)
    with index.table_writer(path, rows.schema) as write:
        write(rows)
