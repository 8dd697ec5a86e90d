"""plan: index -> plan. Duplicate keys and over-long samples are set aside, the rest is packed.

_packing/plan/*.npy, plan.json      the plan; sample ids are row numbers of the index
_packing/plan/set_aside.parquet     duplicate_key, not_in_layout and overlong, with their details
_packing/plan/summary.txt           the figures, to be shared
_packing/plan/stage.json            fingerprint, hashes of the files above; written last
"""

import logging
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from offline_packing.errors import StageError
from offline_packing.index import table as index
from offline_packing.index.duplicates import find_duplicates
from offline_packing.index.rows import name_rows
from offline_packing.index.set_aside import SetAside
from offline_packing.index.set_aside_table import group_set_aside
from offline_packing.index.table import Index
from offline_packing.layouts import LAYOUTS
from offline_packing.plan.arguments import plan_arguments, set_aside_reason
from offline_packing.plan.summary import render_summary, summarize
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.runs.artifacts import (
    PLAN_FILES,
    StoredPlan,
    load_plan,
    plan_fingerprint,
    plan_identity,
)
from offline_packing.runs.losses import aside_while_measuring, explain
from offline_packing.runs.manifest import hash_plan
from offline_packing.runs.run import Run, listed
from offline_packing.storage.files import (
    hash_file,
    read_json,
    sync_folder,
    to_json,
    write_atomically,
)
from offline_packing.storage.fingerprint import Fingerprint, changed_fields, check_fingerprint

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Planned:
    """A plan whose ids are rows of the index, and what it leaves out."""

    packs: PackPlan
    set_aside: SetAside

    @property
    def reasons(self) -> Counter[str]:
        """Samples set aside while planning, by reason."""
        return self.set_aside.reasons


def plan(run: Run, samples: Index) -> StoredPlan:
    """Make the plan, or find it complete.

    Raises:
        StageError: nothing to pack, over-long samples under on_overlong: error, or
            shards were already written with another plan.
    """
    workspace = run.workspace
    fingerprint = plan_fingerprint(run)
    found = read_json(workspace.plan_info)
    if found is not None and not changed_fields(found["fingerprint"], fingerprint):
        stored = load_plan(run, found)
        logger.info("plan: complete (%s packs), nothing to do", f"{stored.packs.num_packs:,}")
        return stored
    _discard_previous(run, {} if found is None else found["fingerprint"], fingerprint)
    return _save(run, samples, make_plan(run, samples), workspace.plan)


def _save(run: Run, samples: Index, planned: Planned, folder: Path) -> StoredPlan:
    """Write all files of a plan, stage.json last."""
    planned.packs.save(folder)
    with index.table_writer(folder / "set_aside.parquet", index.SET_ASIDE_SCHEMA) as write_aside:
        for table in planned.set_aside.tables(samples, [s.path for s in run.config.source]):
            write_aside(table)
    text = summary_text(run, samples, planned.packs, planned.reasons)
    write_atomically(folder / "summary.txt", text.encode())
    files = {name: hash_file(folder / name) for name in PLAN_FILES}
    document = {
        "fingerprint": plan_fingerprint(run),
        "hash": plan_identity(files),
        "set_aside": dict(planned.reasons),
        "files": files,
    }
    write_atomically(folder / run.workspace.plan_info.name, to_json(document))
    return StoredPlan(planned.packs, document)


def restore_plan(run: Run, samples: Index, expected: str) -> None:
    """Make a damaged plan again, where shards are written from it already.

    Args:
        expected: `hash_plan` of the plan as it was.

    Raises:
        StageError: it would not be the same plan.
    """
    folder = run.workspace.plan
    scratch = folder.with_suffix(".repair")
    shutil.rmtree(scratch, ignore_errors=True)  # left by a run that was killed
    try:
        _save(run, samples, make_plan(run, samples), scratch)
        info = scratch / run.workspace.plan_info.name
        if hash_plan(read_json(info)) != expected:
            raise StageError(
                f"{folder} cannot be made as it was: the plan comes out otherwise; restore it from "
                "a copy, or pack all data again with another output.path"
            )
        folder.mkdir(exist_ok=True)
        for path in [*(scratch / name for name in PLAN_FILES), info]:
            path.replace(folder / path.name)
        sync_folder(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def preview_plan(run: Run, samples: Index) -> str:
    """The summary of the plan that `plan` would make; nothing is written."""
    planned = make_plan(run, samples)
    return summary_text(run, samples, planned.packs, planned.reasons)


def make_plan(run: Run, samples: Index) -> Planned:
    """Plan without writing.

    Raises:
        StageError: nothing to pack, an over-long sample under on_overlong: error, or options that
            the strategy does not have.
    """
    from offline_packing.planner.plan_packs import (
        plan_packs,  # its compiled parts take time to import
    )

    num_tokens = samples.array("num_tokens")
    aside = _find_set_aside(run, samples)
    kept = np.delete(np.arange(len(num_tokens)), aside.rows)
    try:
        packs = plan_packs(
            num_tokens[kept],
            run.config.pack.seq_length,
            **plan_arguments(run.config, samples, kept),
        )
    except (TypeError, ValueError) as error:  # TypeError: an option that the strategy has not
        raise StageError(f"plan: {' '.join(str(error).split())}") from error
    packs = replace(
        packs, sample_ids=kept[packs.sample_ids], set_aside_ids=kept[packs.set_aside_ids]
    )
    left_out = _left_out(run, packs, num_tokens[packs.set_aside_ids])
    planned = Planned(packs, SetAside.merge([aside, left_out]))
    _check_planned(run, samples, planned)
    return planned


def _find_set_aside(run: Run, samples: Index) -> SetAside:
    """The rows that are not planned."""
    layout = run.config.output.layout
    duplicates = find_duplicates(samples.array("key_hash"), partial(name_rows, samples))
    found = [(duplicates, "duplicate_key", "an earlier sample has this key")]
    for what, rows in LAYOUTS[layout].find_unfit(samples):
        found.append((rows, "not_in_layout", f"layout {layout} holds no {what}"))
    return SetAside.merge([SetAside.of(rows, *reason) for rows, *reason in found])


def _left_out(run: Run, packs: PackPlan, num_tokens: npt.NDArray[np.integer]) -> SetAside:
    """What the planner left out; `num_tokens` are those of `packs.set_aside_ids`."""
    kinds = packs.set_aside_reasons.astype(np.int64) << 32 | num_tokens
    different, codes = np.unique(kinds, return_inverse=True)
    texts = tuple(
        set_aside_reason(packs.info.reason_names[kind >> 32], kind & 0xFFFFFFFF, run.config)
        for kind in different.tolist()
    )
    return SetAside(packs.set_aside_ids.astype(np.int64), codes.astype(np.int32), texts)


def _check_planned(run: Run, samples: Index, planned: Planned) -> None:
    overlong = planned.set_aside.first("overlong")
    if overlong is not None and run.config.pack.on_overlong == "error":
        row, detail = overlong
        key = name_rows(samples, np.array([row]))["key"][0].as_py()
        raise StageError(
            f"sample {key!r} has {detail} ({planned.reasons['overlong']:,} such samples);"
            " set pack.on_overlong: set_aside, or a longer pack.seq_length"
        )
    if planned.packs.num_packs == 0:
        reasons = Counter(samples.info.set_aside) + planned.reasons
        groups = group_set_aside(aside_while_measuring(run.workspace, samples.info))
        example = max(groups, key=lambda group: group.count, default=None)
        if samples.info.num_skipped and not reasons:
            raise StageError(
                f"nothing to pack in {run.workspace.root}: no sample is new, source.skip holds "
                f"all {samples.info.num_skipped:,}"
            )
        raise StageError(
            f"nothing to pack in {run.workspace.root}; set aside: {listed(reasons.items())}; "
            f"{f'{explain(run.config, example)}; ' if example else ''}check source.path and "
            "source.task"
        )


def summary_text(run: Run, samples: Index, packs: PackPlan, plan_reasons: Mapping[str, int]) -> str:
    """The figures of a plan, to be shared. `plan_reasons`: samples set aside while planning."""
    reasons = Counter(samples.info.set_aside) + Counter(plan_reasons)
    lengths = samples.array("num_tokens")[packs.sample_ids]
    return render_summary(summarize(run.config, samples.info, lengths, packs, reasons))


def _discard_previous(run: Run, found: Fingerprint, wanted: Fingerprint) -> None:
    """Make way for a new plan. Planning anew is free until shards are written from a plan."""
    workspace = run.workspace
    if workspace.write.exists() and not run.config.output.overwrite:
        check_fingerprint(
            found,
            wanted,
            artifact=f"the plan of the shards in {workspace.root}",
            remedy="set output.overwrite=true to replace the shards, or choose another output.path",
        )
    run.discard_plan()
