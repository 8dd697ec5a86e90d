"""plan: index -> plan. Duplicate keys and over-long samples are set aside, the rest is packed.

_packing/plan/*.npy, plan.json      the plan; sample ids are row numbers of the index
_packing/plan/set_aside.parquet     duplicate_key, not_in_layout and overlong, with their details
_packing/plan/summary.txt           the figures, to be shared
_packing/plan/stage.json            fingerprint, hashes of the files above; written last
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from offline_packing.config.packing import PackingConfig
from offline_packing.errors import StageError
from offline_packing.index import table as index
from offline_packing.index.table import Index
from offline_packing.layouts.shards import splits_of_plan
from offline_packing.plan.make_plan import Planned, make_plan
from offline_packing.plan.summary import render_summary
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
from offline_packing.runs.figures import run_figures
from offline_packing.runs.manifest import hash_plan, read_manifest
from offline_packing.runs.repair import accept, refused, set_apart
from offline_packing.runs.run import Run
from offline_packing.storage.files import (
    hash_file,
    read_json,
    remove_folder,
    seal,
    to_json,
    write_atomically,
)

logger = logging.getLogger(__name__)

_OTHER_PLAN: Final = "the settings, or the version of offline-packing, give another plan"


def plan(run: Run, samples: Index) -> StoredPlan:
    """Make the plan, or find it complete. Raises StageError where there is nothing to pack, an
    over-long sample under on_overlong: error, or shards that were written with another plan."""
    workspace = run.workspace
    found = read_json(workspace.plan_info)
    fingerprint = plan_fingerprint(run)
    try:
        found = _restore_lost(run, samples, found)
    except StageError:
        if not run.config.output.overwrite:
            raise
    if found is not None and not changed_fields(found["fingerprint"], fingerprint):
        stored = load_plan(run, found)
        logger.info("plan: complete (%s packs), nothing to do", f"{stored.packs.num_packs:,}")
        return stored
    _discard_previous(run, found, fingerprint)
    planned = make_plan(run, samples)
    _warn_of_uneven_packs(run.config, planned.packs)
    return _save(run, samples, planned, workspace.plan)


def _warn_of_uneven_packs(config: PackingConfig, packs: PackPlan) -> None:
    """Warn if the ranks that `pack.order` names get different numbers of packs."""
    order = packs.order
    if order is None:
        return
    for split, own in splits_of_plan(packs, config.output.split).items():
        counts = packs.info.epochs if own.start == 0 else []
        count = next((n for n in counts or [len(own)] if n % order.round), 0)
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


def _restore_lost(
    run: Run, samples: Index, found: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """Plan again where files of a plan are missing, and accept those of the recorded hash; returns
    its stage.json, which itself is accepted if it is of the plan of the shards. Raises StageError
    where the plan comes out differently."""
    workspace, manifest = run.workspace, read_manifest(run.workspace.root)
    expected = (read_json(workspace.started) or {}).get("plan")
    if manifest is not None:
        expected = manifest.plan
    files = (
        {}
        if found is None
        else {workspace.plan / name: one for name, one in found["files"].items()}
    )
    lost = [path for path in files if not path.exists()] if found else [workspace.plan_info]
    if not lost or (found is None and expected is None):
        return found
    logger.info("plan: %s and what else is missing is made again", lost[0])
    remove_folder(workspace.again)
    folder = workspace.again / str(workspace.plan.relative_to(workspace.root))
    try:
        made = _save(run, samples, make_plan(run, samples), folder).info
    except StageError as error:
        raise refused(workspace, lost, error) from error
    if found is None:
        if expected not in (hash_plan(made), made["hash"]):
            raise refused(workspace, lost, _OTHER_PLAN)
        files = {workspace.plan / name: one for name, one in made["files"].items()}
        lost = [path for path, one in files.items() if not path.exists() or hash_file(path) != one]
        set_apart(workspace, lost)
        info = workspace.plan_info
        files, lost = {**files, info: hash_file(folder / info.name)}, [*lost, info]
    accept(workspace, {path: files[path] for path in lost}, lambda: _OTHER_PLAN)
    return found or made


def preview_plan(run: Run, samples: Index) -> str:
    """The summary of the plan that `plan` would make, if there is not one; nothing is written."""
    found = read_json(run.workspace.plan_info)
    if found is not None and not changed_fields(found["fingerprint"], plan_fingerprint(run)):
        return f"plan: complete ({load_plan(run, found).packs.num_packs:,} packs), nothing to do\n"
    planned = make_plan(run, samples)
    return summary_text(run, samples, planned.packs, planned.set_aside.reasons)


def summary_text(run: Run, samples: Index, packs: PackPlan, plan_reasons: Mapping[str, int]) -> str:
    """The figures of a plan, to be shared. `plan_reasons`: samples set aside while planning."""
    return render_summary(run_figures(run.config, samples, packs, plan_reasons))


def _discard_previous(run: Run, found: Mapping[str, Any] | None, wanted: Fingerprint) -> None:
    """Remove an earlier plan, which may be replaced until shards are written from it."""
    workspace = run.workspace
    if found is None and not workspace.manifest.exists() and not workspace.started.exists():
        # Nothing says from which plan shards were written.
        set_apart(workspace, workspace.write.rglob("*-??????.json"))
        remove_folder(workspace.plan)
        return
    if found is not None and workspace.started.exists() and not run.config.output.overwrite:
        check_fingerprint(
            found["fingerprint"],
            wanted,
            artifact=f"the plan of the shards in {workspace.root}",
            remedy="set output.overwrite=true to replace the shards, or choose another output.path",
        )
    run.discard_plan()
