"""One module per model family, and `FAMILIES`.

A family owns all that sets it apart: sizes, limits, normalisation, frames, template, tokens,
positions. All share `base`. May import: samples, media, text,
sample_encoder, field_types.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, SerializeAsAny

from task_encoders.families.base.cost import ModelCost, cost_of_checkpoint
from task_encoders.families.base.family import Family, FamilyEncoder, ModelOptions
from task_encoders.families.gemma4 import GEMMA4, GEMMA4_UNIFIED
from task_encoders.families.glm4v import GLM4V, GLM46V
from task_encoders.families.internvl3 import INTERNVL3
from task_encoders.families.llava_1_5 import LLAVA_1_5
from task_encoders.families.llava_onevision_2 import LLAVA_ONEVISION_2
from task_encoders.families.mistral3 import MISTRAL3
from task_encoders.families.qwen2_vl import LLAVA_ONEVISION_1_5, QWEN2_5_VL, QWEN2_VL
from task_encoders.families.qwen3_vl import QWEN3_5, QWEN3_VL
from task_encoders.field_types import invalid
from task_encoders.samples import SampleError, SourceSample, Turn
from task_encoders.text.qwen_vocabulary import BUILTIN
from task_encoders.text.tokenizer import checkpoint_json, require_hub

#: A model family is one module, and its name here.
FAMILIES: Final[Mapping[str, Family]] = {
    family.name: family
    for family in (
        *(QWEN2_VL, QWEN2_5_VL, QWEN3_VL, QWEN3_5),
        *(LLAVA_ONEVISION_1_5, LLAVA_ONEVISION_2, LLAVA_1_5),
        *(GLM4V, GLM46V, GEMMA4, GEMMA4_UNIFIED, MISTRAL3, INTERNVL3),
    )
}

#: The family of configurations that name none.
DEFAULT_FAMILY: Final = QWEN2_VL.name

#: A typical sample. Every encoder writes it once: a tokenizer that lacks a token of the template is
#: refused at once, and forked processes need not cut the template.
_QUESTION: Final = SourceSample("question", "vqa", (Turn("<image>\nWhat?", "A cat."),), ("a",))


def model_options(**options: Any) -> ModelOptions:
    """Make the options of a model, as its family declares them.

    Args:
        options: `family`, a name in FAMILIES, and fields of its Options; None is the default.

    Raises:
        ValueError (pydantic.ValidationError): unknown family or option, a bad value, or an option
            that the family does not have.
    """
    given = {name: value for name, value in options.items() if value is not None}
    given = {"family": DEFAULT_FAMILY, **given}
    family = given["family"]
    if not isinstance(family, str) or family not in FAMILIES:
        message = f"not a known name; choose one of: {', '.join(FAMILIES)}"
        raise invalid("model", "family", family, message)
    declared = FAMILIES[family].Options
    valid = ", ".join(declared.model_fields)
    for name in [name for name in given if name not in declared.model_fields]:
        if any(name in other.Options.model_fields for other in FAMILIES.values()):
            raise invalid("model", name, given[name], f"family {family} has no {name}; remove it")
        message = f"not an option of family {family}; valid: {valid}"
        raise invalid("model", name, given[name], message, kind="extra_forbidden", valid=valid)
    return declared.model_validate(given)


def change_options(model: ModelOptions, **changes: Any) -> ModelOptions:
    """Return a model's options with some of them changed; None changes nothing.

    Options that change no length, and that another family may lack, are left out at their default.
    """
    kept = {
        name: value
        for name, value in model.model_dump().items()
        if model.changes_lengths(name) or value != type(model).model_fields[name].default
    }
    return model_options(**kept | {n: value for n, value in changes.items() if value is not None})


#: A field of a configuration that holds the options of a model.
AnyModelOptions = SerializeAsAny[
    Annotated[
        ModelOptions,
        BeforeValidator(lambda one: model_options(**one) if isinstance(one, Mapping) else one),
    ]
]


def model_cost(model: ModelOptions) -> ModelCost:
    """Return the cost of a model's samples: of the checkpoint in `model.processor`, or of the
    family's usual model if that folder holds no config.json of a model."""
    checkpoint = None if model.processor == BUILTIN else cost_of_checkpoint(model.processor)
    return checkpoint or FAMILIES[model.family].cost


def build_sample_encoder(
    model: ModelOptions | str | None = None, processor: str | None = None, **options: Any
) -> FamilyEncoder:
    """Build the sample encoder of a model.

    Args:
        model: its settings whole; or a name in FAMILIES, with the others.
        processor: "builtin" (the Qwen vocabulary, no hub), a checkpoint folder, or a hub name.
        options: the other fields of ModelOptions: min_pixels, max_pixels, …

    Raises:
        ValueError: see ModelOptions; control tokens that texts must not spell, or that the
            vocabulary lacks; a checkpoint of another family, one whose chat template
            cannot be cut or writes tokens that its tokenizer lacks, or one to be downloaded
            while the hub is out of reach.
    """
    if not isinstance(model, ModelOptions):
        model = model_options(**{"family": model, "processor": processor, **options})
    elif processor or options:
        raise TypeError("settings given twice: whole, and by name")
    require_hub(model.processor)
    name, found = _model_type(model.processor), family_of_processor(model.processor)
    if name is not None and found != model.family:
        what, remedy = f"family {found}", f"set model.family={found}"
        if found is None:
            what, remedy = f"model_type {name}", _remedy(name)
        raise ValueError(
            f"checkpoint {model.processor!r} is of {what}, not {model.family}; {remedy}, or name a "
            f"checkpoint of {model.family}"
        )
    encoder = FAMILIES[model.family].build(model)  # type: ignore[call-arg]
    for token in model.control_tokens:
        encoder.tokenizer.special_id(token)
        if token in encoder.written_tokens:
            raise ValueError(
                f"model.control_tokens: {token!r} marks media, ends a text, or is written by the "
                "chat template; in a text it would be taken for that: leave it out"
            )
    with suppress(SampleError):  # not every template takes images
        encoder.tokenize(_QUESTION, [(56, 56)])
    return encoder


def family_of_processor(processor: str) -> str | None:
    """Return the family that a checkpoint's config.json names, None if there is none here. Of
    several families with that model type, return the one whose processor the checkpoint has."""
    model_type = _model_type(processor)
    found = [one for one in FAMILIES.values() if model_type in one.model_types]
    if len(found) < 2:
        return found[0].name if found else None
    for name in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        kind = checkpoint_json(processor, name).get("processor_class")
        if kind is not None:
            found = [one for one in found if one.processor == kind] or found
            break
    return found[0].name


def pixel_limits_of(processor: str) -> dict[str, int]:
    """Return `min_pixels` and `max_pixels` of a checkpoint's images, as far as it names them."""
    whole = checkpoint_json(processor, "processor_config.json").get("image_processor")
    found = whole or checkpoint_json(processor, "preprocessor_config.json")
    size = found.get("size") or {}
    edges = {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}
    limits = {name: found.get(name) or edge for name, edge in edges.items()}
    return {name: limit for name, limit in limits.items() if limit}


def require_family(processor: str) -> str:
    """Return the family of a checkpoint. Raises ValueError if there is none."""
    require_hub(processor)
    family = family_of_processor(processor)
    if family is None:
        name = _model_type(processor)
        found = "has no config.json that is within reach" if name is None else f"is a {name!r}"
        raise ValueError(f"{processor} {found}; {_remedy(name)}")
    return family


def _remedy(model_type: str | None) -> str:
    """Name the remedy for a checkpoint whose model type no family has."""
    if model_type == "internvl_chat":
        return "take the checkpoint in transformers' form, whose name ends in -hf"
    return f"the families are {', '.join(FAMILIES)}"


def _model_type(processor: str) -> str | None:
    """Return `model_type` of a checkpoint's config.json, without the suffix of mixtures of experts;
    None if there is none."""
    name = checkpoint_json(processor, "config.json").get("model_type")
    return name.removesuffix("_moe") if isinstance(name, str) else None
