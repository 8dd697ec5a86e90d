"""Settings of packs from the environment, and the errors of packs that a reader cannot train.

    OFFLINE_PACKED_DATA=1   the dataset holds packs
    OFFLINE_PACKING_VQA=1   ... of VQA samples
    OFFLINE_PACKING_BMR=1   ... of multi-turn and mixed samples; with neither, of captioning samples

A pack's task comes, in this order, from its own `meta.task`, from the dataset's
`subflavors.offline_packing`, and from the variables. Variables that contradict the first two stop
the run: training captions as dialogues is a mistake nobody sees in a loss curve.
"""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from task_encoders.packs.manifest import ManifestError, read_manifest

PACKED: Final = "OFFLINE_PACKED_DATA"
VQA: Final = "OFFLINE_PACKING_VQA"
BMR: Final = "OFFLINE_PACKING_BMR"

#: Variables to set, by the task of the packs.
ENVIRONMENT_OF_TASK: Final = {
    "captioning": f"{PACKED}=1 (and neither {VQA} nor {BMR})",
    "vqa": f"{PACKED}=1 {VQA}=1",
    "bmr": f"{PACKED}=1 {BMR}=1",
}

#: Remedy where something that is not a pack is read as one.
NO_PACKS: Final = (
    f"{PACKED}=1, but {{}} holds no packs; set {PACKED}=0 to train it unpacked, or point the task "
    "encoder at a folder written by offline-packing"
)

#: Error of fractional loss weights, for a trainer.
FRACTIONS: Final = (
    "{} holds loss weights other than 0 and 1, which the loss of {} does not take; train with "
    "launch/train.py, or pack without these weights"
)

#: Error of samples that share prefixes, where ordinary attention would train branches without
#: their trunk.
TREES: Final = (
    "{} holds samples that share prefixes; train it with launch.train or "
    "launch.train_transformers, and without data.online, or with transformers' Trainer, TRL or "
    "LLaMA-Factory (PackedTaskEncoder(trees=True)), or pack without pack.share_prefixes"
)

#: Fields of a sample encoder's fingerprint that are hashes of a checkpoint's files.
HASHES: Final = ("tokenizer", "chat_template")
#: Fields of a sample encoder's fingerprint that it lacks where they are the default.
OWN_FIELDS: Final = (
    *("chat_template", "control_tokens", "loss_on", "outer_video_tags"),
    "empty_thoughts",
)


class PackingSettingsError(ValueError):
    """The environment contradicts itself or the data. One line, naming the variable to set."""


@dataclass(frozen=True, slots=True)
class PackingSettings:
    """Description of the data in the environment."""

    packed: bool
    vqa: bool = False
    bmr: bool = False

    def __post_init__(self) -> None:
        if self.vqa and self.bmr:
            raise PackingSettingsError(
                f"{VQA}=1 and {BMR}=1 exclude each other; set one of them to 0"
            )
        if (self.vqa or self.bmr) and not self.packed:
            name = VQA if self.vqa else BMR
            raise PackingSettingsError(f"{name}=1 needs packs; set {PACKED}=1 or {name}=0")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> "PackingSettings":
        """Read the variables. Raises PackingSettingsError on any value but unset, 0 and 1."""
        environ = os.environ if environ is None else environ
        values = {name: environ.get(name) or "0" for name in (PACKED, VQA, BMR)}  # "" is unset
        for name, value in values.items():
            if value not in ("0", "1"):
                raise PackingSettingsError(
                    f"{name}={value!r} is not accepted; set it to 1, 0 or nothing"
                )
        return cls(*(value == "1" for value in values.values()))

    def resolve_task(
        self, meta_task: str | None, subflavor_task: str | None = None, *, blend: bool = False
    ) -> str:
        """Return the task of a pack.

        In a blend of datasets `OFFLINE_PACKED_DATA=1` alone is enough, since one environment cannot
        name several tasks; a task variable that is set must still agree.

        Raises:
            PackingSettingsError: packs read without `OFFLINE_PACKED_DATA=1` (they would train
                across sample boundaries), or variables that contradict the data.
        """
        declared = meta_task or subflavor_task
        if declared is not None and declared not in ENVIRONMENT_OF_TASK:
            raise PackingSettingsError(
                f"the data declare task {declared!r}; valid: {', '.join(ENVIRONMENT_OF_TASK)}"
            )
        if blend:
            remedy = f"{PACKED}=1 alone (neither {VQA} nor {BMR}): enough for a blend of datasets"
        else:
            remedy = ENVIRONMENT_OF_TASK[declared] if declared else f"{PACKED}=1"
        if not self.packed:
            raise PackingSettingsError(f"the dataset holds packs; set {remedy}")
        named = "vqa" if self.vqa else "bmr" if self.bmr else "captioning"
        if declared is None:
            return named
        if declared == named or (blend and not (self.vqa or self.bmr)):
            return declared
        raise PackingSettingsError(
            f"the dataset holds {declared} packs but the environment says {named}; set {remedy}"
        )


def describe_change(name: str, values: Any, *models: Mapping[str, Any]) -> tuple[str, str]:
    """Describe two values of a fingerprint's field; hashes by two models' options ({}: unknown)."""
    name = name.removeprefix("model.")
    if name not in HASHES:
        was, now = ("the default" if one is None else repr(one) for one in values)
        return f"{name} {was}", now
    named = "the {name} of model.family={family} and model.processor={processor}"
    was, now = (named.format(name=name, **{"family": "", "processor": "", **one}) for one in models)
    return was if models[0] and was != now else f"another {name}", now


def explain_hash(root: Any, options: Iterable[tuple[str, Any]], name: str) -> str | None:
    """Describe a change of a checkpoint's files since `root` was packed; None: another field."""
    if name.removeprefix("model.") not in HASHES:
        return None
    manifest = None
    with suppress(ManifestError):
        manifest = read_manifest(root)
    was = manifest.config.get("model", {}) if manifest else {}
    return "{} was {}, is {}".format(name, *describe_change(name, (), was, dict(options)))
