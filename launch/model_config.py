"""Which model is trained: a checkpoint, or random weights in the sizes of a preset."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import torch
from pydantic import BaseModel, ConfigDict, model_validator

from launch.packed_attention import BACKENDS

#: Ids of Qwen's published checkpoints, and of the built-in vocabulary.
QWEN_TOKEN_IDS: Final[Mapping[str, int]] = {
    "vision_start_token_id": 151_652,
    "vision_end_token_id": 151_653,
    "image_token_id": 151_655,
    "video_token_id": 151_656,
}
VOCAB_SIZE: Final = 151_936


def _text(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int = VOCAB_SIZE
) -> dict[str, Any]:
    """A text config; the rotary sections are 1/8, 3/16 and 3/16 of a head, as in every Qwen2-VL."""
    head_dim = hidden // heads
    sections = [head_dim // 8, head_dim * 3 // 16, head_dim * 3 // 16]
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": sections,
        },
    }


@dataclasses.dataclass(frozen=True, slots=True)
class Preset:
    """Sizes of a model: fields of transformers' text and vision configs."""

    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    tie_word_embeddings: bool


#: family -> name -> sizes. "tiny" has the real vocabulary and trains on a CPU.
PRESETS: Final[Mapping[str, Mapping[str, Preset]]] = {
    "qwen2_vl": {
        "tiny": Preset(
            _text(64, 128, 2, 4, 2),
            {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
            tie_word_embeddings=True,
        ),
        "2b": Preset(_text(1536, 8960, 28, 12, 2), {"hidden_size": 1536}, tie_word_embeddings=True),
        "7b": Preset(
            _text(3584, 18944, 28, 28, 4, vocab=152_064),
            {"hidden_size": 3584},
            tie_word_embeddings=False,
        ),
    },
    "qwen2_5_vl": {
        "tiny": Preset(
            _text(64, 128, 2, 4, 2),
            {
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_heads": 2,
                "out_hidden_size": 64,
                "fullatt_block_indexes": [1],
            },
            tie_word_embeddings=True,
        ),
        "3b": Preset(
            _text(2048, 11008, 36, 16, 2),
            {"hidden_size": 1280, "out_hidden_size": 2048, "tokens_per_second": 2},
            tie_word_embeddings=True,
        ),
        "7b": Preset(
            _text(3584, 18944, 28, 28, 4, vocab=152_064),
            {"hidden_size": 1280, "out_hidden_size": 3584, "tokens_per_second": 2},
            tie_word_embeddings=False,
        ),
    },
}


@dataclasses.dataclass(frozen=True, slots=True)
class TransformersClasses:
    """transformers' classes of a model family."""

    config: Any
    model: Any
    vision_tower: Any


def transformers_classes(family: str) -> TransformersClasses:
    """The classes of a family in PRESETS (imported here: transformers takes seconds)."""
    if family == "qwen2_vl":
        from transformers.models import qwen2_vl as module

        return TransformersClasses(
            module.Qwen2VLConfig,
            module.Qwen2VLForConditionalGeneration,
            module.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel,
        )
    from transformers.models import qwen2_5_vl

    return TransformersClasses(
        qwen2_5_vl.Qwen2_5_VLConfig,
        qwen2_5_vl.Qwen2_5_VLForConditionalGeneration,
        qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel,
    )


class ModelConfig(BaseModel):
    """Model section of a training config."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    family: Literal["qwen2_vl", "qwen2_5_vl"] = "qwen2_vl"
    #: folder of a Hugging Face checkpoint (safetensors); None: random weights
    checkpoint: Path | None = None
    #: without a checkpoint: sizes, a name in PRESETS[family]
    preset: str = "tiny"
    #: without a checkpoint: fields of transformers' text config that differ from the preset
    text: dict[str, Any] = {}
    #: the same for the vision config
    vision: dict[str, Any] = {}
    #: without a checkpoint: one matrix for words in and out (None: as the preset)
    tie_word_embeddings: bool | None = None
    #: of the weights; the optimizer keeps a float32 copy. auto: bfloat16 on CUDA, else float32
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    #: a name in packed_attention.BACKENDS
    attention: str = "auto"
    #: full: keep only the input of every layer, and compute the rest again in the backward pass
    recompute: Literal["none", "full"] = "none"
    #: parts that are not trained: the projector is the vision tower's merger
    freeze: frozenset[Literal["vision", "projector", "language"]] = frozenset()

    @model_validator(mode="after")
    def _check(self) -> "ModelConfig":
        if self.attention not in BACKENDS:
            raise ValueError(f"attention {self.attention!r} is not one of {', '.join(BACKENDS)}")
        if len(self.freeze) == 3:
            raise ValueError("freeze holds all three parts, nothing would be trained; remove one")
        if self.checkpoint is not None:
            if self.text or self.vision or self.tie_word_embeddings is not None:
                raise ValueError(
                    "text, vision and tie_word_embeddings come from the checkpoint; remove them, "
                    "or remove checkpoint"
                )
            return self
        presets = PRESETS[self.family]
        if self.preset not in presets:
            raise ValueError(
                f"preset {self.preset!r} of {self.family} is not known; choose one of: "
                f"{', '.join(presets)}"
            )
        return self

    def resolve_dtype(self, device: torch.device) -> torch.dtype:
        """The dtype of the weights on this device."""
        if self.dtype == "auto":
            return torch.bfloat16 if device.type == "cuda" else torch.float32
        return torch.bfloat16 if self.dtype == "bfloat16" else torch.float32

    def build_transformers_config(self) -> Any:
        """transformers' config of this model.

        Raises:
            ValueError: the checkpoint is of another family, or a field of `text` or `vision` is
                not one of transformers'.
        """
        config_class = transformers_classes(self.family).config
        if self.checkpoint is not None:
            return _read_config(self.checkpoint, self.family, config_class)
        preset = PRESETS[self.family][self.preset]
        sub_configs = config_class().sub_configs
        for part in ("text", "vision"):
            known = {field.name for field in dataclasses.fields(sub_configs[f"{part}_config"])}
            unknown = sorted(set(getattr(self, part)) - known)
            if unknown:
                raise ValueError(
                    f"model.{part} has no field {unknown[0]!r}; choose from: "
                    f"{', '.join(sorted(known))}"
                )
        tie = self.tie_word_embeddings
        return config_class(
            text_config={**preset.text, **self.text},
            vision_config={**preset.vision, **self.vision},
            tie_word_embeddings=preset.tie_word_embeddings if tie is None else tie,
            **QWEN_TOKEN_IDS,
        )


def _read_config(folder: Path, family: str, config_class: Any) -> Any:
    """The config of a checkpoint folder."""
    from transformers import PreTrainedConfig

    if not (folder / "config.json").is_file():
        raise ValueError(
            f"checkpoint {folder} has no config.json; give a folder that holds a Hugging Face "
            "checkpoint"
        )
    values, _ = PreTrainedConfig.get_config_dict(folder)
    found = values.get("model_type")
    if found != family:
        raise ValueError(f"checkpoint {folder} is a {found!r}; set family: {found}")
    return config_class.from_pretrained(folder)
