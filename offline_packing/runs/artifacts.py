"""Index and plan of a run, opened: complete, undamaged, and made with this configuration.

What each stage is made with is a flat mapping from a field's name to its value, see
storage/receipts.py: an artifact made with another one is refused by the name of the field.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from typing import Any, Final

from offline_packing.config.packing import PackingConfig
from offline_packing.errors import DamagedError, StageError
from offline_packing.index.table import Index, IndexInfo
from offline_packing.layouts import LAYOUTS
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.runs.run import PlanReceipt, Run, Workspace, open_encoder
from offline_packing.storage.files import hash_bytes, hash_file, to_json
from offline_packing.storage.receipts import Fingerprint, check_inputs, hash_of, load_receipt
from task_encoders.settings import explain_hash
from task_encoders.storage.paths import REMEDY
from task_encoders.versions import VERSION

logger = logging.getLogger(__name__)

#: Packages whose version may change tokens, sizes or bytes.
_LIBRARIES = ("numpy", "orjson", "pillow", "pyarrow", "tiktoken")
_PLAN_FILES: Final = (
    "sample_ids.npy",
    "pack_offsets.npy",
    "set_aside_ids.npy",
    "set_aside_reasons.npy",
    "plan.json",
    "set_aside.parquet",
    "summary.txt",
)
#: Files that say which samples form which pack; the last where samples share prefixes.
_PACKS: Final = tuple(
    f"_packing/plan/{name}.npy" for name in ("sample_ids", "pack_offsets", "branches")
)


@dataclass(frozen=True)
class StoredPlan:
    """A plan on disk: its packs, and its receipt."""

    packs: PackPlan
    receipt: PlanReceipt

    @property
    def hash(self) -> str:
        """Hash of which samples form which pack."""
        return self.receipt.facts.hash

    @property
    def set_aside(self) -> Mapping[str, int]:
        """Samples set aside while planning, by reason."""
        return dict(self.receipt.facts.set_aside)


def open_index(run: Run) -> Index:
    """Return the complete index of an output. Raises StageError: there is none with these
    settings."""
    workspace = run.workspace
    info = IndexInfo.load(workspace.packing)
    if info is None:
        raise StageError(f"no complete index in {workspace.root}; run measure first")
    check_index(run, info.fingerprint)
    return Index(workspace.index, info)


def check_index(run: Run, found: Fingerprint) -> None:
    """Raise StageError if what an index was made with does not match the configuration; sources
    may have changed."""
    check_inputs(
        {name: value for name, value in found.items() if not name.endswith(".listing")},
        config_fingerprint(run.config),
        artifact=f"the index in {run.workspace.root}",
        remedy="run measure again with output.overwrite=true, choose another output.path, "
        "or pass --accept-mismatch FIELD",
        accept={field for field in run.accepted_fields if not field.endswith(".listing")},
        explain=partial(explain_hash, run.workspace.root, run.config.model),
    )


def open_plan(run: Run) -> StoredPlan:
    """Return the complete plan of an output, made with these settings of its index. Raises
    StageError if there is none, it is damaged, or it was made with other settings."""
    receipt = run.workspace.read_plan()
    if receipt is None:
        raise StageError(f"no complete plan in {run.workspace.root}; run plan first")
    check_plan(run, receipt.inputs)
    return load_plan(run.workspace, receipt)


def check_plan(run: Run, found: Fingerprint) -> None:
    """Raise StageError if what a plan was made with does not match the configuration."""
    written = (
        "give the settings that the shards were written with, or rewrite them: run with "
        "output.overwrite=true, or with another output.path"
    )
    check_inputs(
        found,
        plan_fingerprint(run),
        artifact=f"the plan in {run.workspace.root}",
        remedy=written if run.workspace.written_with() else "run plan again",
    )


def plan_files(config: PackingConfig) -> tuple[str, ...]:
    """Return the names of a plan's files, relative to the output."""
    trees = () if config.pack.share_prefixes is None else ("branches.npy",)
    return tuple(f"_packing/plan/{name}" for name in (*_PLAN_FILES, *trees))


def load_plan(workspace: Workspace, receipt: PlanReceipt) -> StoredPlan:
    """Return the plan of a receipt. Raises DamagedError if its files do not hold the planned
    packs."""
    root, files = workspace.root, receipt.files
    try:
        names = [name for name in files if name.endswith((".npy", "json"))]
        differ = [str(root / name) for name in names if hash_file(root / name) != files[name]]
        if differ or plan_identity(files) != receipt.facts.hash:
            raise StageError(f"{' or '.join(differ) or root} differs from what was planned")
        return StoredPlan(PackPlan.load(workspace.plan), receipt)
    except OSError as error:
        raise DamagedError(f"{error.filename or error} is missing or no file; {REMEDY}") from error
    except (ValueError, StageError) as error:
        raise DamagedError(f"{str(error).removesuffix('; plan again')}; {REMEDY}") from error


def plan_fingerprint(run: Run) -> Fingerprint:
    """Return the settings that a plan depends on."""
    config, measured = run.config, load_receipt(run.workspace.packing, "measure")
    fields: dict[str, Any] = {
        "index": "" if measured is None else hash_of(measured.files),
        "output.layout": config.output.layout,
    }
    pack = config.pack.model_dump(mode="json", exclude={"max_set_aside"})
    for name, value in pack.items():
        is_plain = isinstance(value, str | int)
        fields[f"pack.{name}"] = value if is_plain else to_json(value).decode()
    for i, source in enumerate(config.source):
        if source.repeat != 1:
            fields[f"source.{i}.repeat"] = str(source.repeat)
        if source.weight:
            fields[f"source.{i}.weight"] = str(source.weight)
        for path in source.trained_by:
            fields[f"source.{i}.skip.{path}"] = hash_bytes(to_json(run.trained[path]))
    if len(config.output.split) > 1:
        shares = config.output.split.items()
        fields["output.split"] = ", ".join(f"{name} {share}" for name, share in shares)
        fields["output.split_seed"] = config.output.split_seed
    return fields


def plan_identity(files: Mapping[str, str]) -> str:
    """Return the file hashes that identify which samples form which pack."""
    return "-".join(files[name] for name in _PACKS if name in files)


def key_prefix(run: Run, plan_hash: str) -> str:
    """Return the prefix of the keys of an output's packs: as configured, or as the shards of this
    plan have it. Otherwise it is a hash like '3f9c01ab_', which is the same for the same files of
    the source and the same plan."""
    if run.config.output.key_prefix is not None:
        return run.config.output.key_prefix
    started = run.workspace.written_with()
    if started.get("plan") == plan_hash and "output.key_prefix" in started:
        return str(started["output.key_prefix"])
    info = IndexInfo.load(run.workspace.packing)
    made_with = info.fingerprint if info is not None else {}
    listings = [made_with.get(f"source.{i}.listing") for i, _ in enumerate(run.config.source)]
    return f"{hash_bytes(to_json([listings, plan_hash]))[:8]}_"


def shards_fingerprint(run: Run, plan_hash: str) -> Fingerprint:
    """Return the settings that the shards of a plan depend on besides index and source."""
    output = run.config.output
    return {
        "plan": plan_hash,
        "output.layout": output.layout,
        "output.media": output.media,
        "output.packs_per_shard": output.packs_per_shard,
        "output.max_shard_bytes": output.max_shard_bytes or 0,
        "output.split": ", ".join(f"{name} {share:g}" for name, share in output.split.items()),
        "output.key_prefix": key_prefix(run, plan_hash),
        "output.shards_per_folder": output.shards_per_folder or 0,
        "output.pretokenize": 0,  # as before it was taken out, so that shards stay the same
    }


def generation_of(fingerprint: Fingerprint) -> str:
    """Return 16 hexadecimal digits of `shards_fingerprint`, which each pack of these shards holds.
    A reader that finds other digits opened an output that was written again in the meantime. They
    do not depend on the layout, on folders, or on the places of media: the packs are the same."""
    same = ("output.layout", "output.media", "output.shards_per_folder")
    own = {name: value for name, value in fingerprint.items() if name not in same}
    return hash_bytes(to_json(own))[:16]


def check_layout(run: Run, plan_hash: str, found: Fingerprint | None = None) -> None:
    """Raise StageError if the shards are of another plan or layout."""
    check_inputs(
        found or run.workspace.written_with(),
        shards_fingerprint(run, plan_hash),
        artifact=f"the shards in {run.workspace.root}",
        remedy="give the settings that they were written with, write again with "
        "output.overwrite=true, or choose another output.path",
    )


def config_fingerprint(config: PackingConfig) -> Fingerprint:
    """Return the part of the index's fingerprint that the configuration alone determines."""
    fields: dict[str, str | int] = {
        f"model.{name}": value for name, value in open_encoder(config.model).fingerprint.items()
    }
    for i, (source, prefix) in enumerate(zip(config.source, config.key_prefixes(), strict=True)):
        fields[f"source.{i}.format"] = source.format
        fields[f"source.{i}.task"] = source.task
        fields[f"source.{i}.key_prefix"] = prefix
        for name, value in source.format_options().items():
            if isinstance(value, dict):  # a manifest holds them sorted
                value = dict(sorted(value.items()))
            text = ", ".join(value) if isinstance(value, tuple) else str(value)
            fields[f"source.{i}.{name}"] = text
    if LAYOUTS[config.output.layout].has_rules():
        fields["index.layout"] = config.output.layout
    return fields | config.cut_for


@cache
def library_versions() -> dict[str, str]:
    """Return the versions of this package and of the libraries involved."""
    return {"offline-packing": VERSION, **{name: metadata.version(name) for name in _LIBRARIES}}


def warn_of_versions(found: Mapping[str, str], artifact: str) -> None:
    """Log which libraries have another version than when an artifact was made."""
    for name, version in library_versions().items():
        if found.get(name, version) != version:
            logger.warning("%s was made with %s %s, now %s", artifact, name, found[name], version)
