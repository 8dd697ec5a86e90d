"""plan: index -> plan. Duplicate keys and over-long samples are set aside, the rest is packed.

_packing/plan/*.npy, plan.json      the plan; sample ids are row numbers of the index
_packing/plan/set_aside.parquet     duplicate_key, not_in_layout and overlong, with their details
_packing/plan/summary.txt           the figures, to be shared
_packing/plan/stage.json            fingerprint, hashes of the files above; written last
"""

import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from offline_packing.config.packing import PackingConfig
from offline_packing.errors import DamagedError, StageError
from offline_packing.index import table as index
from offline_packing.index.table import Index
from offline_packing.layouts.shards import splits_of_plan
from offline_packing.plan.make_plan import Planned, make_plan
from offline_packing.plan.summary import (
    render_content,
    render_groups,
    render_idle,
    render_ranks,
    render_sources,
    render_split,
    render_summary,
)
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.runs.artifacts import (
    Fingerprint,
    StoredPlan,
    changed_fields,
    check_fingerprint,
    load_plan,
    plan_files,
    plan_fingerprint,
    plan_identity,
)
from offline_packing.runs.manifest import hash_plan
from offline_packing.runs.run import Run
from offline_packing.runs.warnings import run_warnings
from offline_packing.storage.files import (
    hash_file,
    move_file,
    read_json,
    seal,
    sync_folder,
    to_json,
    write_atomically,
)
from offline_packing.storage.paths import remove_folder, scratch_folder

logger = logging.getLogger(__name__)


def plan(run: Run, samples: Index) -> StoredPlan:
    """Make the plan, or find it complete. Raises StageError where there is nothing to pack, an
    over-long sample under on_overlong: error, or shards that were written with another plan."""
    workspace = run.workspace
    found = read_json(workspace.plan_info)
    fingerprint = plan_fingerprint(run)
    if found is not None and not changed_fields(found["fingerprint"], fingerprint):
        stored = load_plan(run, found)
        logger.info("plan: complete (%s packs), nothing to do", f"{stored.packs.num_packs:,}")
        return stored
    _discard_previous(run, {} if found is None else found["fingerprint"], fingerprint)
    planned = make_plan(run, samples)
    _warn_of_uneven_packs(run.config, planned.packs)
    return _save(run, samples, planned, workspace.plan)


def _warn_of_uneven_packs(config: PackingConfig, packs: PackPlan) -> None:
    """Warn if the ranks that `pack.order` names get different numbers of packs."""
    order = config.pack.order
    if order is None:
        return
    readers = order.num_ranks * max(1, order.num_workers)
    for split, own in splits_of_plan(packs, config.output.split).items():
        counts = packs.info.epochs if own.start == 0 else []
        count = next((n for n in counts or [len(own)] if n % readers), 0)
        if count:
            logger.warning(
                "plan: %s packs of split %s do not divide evenly among %d ranks x %d workers; "
                "the balance of pack.order holds for the first epoch only",
                f"{count:,}",
                split,
                order.num_ranks,
                max(1, order.num_workers),
            )


def _save(run: Run, samples: Index, planned: Planned, folder: Path) -> StoredPlan:
    """Write all files of a plan, stage.json last."""
    planned.packs.save(folder, id_type=np.int64)
    with index.table_writer(folder / "set_aside.parquet", index.SET_ASIDE_SCHEMA) as write_aside:
        for table in planned.set_aside.tables(samples, [s.path for s in run.config.source]):
            write_aside(table)
    text = summary_text(run, samples, planned.packs, planned.set_aside.reasons)
    write_atomically(folder / "summary.txt", text.encode())
    files = {name: hash_file(folder / name) for name in plan_files(run.config)}
    first_split = next(iter(run.config.output.split))
    counts = planned.packs.info.epochs
    epochs = {"epochs": {first_split: counts}} if counts else {}
    document = {
        "fingerprint": plan_fingerprint(run),
        "hash": plan_identity(files),
        "set_aside": dict(planned.set_aside.reasons),
        "copies": planned.packs.info.num_copies,
        **epochs,
        "files": files,
    }
    write_atomically(folder / run.workspace.plan_info.name, to_json(seal(document)))
    return StoredPlan(planned.packs, document)


def restore_plan(run: Run, samples: Index, expected: str | None) -> None:
    """Rebuild a damaged plan. Raises StageError if it would be another one than the shards', whose
    `hash_plan` or `hash` is expected; None: there are none that count."""
    folder = run.workspace.plan
    scratch = scratch_folder(folder.with_suffix(".repair"))
    remove_folder(scratch)  # left by a killed run
    try:
        info = scratch / run.workspace.plan_info.name
        _save(run, samples, make_plan(run, samples), scratch)
        made = read_json(info)
        if expected not in (None, hash_plan(made), made["hash"]):
            raise StageError(
                f"{folder} cannot be rebuilt: the plan comes out differently; restore it from "
                "a copy, or pack all data again with another output.path"
            )
        folder.mkdir(exist_ok=True)
        for path in [*(scratch / name for name in plan_files(run.config)), info]:
            move_file(path, folder / path.name)
        sync_folder(folder)
    finally:
        remove_folder(scratch)


def preview_plan(run: Run, samples: Index) -> str:
    """The summary of the plan that `plan` would make, if there is not one; nothing is written."""
    found = read_json(run.workspace.plan_info)
    if found is not None and not changed_fields(found["fingerprint"], plan_fingerprint(run)):
        return f"plan: complete ({load_plan(run, found).packs.num_packs:,} packs), nothing to do\n"
    planned = make_plan(run, samples)
    return summary_text(run, samples, planned.packs, planned.set_aside.reasons)


def summary_text(run: Run, samples: Index, packs: PackPlan, plan_reasons: Mapping[str, int]) -> str:
    """The figures of a plan, to be shared. `plan_reasons`: samples set aside while planning."""
    reasons = Counter(samples.info.set_aside) + Counter(plan_reasons)
    lengths = samples.array("num_tokens")[packs.sample_ids]
    sources = render_sources(run.config, samples, packs)
    content = [
        *([("records", samples.info.saving)] if samples.info.saving else []),
        *([("conversations", samples.info.splitting)] if samples.info.split else []),
        *render_content(samples, packs),
        *render_groups(run.config, packs),
        *render_idle(run.config, samples, packs),
        *render_ranks(run.config, samples, packs),
        *render_split(run.config, samples, packs),
    ]
    warnings = run_warnings(run.config, samples, packs)
    return render_summary(
        run.config, samples.info, lengths, packs, reasons, sources, content, warnings
    )


def _discard_previous(run: Run, found: Fingerprint, wanted: Fingerprint) -> None:
    """Remove an earlier plan, which may be replaced until shards are written from it."""
    workspace = run.workspace
    if any(workspace.write.glob("*.json")) and not run.config.output.overwrite:
        if not found:
            raise DamagedError(
                f"{workspace.plan_info} is missing, though shards were written from it; retry "
                "makes it again"
            )
        check_fingerprint(
            found,
            wanted,
            artifact=f"the plan of the shards in {workspace.root}",
            remedy="set output.overwrite=true to replace the shards, or choose another output.path",
        )
    run.discard_plan()
