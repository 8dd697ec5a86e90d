"""The options that every family of models has; a family's own are a subclass in its module."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from task_encoders.field_types import Count, LocalOrRemotePath, Values
from task_encoders.media.video_file import MAX_VIDEO_FRAMES
from task_encoders.text.qwen_vocabulary import BUILTIN


def beside_lengths(default: Any) -> Any:
    """An option that changes pixels or positions but no length. No artifact contains pixels or
    positions, so it is not in the fingerprint."""
    return Field(default, json_schema_extra={"changes_lengths": False})


class ModelOptions(BaseModel):
    """The `model:` section of a configuration; the same values must be used in training.

    A family declares its own options, with their defaults, in a subclass, `Family.Options`;
    `families.model_options` makes the right one.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False
    )

    #: a name in FAMILIES
    family: str
    #: "builtin", a checkpoint folder, or a hub name
    processor: LocalOrRemotePath = "builtin"
    #: an image with more pixels in its file, or a video with more than a quarter of them in a
    #: frame, is set aside (default: Pillow's bomb threshold)
    max_image_pixels: Count | None = None
    #: a video with more frames in its file is set aside
    max_video_frames: Count = MAX_VIDEO_FRAMES
    #: which answers of a conversation carry loss, if their messages do not say otherwise
    loss_on: Literal["all", "last"] = "all"
    #: variables of the chat template, such as {enable_thinking: false} or {add_vision_id: true}
    template_options: Values = ()

    def require_checkpoint(self) -> None:
        """Refuse the built-in vocabulary, which is Qwen's."""
        if self.processor == BUILTIN:
            raise ValueError(
                f"family {self.family} has no built-in vocabulary; name a checkpoint folder or a "
                "hub name as processor"
            )

    @classmethod
    def own(cls) -> list[str]:
        """Names of the options that not every family has."""
        return [name for name in cls.model_fields if name not in ModelOptions.model_fields]

    @classmethod
    def changes_lengths(cls, name: str) -> bool:
        """Whether an option belongs in the fingerprint of what was measured."""
        return not cls.model_fields[name].json_schema_extra

    def stored(self, name: str) -> str | int:
        """An option as a fingerprint holds it. Its declared type decides: a family's default may be
        200 where a configuration gives 200.0, and both are the same option."""
        value: float | str | None = getattr(self, name)
        if type(self).model_fields[name].annotation is float:
            return f"{value:g}"
        assert not isinstance(value, float)
        return 0 if value is None else value
