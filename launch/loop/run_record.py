"""The settings that a resumed run must share with the one that wrote its checkpoint.

Every field of the configuration is compared but those in `_FREE`: a new field is guarded until
someone decides otherwise. Fields in `_FIXED` decide which weights there are and where the loader
stands, so no other value can continue; any other may differ if it is named.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from launch.config import LaunchConfig
from launch.data.packed_data import PackedData
from launch.loop.plan import TrainPlan
from offline_packing.errors import ConfigError, MismatchError

#: Fields, or whole sections, that do not change what is trained. The content of the packs is
#: compared instead of their paths.
_FREE: Final = (
    "checkpoint",
    "data.data_prefix",
    "data.encode_threads",
    "data.num_workers",
    "data.path",
    "data.pixel_transport",
    "data.processor",
    "metrics",
    "model.attention",
    "model.recompute",
    "output",
    "parallel.context",
    "validation",
)
_FIXED: Final = (
    "data.micro_batch_size",
    "data.online",
    "data.order",
    "data.packs",
    "data.repeat",
    "model.built_by",
    "model.dtype",
    "model.family",
    "model.fsdp",
    "model.freeze",
    "model.lora",
    "model.preset",
    "model.text",
    "model.tie_word_embeddings",
    "model.vision",
    "parallel.tensor",
    "train.seed",
)
#: Packs of a step, which follow from the batch size and the number of ranks.
_STEP: Final = "packs_per_step"


def run_record(config: LaunchConfig, data: PackedData, plan: TrainPlan) -> dict[str, Any]:
    """Settings that a checkpoint keeps of its run: plain values by dotted name."""
    fields = dict(_flat(config.model_dump(mode="json")))
    return {
        **{name: value for name, value in sorted(fields.items()) if not _is_in(name, _FREE)},
        "model.built_by": type(config.model).__name__,
        "data.packs": {"path": config.data.path, "content_hash": data.content_hash},
        _STEP: plan.packs_per_step,
    }


def check_same_run(
    was: Mapping[str, Any], now: Mapping[str, Any], accept: Collection[str], checkpoint: object
) -> list[str]:
    """Compare the records of a checkpoint and of the run that resumes from it.

    Returns:
        A line for each accepted field that differs.

    Raises:
        MismatchError: other fields differ; a line for each.
        ConfigError: an accepted name is not a field, or one that must be the same.
    """
    valid = {name for name in {*was, *now} if name not in _FIXED}
    for name in sorted(set(accept) - valid):
        why = "must be the same" if name in _FIXED else "no such field"
        raise ConfigError(f"--accept-mismatch {name}: {why}; valid: {', '.join(sorted(valid))}")
    differing = [n for n in sorted({*was, *now}) if _identity(was, n) != _identity(now, n)]
    if any(name.startswith("batch.") for name in differing):
        differing = [name for name in differing if name != _STEP]  # it follows
    lines = {
        name: f"{name} was {_shown(was.get(name))}, is {_shown(now.get(name))}"
        for name in differing
    }
    refused = [name for name in lines if name not in accept]
    if refused:
        said = [_head(checkpoint, refused), *(lines[name] for name in refused)]
        raise MismatchError("\n  ".join(said))
    return list(lines.values())


def _head(checkpoint: object, refused: Collection[str]) -> str:
    elsewhere = "or start a new run in another output.path"
    if fixed := [name for name in refused if name in _FIXED]:
        remedy = f"{', '.join(fixed)} must be the same to resume: restore it, {elsewhere}"
    else:
        options = " ".join(f"--accept-mismatch {name}" for name in refused)
        remedy = f"restore them, add {options} if that is meant, {elsewhere}"
    return f"checkpoint {checkpoint} was written by a run with other settings; {remedy}:"


def _flat(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Fields of all sections by dotted name; sets, whose order differs, become sorted lists."""
    for section, fields in content.items():
        for name, value in fields.items():
            yield f"{section}.{name}", sorted(value) if name == "freeze" else value


def _is_in(name: str, fields: Collection[str]) -> bool:
    return name in fields or name.partition(".")[0] in fields


def _identity(record: Mapping[str, Any], name: str) -> Any:
    value = record.get(name)
    return value["content_hash"] if name == "data.packs" and value else value


def _shown(value: Any) -> str:
    if isinstance(value, Mapping) and "content_hash" in value:
        return f"those of {value['path']} ({value['content_hash'][:8]})"
    return repr(value)
