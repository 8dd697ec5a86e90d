"""An entry of FAMILIES: a family's name, its options, what builds its encoder, its models."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from task_encoders.families.base.cost import ModelCost, cost_of_sizes
from task_encoders.families.base.encoder import FamilyEncoder
from task_encoders.families.base.options import ModelOptions

#: Prefixes of tensor names in published checkpoints: model and visual; model.language_model and
#: model.visual, as in transformers' memory; or language_model.model and vision_tower.
TensorNames = Literal["plain", "nested", "llava"]


def language_sizes(
    hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, **others: Any
) -> dict[str, Any]:
    """A text config of transformers: the sizes that each has, and others."""
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **others,
    }


@dataclass(frozen=True, slots=True)
class Preset:
    """Sizes of a model with random weights: fields of transformers' text and vision configs."""

    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    #: fields of the whole config: ids of special tokens, tie_word_embeddings
    whole: Mapping[str, Any]

    def cost(self, name: str) -> ModelCost:
        """The cost of this model, called `name`."""
        return cost_of_sizes(name, self.text, self.vision)


@dataclass(frozen=True, slots=True)
class Family:
    """A model family, as its own module declares it."""

    name: str
    #: its options, with their defaults
    Options: type[ModelOptions]
    #: its encoder's class, called with the options alone. Raises ValueError where these or the
    #: checkpoint do not fit
    build: type[FamilyEncoder]
    #: what its usual model costs, used where no checkpoint says otherwise
    cost: ModelCost
    #: what transformers' classes of its model begin with; None: it has none
    transformers_name: str | None
    #: what the config.json of its checkpoints calls it, where that is not its own name
    other_names: tuple[str, ...] = ()
    #: transformers' class of its processor, where several families have one model type
    processor: str = ""
    #: the first transformers whose model takes its batches, where that is not the oldest accepted
    since: str = ""
    #: how its published checkpoints name tensors
    tensor_names: TensorNames = "plain"
    #: models to train without a checkpoint, by name
    presets: Mapping[str, Preset] = field(default_factory=dict)
    #: whether `launch` builds its language model of megatron-core's layers
    megatron_core: bool = False

    @property
    def model_types(self) -> tuple[str, ...]:
        """Accepted values of `model_type` in config.json."""
        return self.other_names or (self.name,)
