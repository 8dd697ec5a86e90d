"""plan: index -> plan. Duplicate keys and over-long samples are set aside, the rest is packed.

_packing/plan/*.npy, plan.json      the plan; sample ids are row numbers of the index
_packing/plan/set_aside.parquet     duplicate_key and overlong, with their details
_packing/plan/summary.txt           the figures, to be shared
_packing/plan/stage.json            fingerprint; written last
"""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from offline_packing import index
from offline_packing.errors import StageError
from offline_packing.files import hash_file, read_json, to_json, write_atomically
from offline_packing.fingerprint import Fingerprint, changed_fields, check_fingerprint
from offline_packing.index import Index, IndexInfo, SetAsideSample
from offline_packing.pack_plan import PackPlan
from offline_packing.stage import Stage, config_fingerprint, listed, without_listings
from offline_packing.summary import render_summary, summarize

logger = logging.getLogger(__name__)


def open_index(stage: Stage) -> Index:
    """The complete index of an output, made with this configuration.

    Raises:
        StageError: there is none, or it was made otherwise.
    """
    workspace = stage.workspace
    info = IndexInfo.load(workspace.index_info)
    if info is None:
        raise StageError(f"no complete index in {workspace.root}; run measure first")
    check_fingerprint(
        without_listings(info.fingerprint),
        config_fingerprint(stage.config),
        artifact=f"the index in {workspace.root}",
        remedy="run measure again with output.overwrite=true, choose another output.path, "
        "or pass --accept-mismatch FIELD",
        accept={field for field in stage.accept_mismatch if not field.endswith(".listing")},
    )
    return Index(workspace.index, info)


def plan(stage: Stage) -> str:
    """Make the plan, or find it complete; returns its summary as text.

    Raises:
        StageError: no index, nothing to pack, over-long samples under on_overlong: error, or
            shards were already written with another plan.
    """
    workspace = stage.workspace
    samples = open_index(stage)
    fingerprint = _fingerprint(stage)
    found = read_json(workspace.plan_info)
    if found is not None and not changed_fields(found["fingerprint"], fingerprint):
        packs = PackPlan.load(workspace.plan)
        logger.info("plan: complete (%s packs), nothing to do", f"{packs.num_packs:,}")
        return _summary(stage, samples, packs, found["set_aside"])
    _discard_previous(stage, {} if found is None else found["fingerprint"], fingerprint)
    packs, aside = make_plan(stage, samples)
    packs.save(workspace.plan)
    index.write_table(workspace.plan / "set_aside.parquet", index.set_aside_table(aside))
    reasons = Counter(sample.reason for sample in aside)
    text = _summary(stage, samples, packs, reasons)
    write_atomically(workspace.plan / "summary.txt", text.encode())
    document = {"fingerprint": fingerprint, "hash": _hash(stage), "set_aside": dict(reasons)}
    write_atomically(workspace.plan_info, to_json(document))
    return text


def check_plan(stage: Stage, info: Mapping[str, Any]) -> None:
    """Raise StageError if a plan's stage.json says that it was made otherwise."""
    check_fingerprint(
        info["fingerprint"],
        _fingerprint(stage),
        artifact=f"the plan in {stage.workspace.root}",
        remedy="run plan again",
    )


def preview_plan(stage: Stage) -> str:
    """The summary of the plan that `plan` would make; nothing is written."""
    samples = open_index(stage)
    packs, aside = make_plan(stage, samples)
    return _summary(stage, samples, packs, Counter(sample.reason for sample in aside))


def make_plan(stage: Stage, samples: Index) -> tuple[PackPlan, list[SetAsideSample]]:
    """Plan without writing: the plan (its ids are rows of the index), and what it leaves out."""
    from offline_packing.plan import plan_packs  # its compiled parts take time to import

    pack = stage.config.pack
    names = samples.table("source_id", "key", "key_hash")
    num_tokens = samples.array("num_tokens")
    duplicates = find_duplicates(names)
    kept = np.delete(np.arange(len(num_tokens)), duplicates)
    try:
        packs = plan_packs(
            num_tokens[kept],
            pack.seq_length,
            strategy=pack.strategy,
            seed=pack.seed,
            pad_multiple=pack.pad_multiple,
        )
    except ValueError as error:
        raise StageError(f"plan: {error}") from error
    packs = replace(
        packs, sample_ids=kept[packs.sample_ids], set_aside_ids=kept[packs.set_aside_ids]
    )
    details = {int(row): ("duplicate_key", "an earlier sample has this key") for row in duplicates}
    limit = f"seq_length {pack.seq_length}"
    if pack.pad_multiple > 1:
        limit += f" (in multiples of {pack.pad_multiple})"
    for row in packs.set_aside_ids.tolist():
        details[row] = ("overlong", f"{num_tokens[row]} tokens > {limit}")
    aside = _set_aside(stage, names, details)
    overlong = [sample for sample in aside if sample.reason == "overlong"]
    if overlong and pack.on_overlong == "error":
        raise StageError(
            f"sample {overlong[0].key!r} has {overlong[0].detail} ({len(overlong):,} such samples);"
            " set pack.on_overlong: set_aside, or a longer pack.seq_length"
        )
    if packs.num_packs == 0:
        reasons = Counter(samples.info.set_aside) + Counter(sample.reason for sample in aside)
        raise StageError(
            f"nothing to pack in {stage.workspace.root}; set aside: {listed(reasons.items())}; "
            "check source.path and source.task"
        )
    return packs, aside


def find_duplicates(names: pa.Table) -> npt.NDArray[np.int64]:
    """Rows whose key an earlier row of the same source has, ascending.

    Equal hashes are found by sorting; the few rows that have one are compared by their keys.
    """
    hashes = names["key_hash"].to_numpy()
    order = np.argsort(hashes, kind="stable")
    equal = hashes[order[1:]] == hashes[order[:-1]]
    suspects = np.union1d(order[1:][equal], order[:-1][equal])
    seen: set[tuple[int, str]] = set()
    repeated: list[int] = []
    chosen = names.take(suspects).select(["source_id", "key"]).to_pylist()
    for row, name in zip(suspects.tolist(), chosen, strict=True):
        identity = (name["source_id"], name["key"])
        if identity in seen:
            repeated.append(row)
        seen.add(identity)
    return np.array(repeated, dtype=np.int64)


def _set_aside(
    stage: Stage, names: pa.Table, details: Mapping[int, tuple[str, str]]
) -> list[SetAsideSample]:
    rows = sorted(details)
    chosen = names.take(np.array(rows, dtype=np.int64)).select(["source_id", "key"]).to_pylist()
    return [
        SetAsideSample(name["key"], stage.config.source[name["source_id"]].path, *details[row])
        for row, name in zip(rows, chosen, strict=True)
    ]


def _summary(stage: Stage, samples: Index, packs: PackPlan, plan_reasons: Mapping[str, int]) -> str:
    reasons = Counter(samples.info.set_aside) + Counter(plan_reasons)
    lengths = samples.array("num_tokens")[packs.sample_ids]
    return render_summary(summarize(stage.config, samples.info, lengths, packs, reasons))


def _fingerprint(stage: Stage) -> Fingerprint:
    pack = stage.config.pack.model_dump()
    return {
        "index": hash_file(stage.workspace.index_info),
        **{f"pack.{name}": value for name, value in pack.items()},
    }


def _discard_previous(stage: Stage, found: Fingerprint, wanted: Fingerprint) -> None:
    """Make way for a new plan. Planning anew is free until shards are written from a plan."""
    workspace = stage.workspace
    if workspace.write.exists() and not stage.config.output.overwrite:
        check_fingerprint(
            found,
            wanted,
            artifact=f"the plan of the shards in {workspace.root}",
            remedy="set output.overwrite=true to replace the shards, or choose another output.path",
        )
    workspace.discard_plan()


def _hash(stage: Stage) -> str:
    """What identifies which samples form which pack."""
    names = ("sample_ids.npy", "pack_offsets.npy")
    return "-".join(hash_file(stage.workspace.plan / name) for name in names)
