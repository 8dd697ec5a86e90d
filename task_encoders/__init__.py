"""Samples and packs, and how they become tensors.

In data order: `versions` (of training's packages), `settings` (environment), `samples`, `packs/`
(a pack on disk), `media/`, `text/`, `records/` (JSON -> sample), `sample_encoder` (its arrays),
`families/` (one module per model family), `concatenate` (samples -> row), `energon_samples`,
`model_inputs` (row -> model arguments), `rows/` (sub-samples -> row), `packed_task_encoder`, and
`loading/` (a folder of packs -> loader).

Names below are imported on first use: measuring and planning need neither torch nor Energon.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from task_encoders.versions import require_supported

if TYPE_CHECKING:
    from task_encoders.concatenate import split_row as split_row
    from task_encoders.energon_samples import PackedBatch as PackedBatch
    from task_encoders.families import build_sample_encoder as build_sample_encoder
    from task_encoders.loading.packed_dataset import get_packed_loader as get_packed_loader
    from task_encoders.loading.packed_dataset import (
        get_packed_train_dataset as get_packed_train_dataset,
    )
    from task_encoders.loading.packed_dataset import (
        get_packed_val_dataset as get_packed_val_dataset,
    )
    from task_encoders.loading.packed_folder import PackedFolder as PackedFolder
    from task_encoders.loading.schedule import InTurn as InTurn
    from task_encoders.loading.schedule import RankSampler as RankSampler
    from task_encoders.loading.schedule import ScheduledLoader as ScheduledLoader
    from task_encoders.model_inputs import flash_attention_kwargs as flash_attention_kwargs
    from task_encoders.model_inputs import normalise_pixels as normalise_pixels
    from task_encoders.model_inputs import required_pad_multiple as required_pad_multiple
    from task_encoders.model_inputs import to_packed_seq_params as to_packed_seq_params
    from task_encoders.model_inputs import to_transformers_kwargs as to_transformers_kwargs
    from task_encoders.packed_task_encoder import PackedTaskEncoder as PackedTaskEncoder
    from task_encoders.packed_task_encoder import Qwen2VLTaskEncoder as Qwen2VLTaskEncoder
    from task_encoders.settings import PackingSettings as PackingSettings

_NAMES_IN = {
    "concatenate": ("split_row",),
    "energon_samples": ("PackedBatch",),
    "families": ("build_sample_encoder",),
    "loading.packed_dataset": (
        *("get_packed_loader", "get_packed_train_dataset", "get_packed_val_dataset"),
    ),
    "loading.packed_folder": ("PackedFolder",),
    "loading.schedule": ("InTurn", "RankSampler", "ScheduledLoader"),
    "model_inputs": (
        *("flash_attention_kwargs", "normalise_pixels", "required_pad_multiple"),
        *("to_packed_seq_params", "to_transformers_kwargs"),
    ),
    "packed_task_encoder": ("PackedTaskEncoder", "Qwen2VLTaskEncoder"),
    "settings": ("PackingSettings",),
}
_MODULE_OF = {name: module for module, names in _NAMES_IN.items() for name in names}
__all__ = list(_MODULE_OF)
_OF_ENERGON = ("energon_samples", "loading.packed_dataset", "packed_task_encoder")


def import_on_first_use(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package: `modules` says in which of its modules a name is."""

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return get


_imported = import_on_first_use(__name__, _MODULE_OF)


def __getattr__(name: str) -> Any:
    if _MODULE_OF.get(name) in _OF_ENERGON:
        require_supported("megatron-energon")
    return _imported(name)
