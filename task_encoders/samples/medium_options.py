"""Options of one image or one video, as Qwen's messages have them.

    {"type": "video", "video": "a.mp4", "video_start": 3, "video_end": 7.5, "fps": 1}
    {"type": "image", "image": "a.jpg", "max_pixels": 50176}

Each takes the place of its counterpart in a family's own rule (`FamilyEncoder.for_medium`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class MediumOptions:
    """What a sample says of one medium; None: what its family says."""

    fps: float | None = None
    #: frames that are taken, an even number; not together with fps
    nframes: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    #: limits of an image, or of a frame
    min_pixels: int | None = None
    max_pixels: int | None = None
    #: seconds; frames between them are taken
    video_start: float | None = None
    video_end: float | None = None

    @property
    def given(self) -> dict[str, float]:
        """The options that are set, by name."""
        each = ((name, getattr(self, name)) for name in _NAMES)
        return {name: value for name, value in each if value is not None}

    def __bool__(self) -> bool:
        return self != AS_FAMILY


_NAMES: Final = tuple(field.name for field in fields(MediumOptions))
_OF_IMAGES: Final = ("min_pixels", "max_pixels")
_IN_SECONDS: Final = ("video_start", "video_end")
#: Options of Qwen's messages that no family here reads.
_UNREAD: Final = ("total_pixels", "resized_height", "resized_width")
_KNOWN: Final = (*_NAMES, *_UNREAD)
#: A medium without options.
AS_FAMILY: Final = MediumOptions()


def read_options(part: Mapping[str, Any], kind: str) -> MediumOptions:
    """Read the options of an "image" or a "video" among other fields. Raises ValueError, which
    names the option."""
    if part.keys().isdisjoint(_KNOWN):
        return AS_FAMILY
    found: dict[str, Any] = {}
    for name in _KNOWN:
        value = part.get(name)
        if value is None:
            continue
        if name in _UNREAD or (kind == "image" and name not in _OF_IMAGES):
            raise ValueError(f"option {name!r} of a medium ({kind}) is not packed; leave it out")
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        is_whole = name not in ("fps", *_IN_SECONDS)
        above = -math.inf if name in _IN_SECONDS else int(name in ("min_frames", "max_frames"))
        if not above < number < math.inf or (is_whole and number % 1):
            what = f"{'whole ' * is_whole}number" + f" above {above}" * (above >= 0)
            raise ValueError(f"option {name!r} of a medium is {value!r}, not a {what}"[:200])
        found[name] = int(number) if is_whole else number
    if "fps" in found and "nframes" in found:
        raise ValueError("a video has both options 'fps' and 'nframes'; leave out one")
    for what in ("frames", "pixels"):
        least, most = found.get(f"min_{what}", 0), found.get(f"max_{what}", math.inf)
        if least > most:
            raise ValueError(f"option min_{what} {least} > max_{what} {most}")
    return MediumOptions(**found)


def options_json(each: Sequence[MediumOptions]) -> list[dict[str, float] | None]:
    """Return options as JSON holds them; null for a medium without any."""
    return [one.given or None for one in each]
