"""verify --discard: move away every file that is not as it was written, and nothing else."""

from offline_packing.errors import DamagedError, StageError
from offline_packing.layouts.shards import ShardFragment
from offline_packing.runs.manifest import read_manifest, shard_line
from offline_packing.runs.repair import start_repair
from offline_packing.runs.run import Run
from offline_packing.verify.damage import Damage, find_metadata_damage, find_stage_damage
from offline_packing.verify.shard import damage_tasks, find_damage
from task_encoders.packs.manifest import ShardLine


def discard(run: Run, *, dry_run: bool = False) -> str:
    """Move damaged files of an output, complete or not, to `_packing/damaged`; returns lines that
    name them. Hashes stay where they are recorded, so that the stages know what to make again."""
    found = find_all_damage(run)
    if not found:
        return "nothing is damaged"
    if not dry_run:
        run.workspace.remove_temporaries()
        start_repair(run.workspace, {one.name: one.text for one in found})
    lines = [f"  {one.name} {one.text}" for one in found]
    where = run.workspace.damaged
    did = f"would move to {where}" if dry_run else f"moved to {where}; run makes them again"
    return "\n".join([f"{len(found):,} files {did}:", *lines])


def find_all_damage(run: Run) -> list[Damage]:
    """Each file that is missing or damaged, once."""
    found: list[Damage] = []
    try:
        manifest = read_manifest(run.workspace.root)
    except DamagedError:
        manifest, name = None, run.workspace.manifest.name
        found.append(Damage(name, "is not what was written"))
    found += find_stage_damage(run, manifest)
    if manifest is None:
        lines, layout = _read_fragments(run, found), run.config.output.layout
    else:
        lines, layout = list(manifest.shards), manifest.layout
        found += find_metadata_damage(run, manifest)
    for damage in run.engine.run(find_damage, damage_tasks(run, lines, layout)):
        found += damage
    return sorted({one.name: one for one in found}.values(), key=lambda one: one.name)


def _read_fragments(run: Run, found: list[Damage]) -> list[ShardLine]:
    """Lines of the shards, as their fragments describe them; adds damaged ones to `found`."""
    lines = []
    for path in sorted(run.workspace.write.rglob("*-??????.json")):
        try:
            lines.append(shard_line(ShardFragment.load(path)))
        except StageError:
            name = str(path.relative_to(run.workspace.root))
            found.append(Damage(name, "is not what was written"))
    return lines
