"""verify: re-read the output and compare it with the plan; `deep`: also with the source.

files       every file there, with the hash that its receipt records, see damage.py
shards      the same; .tar.idx
packs       the planned keys, within seq_length
samples     each one in exactly one pack or set aside, with its measured length
deep        same turns and media bytes as the source; the measured number of tokens when encoded
            from the pack's own bytes; samples that share a prefix come out of its row as they are
            alone

`verify --discard` moves away every file that is not as it was written, and nothing else.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from offline_packing.config.packing import PackingConfig
from offline_packing.errors import DamagedError, StageError
from offline_packing.index.records import count_packed, record_counts, shared_contents
from offline_packing.index.table import Index
from offline_packing.layouts.container import shard_file
from offline_packing.layouts.energon_metadata import check_energon
from offline_packing.layouts.shards import PlannedShard, samples_of_splits
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.planner.ranks.layout import RankLayout
from offline_packing.runs.artifacts import check_layout, open_index, open_plan
from offline_packing.runs.manifest import require_manifest
from offline_packing.runs.repair import start_repair
from offline_packing.runs.run import Run, open_sources
from offline_packing.runs.tasks import plan_shards, run_tasks
from offline_packing.runs.warnings import count_shared
from offline_packing.storage.files import remove_path
from offline_packing.storage.receipts import STAGES, receipt_path
from offline_packing.verify.damage import ASIDE, find_damage
from offline_packing.verify.shard import VerifyResult, verify_shard, verify_tasks
from task_encoders.packs.manifest import Manifest
from task_encoders.storage.paths import REMEDY


@dataclass(frozen=True)
class Drawn:
    """How many samples to check, in whole packs: at least `amount`, or this share of all if it is
    below 1. `seed` decides which packs."""

    amount: float
    seed: int = 0

    def shards(self, plan: PackPlan, shards: Sequence[PlannedShard]) -> list[PlannedShard]:
        """Draw packs; return the shard of each, cut to this pack, in the order of the plan."""
        wanted = self.amount * (len(plan.sample_ids) if self.amount < 1 else 1)
        order = np.random.default_rng(self.seed).permutation(plan.num_packs)
        ends = np.cumsum(np.diff(plan.pack_offsets)[order])
        packs = np.sort(order[: int(np.searchsorted(ends, wanted)) + 1])
        owners = np.searchsorted([one.first_pack for one in shards], packs, side="right") - 1
        return [
            replace(shards[owner], number=number, first_pack=pack, num_packs=1)
            for number, (owner, pack) in enumerate(zip(owners, packs.tolist(), strict=True))
        ]


def check_deep(config: PackingConfig) -> None:
    """Raise StageError if a package is not installed that encoding samples again takes: before
    hours are spent on what is then not verified."""
    if config.pack.share_prefixes is not None:
        check_energon()  # makes the rows
    if getattr(config.model, "resize", None) == "torch" and find_spec("torch") is None:
        raise StageError(
            f"--deep resizes images as family {config.model.family} does, with PyTorch, which is "
            "not installed; pip install torch (in a clone: pip install -e '.[train]'), or leave "
            "--deep out"
        )


def verify(
    run: Run, *, deep: bool = False, hash_only: bool = False, drawn: Drawn | None = None
) -> VerifyResult:
    """Check the packed dataset; `deep`: also compare it with the source, and encode every sample
    again. `hash_only`: the bytes of all files, not their content; or else `drawn`: the files beside
    the shards, and packs drawn at random. It opens its artifacts itself, so as not to open damaged
    ones. Raises StageError if there is no complete dataset to check, or the source, which only
    `deep` needs, cannot be read.
    """
    total = VerifyResult()
    try:
        manifest = _require_complete(run)
    except DamagedError as error:
        total.problem(f"{error}", repairable=True)
        return total
    total.num_shards = len(manifest.shards)
    if deep:
        check_deep(run.config)
        try:
            open_sources(run.config)
        except StageError as error:
            message = f"verify --deep needs the source: {error}; verify without --deep does not"
            raise StageError(message) from error
    damage = find_damage(run, STAGES[:-1], shards=hash_only)
    for name, fault in damage.items():
        total.problem(f"{name} {fault}; {REMEDY}", repairable=True)
    if in_the_way := [name for name in damage if not name.startswith(ASIDE)]:
        text = f"the shards were not read, since {in_the_way[0]} is damaged"
        total.problem(text, repairable=True)
        return total
    counts = manifest.counts
    samples, stored = open_index(run), open_plan(run)
    check_layout(run, stored.hash)
    is_whole = not hash_only and drawn is None
    shards = plan_shards(run, samples, stored.packs)
    if drawn is not None:
        shards = drawn.shards(stored.packs, shards)
    own = run.engine.share(shards)
    planned = {shard_file(shard.name): shard.num_packs for shard in shards}
    if is_whole and planned != {line.name: line.packs for line in manifest.shards}:
        total.problem("manifest.json does not list the planned shards with their packs")
    if hash_only:
        total.num_packs, total.num_samples = sum(counts.packs.values()), counts.packed
    else:
        part = {"deep": deep, "is_part": drawn is not None}
        tasks = verify_tasks(run, samples, stored.packs, manifest, own, **part)
        num_packs = sum(shard.num_packs for shard in own)
        with run.unpacked_files(), run.bar("verify", num_packs, "pack") as bar:
            for report in run_tasks(run, verify_shard, tasks, bar.update):
                total.add(report)
    total.num_set_aside = samples.info.num_set_aside + sum(stored.set_aside.values())
    if is_whole:
        _check_each_once(samples, stored.packs, own, total)
        _check_splits(samples, stored.packs, run, total)
        _check_records(samples, manifest, stored.packs, total)
        _check_steps(stored.packs.order, manifest, total)
    if counts.samples != counts.packed + total.num_set_aside:
        total.problem(
            f"manifest.json: {counts.samples} samples are not {counts.packed} packed + "
            f"{total.num_set_aside} set aside"
        )
    return total


def _check_steps(layout: RankLayout | None, manifest: Manifest, total: VerifyResult) -> None:
    """Check the promise of `pack.order.uniform` for each step, from the manifest alone."""
    if layout is None or not layout.uniform:
        return
    for split, shards in itertools.groupby(manifest.shards, attrgetter("split")):
        media = np.concatenate([shard.media_of_packs() for shard in shards])
        total.num_steps += len(media) // layout.num_ranks
        if mixed := layout.mixed_steps(media):
            total.problem(
                f"{mixed:,} steps of split {split} mix packs with and without images, or lack "
                "some, for the ranks of pack.order"
            )


def _check_splits(samples: Index, plan: PackPlan, run: Run, total: VerifyResult) -> None:
    """Check that splits share nothing that keeps samples together; if deep, and if nothing else
    than images and videos does, no image or video by all of its bytes."""
    shares = run.config.output.split
    if len(shares) == 1:
        return
    total.apart = "no groups, images or videos are in two of them"
    hashes: dict[str, list[npt.NDArray[np.uint64]]] = {}
    for split, _, ids in samples_of_splits(plan, shares):
        chosen = np.zeros(samples.info.num_samples, bool)
        chosen[ids] = True
        hashes[split] = [own[chosen[some][rows]] for some, rows, own in shared_contents(samples)]
    _check_apart(hashes, "groups, images, videos or samples", total)
    if total.media_hashes and not run.config.names_groups:
        stored: dict[str, list[npt.NDArray[np.uint64]]] = {}
        for split, own in total.media_hashes:
            stored.setdefault(split, []).append(own)
        total.apart += ", by all bytes"
        _check_apart(stored, "stored images and videos", total)


def _check_apart(
    hashes: Mapping[str, Sequence[npt.NDArray[np.uint64]]], found: str, total: VerifyResult
) -> None:
    """Check that no hash is in two splits."""
    for (one, own), (other, others) in itertools.combinations(hashes.items(), 2):
        if count := count_shared(own, others)[0]:
            total.apart = ""
            total.problem(f"{count:,} {found} are in splits {one} and {other}")


def _check_records(samples: Index, manifest: Manifest, plan: PackPlan, total: VerifyResult) -> None:
    """Check that no record, or turn of one, is in two packed samples, and that all are counted."""
    counts = record_counts(samples, plan.sample_ids)
    total.records = tuple(counts.values())
    if manifest.counts.records != counts:
        total.problem("manifest.json: its records are not those of the index", repairable=True)
    if not total.records:
        return
    found, twice = count_packed(samples, plan.sample_ids)
    if twice or found != counts["packed"]:
        total.problem(f"{twice:,} records, or turns of one, are in more than one sample")


def preview_verify(run: Run) -> str:
    """Describe what `verify` would check. Raises StageError as `verify`."""
    counts = _require_complete(run).counts
    packs = sum(counts.packs.values())
    return f"would check {counts.packed:,} samples in {packs:,} packs"


def _require_complete(run: Run) -> Manifest:
    packing = run.workspace.packing
    if run.workspace.manifest.exists() and not packing.exists():
        raise StageError(
            f"{packing} is missing, and with it the plan that the packs are compared with; copy it "
            "to here as well"
        )
    if not run.workspace.manifest.exists():
        open_index(run)
        open_plan(run)  # where an earlier stage is missing, this says which
    return require_manifest(run.workspace.root)


def _check_each_once(
    samples: Index, plan: PackPlan, shards: Sequence[PlannedShard], total: VerifyResult
) -> None:
    """Check that the plan holds each sample once, and that its samples are in their packs: those
    that were counted, as each pack is compared with its own."""
    is_packed = np.zeros(samples.info.num_samples, bool)
    is_packed[plan.sample_ids] = True
    if len(plan.sample_ids) - int(is_packed.sum()) != plan.info.num_copies:
        total.problem("the plan holds a sample twice")
    sizes = np.diff(plan.pack_offsets)
    planned = sum(sizes[one.first_pack : one.first_pack + one.num_packs].sum() for one in shards)
    if lost := planned - total.num_samples:
        of_damaged_shards = total.num_repairable > 0
        total.problem(f"{lost:,} samples are in no pack", repairable=of_damaged_shards)


def render_result(
    result: VerifyResult, *, deep: bool, hash_only: bool = False, drawn: Drawn | None = None
) -> str:
    """Write the result as a table, with the problems below it."""
    compared = "bytes compared with their hash" if drawn is None else "not compared as a whole"
    read = ", not opened" if hash_only else f", drawn with seed {drawn.seed}" if drawn else ""
    rows = {
        "shards": f"{result.num_shards:,}, {compared}",
        "packs": f"{result.num_packs:,}{read}",
        "samples": f"{result.num_samples:,} packed, {result.num_set_aside:,} set aside",
    }
    if result.records:
        rows["records"] = "{:,} = {:,} in packs + {:,} set aside".format(*result.records)
    if result.apart:
        rows["splits"] = result.apart
    if result.num_steps:
        rows["steps"] = f"{result.num_steps:,}, each of one kind"
    if deep:
        rows["images"] = f"{result.num_images:,}, bytes compared with the source"
        if result.num_videos:
            rows["videos"] = f"{result.num_videos:,}, likewise"
        rows["tokens"] = f"{result.num_tokens:,}, encoded again"
    rows["problems"] = f"{result.num_problems:,}"
    lines = [*(f"{name:<16}{text}" for name, text in rows.items())]
    return "\n".join([*lines, *(f"  {problem}" for problem in result.problems)]) + "\n"


def render_verdict(result: VerifyResult) -> str:
    """Number of problems, and the remedy."""
    others = result.num_problems - result.num_repairable - result.num_in_source
    again = "pack again with another output.path or output.overwrite=true"
    remedies = [
        (result.num_repairable, f"of damaged files: {REMEDY}"),
        (
            result.num_in_source,
            f"of media that are damaged in the source: repair or remove them there, and {again}",
        ),
        (others, f"of shards that are as they were written: {again}, if a problem names no remedy"),
    ]
    return "; ".join(
        [f"{result.num_problems:,} problems", *(f"{n:,} {text}" for n, text in remedies if n)]
    )


def discard(run: Run, *, dry_run: bool = False) -> str:
    """Move damaged files of an output, complete or not, to `_packing/damaged`; returns lines that
    name them. Recorded hashes stay, so that the stages know the files to make again."""
    found = find_damage(run)
    if not found:
        return "nothing is damaged"
    if not dry_run:
        run.workspace.remove_temporaries()
        start_repair(run.workspace, found)
        remove_path(receipt_path(run.workspace.packing, "verify"))
    lines = [f"  {name} {fault}" for name, fault in found.items()]
    where = run.workspace.damaged
    did = f"would move to {where}" if dry_run else f"moved to {where}; run makes them again"
    return "\n".join([f"{len(found):,} files {did}:", *lines])
