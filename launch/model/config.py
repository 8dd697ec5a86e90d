"""The model to train: a checkpoint, or random weights in tiny or other sizes."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from task_encoders.families import FAMILIES, require_family
from task_encoders.field_types import Count, not_bool, one_of
from task_encoders.versions import require

if TYPE_CHECKING:
    import torch

#: Families whose language model is built from megatron-core's layers here.
TRAINED: Final = tuple(name for name, family in FAMILIES.items() if family.megatron_core)

#: The remedy for a model that transformers lacks.
ELSEWHERE: Final = (
    "train it with its own code, on batches as launch/trainers/megatron_lm.py takes them"
)


def transformers_class(family: str) -> Any:
    """Look up transformers' class of a family's models. Raises UnsupportedVersionError if the
    installed transformers is older than the family."""
    import transformers  # takes seconds

    name, since = FAMILIES[family].transformers_name, FAMILIES[family].since
    if since:
        require("transformers", f">={since}", f"the model of {family}")
    return getattr(transformers, f"{name}ForConditionalGeneration")


def tiny_config(
    family: str,
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
    **whole: Any,
) -> Any:
    """Make transformers' config of a family's tiny model, with these fields changed."""
    sizes = FAMILIES[family].tiny
    return transformers_class(family).config_class(
        text_config={**sizes.text, **(text or {})},
        vision_config={**sizes.vision, **(vision or {})},
        **{**sizes.whole, **whole},
    )


def part_of(name: str) -> str:
    """Return the part of a model that a weight belongs to, by its name: vision, projector (the
    tower's mergers) or language."""
    name = name.removeprefix("model.")
    projectors = "merger.", "deepstack_merger_list.", "multi_modal_projector", "embed_vision."
    if name.removeprefix("visual.").startswith(projectors):
        return "projector"
    return "vision" if name.startswith(("visual.", "vision_tower.")) else "language"


class Section(BaseModel):
    """Section of a training configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelConfig(Section):
    """Model section of a training configuration."""

    #: a family that is built from megatron-core's layers here
    family: Annotated[str, one_of(FAMILIES)] = TRAINED[0]
    #: a Hugging Face folder (safetensors); without it random weights
    checkpoint: Path | None = None
    #: sizes of a random model that `text` and `vision` do not give
    preset: Literal["tiny"] = "tiny"
    #: of a random model: other fields of transformers' text config
    text: dict[str, Any] = {}
    #: of a random model: other fields of transformers' vision config
    vision: dict[str, Any] = {}
    #: of a random model: one matrix for both embeddings; without it as in the preset
    tie_word_embeddings: bool | None = None
    #: auto: bfloat16 on CUDA, else float32; the optimizer keeps float32 weights
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    #: auto: the first available of flash_attn_3 (on Hopper), flash_attn, torch_varlen, sdpa; or its
    #: name
    attention: Literal["auto", "flash_attn_3", "flash_attn", "torch_varlen", "sdpa"] = "auto"
    #: megatron-core's fused kernels, on CUDA
    fusions: bool = True
    #: full: keep only each layer's input, and compute the layer again in the backward pass
    recompute: Literal["none", "full"] = "none"
    #: any of vision, projector (the vision tower's merger), language: not trained
    freeze: frozenset[Literal["vision", "projector", "language"]] = frozenset()

    @field_validator("family")
    @classmethod
    def _check_family(cls, family: str) -> str:
        if family not in TRAINED:
            has_model = FAMILIES[family].transformers_name is not None
            remedy = "use python -m launch.train_transformers" if has_model else ELSEWHERE
            raise ValueError(f"{family} is not built from megatron-core's layers here; {remedy}")
        return family

    @model_validator(mode="after")
    def _check(self) -> "ModelConfig":
        if len(self.freeze) == 3:
            raise ValueError("freeze lists all parts, so that nothing would be trained; remove one")
        has_sizes = self.text or self.vision or self.tie_word_embeddings is not None
        if self.checkpoint is not None and has_sizes:
            raise ValueError(
                "text, vision and tie_word_embeddings come from the checkpoint; remove them, or "
                "remove checkpoint"
            )
        return self

    def resolve_dtype(self, device: "torch.device") -> "torch.dtype":
        """Return the dtype of the weights on a device."""
        import torch

        if self.dtype == "auto":
            return torch.bfloat16 if device.type == "cuda" else torch.float32
        return torch.bfloat16 if self.dtype == "bfloat16" else torch.float32

    def build_transformers_config(self) -> Any:
        """Make transformers' config of this model. Raises ValueError if the checkpoint is of
        another family, or a field of `text` or `vision` is not one of transformers'."""
        if self.checkpoint is None:
            return self.random_config()
        found = require_family(str(self.checkpoint))
        if found != self.family:
            raise ValueError(
                f"checkpoint {self.checkpoint} is a {found!r}; set model.family={found}"
            )
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.checkpoint)

    def random_config(
        self, vision: Mapping[str, Any] | None = None, token_ids: Mapping[str, int] | None = None
    ) -> Any:
        """Make transformers' config of the random model, with these fields of the vision config and
        ids."""
        default = transformers_class(self.family).config_class()
        for part in ("text", "vision"):
            known = set(getattr(default, f"{part}_config").to_dict())
            unknown = sorted(set(getattr(self, part)) - known)
            if unknown:
                raise ValueError(
                    f"model.{part} has no field {unknown[0]!r}; choose from: "
                    f"{', '.join(sorted(known))}"
                )
        tied = self.tie_word_embeddings
        whole = {} if tied is None else {"tie_word_embeddings": tied}
        vision = {**(vision or {}), **self.vision}
        return tiny_config(self.family, self.text, vision, **whole, **(token_ids or {}))


class LoraOptions(Section):
    """Low-rank adapters (https://arxiv.org/abs/2106.09685), through peft."""

    rank: Count = 16
    #: adapters are scaled by alpha / rank
    alpha: Count = 32
    #: above a half, adapters would miss most of their input
    dropout: Annotated[float, BeforeValidator(not_bool), Field(ge=0, le=0.5)] = 0.0
    #: matrices of the language model that get adapters, by the last part of their names, such as
    #: q_proj; without it all
    targets: tuple[str, ...] = ()


class TransformersModelConfig(ModelConfig):
    """Model section of `launch.train_transformers`: any family that transformers has."""

    #: a family that transformers has
    family: Annotated[str, one_of(FAMILIES)] = TRAINED[0]
    #: auto: on CUDA in 16 bits flash_attention_2, or torch_varlen where flash-attn is missing; else
    #: sdpa
    attention: Literal[
        "auto",
        "sdpa",
        "torch_varlen",
        "flash_attention_2",
        "flash_attention_3",
        "flex_attention",
        "eager",
    ] = "auto"  # type: ignore[assignment]
    #: train these adapters, and nothing else
    lora: LoraOptions | None = None
    #: shard the weights over the ranks (FSDP2), for models that one device does not hold
    fsdp: bool = False

    @field_validator("family")
    @classmethod
    def _check_family(cls, family: str) -> str:
        if FAMILIES[family].transformers_name is None:
            raise ValueError(f"{family} has no model in transformers; {ELSEWHERE}")
        return family

    @model_validator(mode="after")
    def _check_lora(self) -> "TransformersModelConfig":
        if not self.fusions:
            raise ValueError("fusions exist in launch.train only; remove it")
        if self.lora is not None and self.freeze:
            raise ValueError("lora freezes all other weights already; remove freeze")
        return self
