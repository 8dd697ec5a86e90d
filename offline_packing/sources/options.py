"""The options of a source: the `source` section of the configuration.

A format declares its own options, besides the common ones, in a subclass, `Source.Options`; the
configuration takes it whole.
"""

from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from offline_packing.errors import ConfigError
from offline_packing.sources.fields import FieldMap
from task_encoders.field_types import LocalOrRemotePath, not_bool

#: More copies of a sample than this are taken for a typing error.
MAX_REPEAT: Final = 1000


def listed(value: Any) -> Any:
    """One text as a list of it."""
    return [value] if isinstance(value, str) else value


def _check_fields(fields: dict[str, str]) -> dict[str, str]:
    try:
        FieldMap(fields)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return fields


class SourceOptions(BaseModel):
    """Where samples come from; what every format understands."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    #: how they are stored: a name in SOURCES, or "module:Class" of a Source of your own
    format: str
    #: a folder or a file, here or of a storage that fsspec knows
    path: LocalOrRemotePath
    #: what they are trained as
    task: Literal["captioning", "vqa", "bmr"]
    #: put before every key; needed to tell several sources apart (default: the path's last part,
    #: of a single source nothing)
    name: str | None = None
    #: outputs whose samples, packed or set aside, are left out: these are new data
    skip: Annotated[tuple[LocalOrRemotePath, ...], BeforeValidator(listed)] = ()
    #: how often each sample is used; a fraction uses part of the samples once more
    repeat: Annotated[float, BeforeValidator(not_bool), Field(gt=0, le=MAX_REPEAT)] = 1
    #: share of all tokens that this source is to have, in proportion to the other sources' weights
    weight: Annotated[float, BeforeValidator(not_bool), Field(gt=0)] | None = None
    #: train the answers of records with prompts as captions, which are trained without a prompt
    ignore_prompts: bool = False

    def format_options(self) -> dict[str, Any]:
        """What samples depend on besides format, path and task, without defaults."""
        values = {
            name: getattr(self, name) for name in type(self).model_fields if name not in _APART
        }
        fields = type(self).model_fields
        return {name: value for name, value in values.items() if value != fields[name].default}

    def reads_within(self, other: "SourceOptions") -> bool:
        """Whether another source reads all that this one reads, in the same way."""
        path, around = Path(self.path).resolve(), Path(other.path).resolve()
        same = (self.format, self.format_options()) == (other.format, other.format_options())
        return same and path.is_relative_to(around)


#: Options that do not change the samples themselves.
_APART: Final = frozenset(("format", "path", "task", "name", "repeat", "weight"))


class FieldOptions(SourceOptions):
    """Options of formats whose records may use other field names."""

    #: where a record keeps what a sample needs: {caption: "captions[0].content"}
    fields: Annotated[dict[str, str], AfterValidator(_check_fields)] = {}


class MediaOptions(SourceOptions):
    """Options of formats whose records name files of images and videos."""

    #: image paths are relative to this folder instead of the file's own
    image_root: LocalOrRemotePath | None = None


class FileOptions(FieldOptions, MediaOptions):
    """Both."""
