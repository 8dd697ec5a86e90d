"""One module per model family, and `FAMILIES`.

A family owns all that sets it apart: sizes, limits, normalisation, frames, template, tokens,
positions. `encoder` is what all share, `qwen_vl` what Qwen's do. May import: samples, media, text,
sample_encoder, field_types.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import (
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from task_encoders.families.cost import ModelCost, cost_of_checkpoint
from task_encoders.families.family import Family
from task_encoders.families.llava_1_5 import LLAVA_1_5
from task_encoders.families.llava_onevision_1_5 import LLAVA_ONEVISION_1_5
from task_encoders.families.options import ModelOptions
from task_encoders.families.qwen2_vl import QWEN2_5_VL, QWEN2_VL
from task_encoders.families.qwen3_vl import QWEN3_5, QWEN3_VL
from task_encoders.field_types import one_of
from task_encoders.media.video import VideoSettings
from task_encoders.sample_encoder import SampleEncoder
from task_encoders.text.hub import require_hub
from task_encoders.text.qwen_vocabulary import BUILTIN
from task_encoders.versions import require_supported

#: A model family is one module, and its name here.
FAMILIES: Final[Mapping[str, Family]] = {
    QWEN2_VL.name: QWEN2_VL,
    QWEN2_5_VL.name: QWEN2_5_VL,
    QWEN3_VL.name: QWEN3_VL,
    QWEN3_5.name: QWEN3_5,
    LLAVA_ONEVISION_1_5.name: LLAVA_ONEVISION_1_5,
    LLAVA_1_5.name: LLAVA_1_5,
}

#: Options that not every family has.
_FAMILY_OPTIONS: Final = frozenset(name for one in FAMILIES.values() for name in one.defaults)


class ModelSettings(ModelOptions):
    """`ModelOptions` of a known family, with its defaults filled in.

    Also takes `video=VideoSettings(…)` for the options of videos.

    Raises:
        ValueError (pydantic.ValidationError): unknown family or option, a bad value, or an option
            that the family does not have.
    """

    family: Annotated[str, one_of(FAMILIES)] = ModelOptions.model_fields["family"].default

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        values = {name: value for name, value in given.items() if value is not None}
        values |= _from_video(values.pop("video", None))
        family = FAMILIES.get(values.get("family", cls.model_fields["family"].default))
        if family is None:
            return values
        for name in _FAMILY_OPTIONS.intersection(values):
            has_it = name in family.defaults
            if not values[name] and has_it and not isinstance(values[name], bool):
                raise ValueError(f"{name} {values[name]} must be above 0")
            if values[name] and not has_it:
                raise ValueError(f"family {family.name} has no {name}; remove it")
        return values

    @model_validator(mode="after")
    def _fill_in(self) -> "ModelSettings":
        for name, default in FAMILIES[self.family].defaults.items():
            if name not in self.model_fields_set:
                self.__dict__[name] = default  # frozen for everybody else
        if self.min_pixels > self.max_pixels:
            raise ValueError(
                f"min_pixels {self.min_pixels} > max_pixels {self.max_pixels}; lower min_pixels"
            )
        if self.video_fps:
            _ = self.video
        return self

    @model_serializer(mode="wrap")
    def _store(self, store: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """An `added` option that has its default is not stored; it is where the family's default is
        another."""
        stored: dict[str, Any] = store(self)
        for name, default in FAMILIES[self.family].defaults.items():
            if default != type(self).model_fields[name].default:
                stored.setdefault(name, getattr(self, name))
        return stored


def _from_video(video: VideoSettings | None) -> dict[str, Any]:
    """The options that are set in it."""
    if video is None:
        return {}
    named = {
        "video_fps": video.fps,
        "video_min_frames": video.min_frames,
        "video_max_frames": video.max_frames,
        "video_min_pixels": video.min_pixels,
        "video_max_pixels": video.max_pixels,
        "video_max_tokens": video.max_tokens,
        "max_video_frames": video.max_file_frames,
    }
    return {name: value for name, value in named.items() if value}


def model_cost(model: ModelSettings) -> ModelCost:
    """What a model's samples cost: of the checkpoint that `model.processor` names, or, where that
    holds no config.json of a model, of the family's usual one."""
    checkpoint = None if model.processor == BUILTIN else cost_of_checkpoint(model.processor)
    return checkpoint or FAMILIES[model.family].cost


def build_sample_encoder(
    model: ModelSettings | str | None = None, processor: str | None = None, **options: Any
) -> SampleEncoder:
    """The sample encoder of a model.

    Args:
        model: its settings whole; or a name in FAMILIES, with the others.
        processor: "builtin" (the Qwen vocabulary, no hub), a checkpoint folder, or a hub name.
        options: the other fields of ModelSettings: min_pixels, max_pixels, video, …

    Raises:
        ValueError: see ModelSettings; a checkpoint of another family, one whose chat template
            cannot be cut, or one to be downloaded while the hub is out of reach.
    """
    if not isinstance(model, ModelSettings):
        named = {"family": model, "processor": processor}
        given = {name: value for name, value in named.items() if value is not None}
        model = ModelSettings.model_validate({**given, **options})
    elif processor or options:
        raise TypeError("settings given twice: whole, and by name")
    require_hub(model.processor)
    _check_family(model)
    return FAMILIES[model.family].build(model)


def family_of_processor(processor: str) -> str | None:
    """The family that a checkpoint's config.json names, where it has one of a family here."""
    if processor == BUILTIN:
        return None
    require_supported("transformers")
    from transformers import PreTrainedConfig

    try:
        config, _ = PreTrainedConfig.get_config_dict(processor)
    except OSError:
        return None
    name = str(config.get("model_type")).removesuffix("_moe")
    found = (one.name for one in FAMILIES.values() if name == (one.model_type or one.name))
    return next(found, None)


def _check_family(model: ModelSettings) -> None:
    """Refuse a checkpoint whose config.json names a family that gives samples other lengths."""
    found = family_of_processor(model.processor)
    if found is None:
        return
    lengths = [getattr(FAMILIES[name].build, "LENGTHS_OF", None) for name in (found, model.family)]
    if lengths[0] != lengths[1]:
        raise ValueError(
            f"checkpoint {model.processor!r} is of family {found}, not {model.family}; set "
            f"model.family={found}, or name a checkpoint of {model.family}"
        )
