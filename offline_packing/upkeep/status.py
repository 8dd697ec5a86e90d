"""status: how far the stages of an output are."""

from offline_packing.index.table import IndexInfo
from offline_packing.report.report import report_status
from offline_packing.runs.run import Run, listed
from offline_packing.runs.workspace import Workspace
from offline_packing.storage.files import read_json


def status(run: Run) -> str:
    """How far an output is, as text; nothing is written, and a run may be at work on it."""
    root = run.workspace
    lines = _status_of(root)
    manifest = read_json(root.manifest)
    if manifest is not None:
        counts = manifest["counts"]
        packs = sum(counts["packs"].values())
        lines.append(
            f"complete: {counts['packed']:,} samples in {packs:,} packs, "
            f"{len(manifest['shards']):,} shards; set aside: {listed(counts['set_aside'].items())}"
        )
    written = report_status(root)
    if written is not None:
        lines.append(f"report    {written}")
    return "\n".join(lines) + "\n"


def _status_of(workspace: Workspace) -> list[str]:
    info = IndexInfo.load(workspace.index_info)
    planned = read_json(workspace.plan_info)
    plan_document = read_json(workspace.plan / "plan.json")
    lines = [f"measure   {_measure_status(workspace, info)}"]
    if planned is None or plan_document is None:
        return [*lines, "plan      not done"]
    packs = plan_document["statistics"]["num_packs"]
    lines.append(f"plan      done: {packs:,} packs")
    fragments = list(workspace.write.glob("*-??????.json"))
    failed = sorted(workspace.write.glob("*.failed"))
    lines.append(f"write     {len(fragments):,} shards written, {len(failed):,} failed")
    return [*lines, *(f"  {path.stem}: {path.read_text()}" for path in failed)]


def _measure_status(workspace: Workspace, info: IndexInfo | None) -> str:
    if info is not None:
        aside = listed(info.set_aside.items())
        return f"done: {info.num_samples:,} samples; set aside: {aside}"
    parts = len(list(workspace.index.glob("part-*.parquet")))
    return f"{parts:,} parts measured" if workspace.index.exists() else "not begun"
