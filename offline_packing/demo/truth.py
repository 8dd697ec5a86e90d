"""What is known about a demo dataset; kept beside it as `truth.json`, the last file written."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

TRUTH_NAME = "truth.json"
#: Raise it when the same seed gives other files than before.
GENERATOR_VERSION = 1


@dataclass(frozen=True)
class ImageTruth:
    """One picture on disk."""

    #: (width, height) in pixels of the upright picture, after its EXIF orientation is applied.
    size: tuple[int, int]
    #: EXIF orientation tag: 1 (no tag written), 3, 6 or 8.
    orientation: int
    #: `{"color", "shape", "center": [x, y]}` in upright pixels; empty for charts and documents.
    objects: list[dict[str, Any]]


@dataclass(frozen=True)
class PlantedFault:
    """A sample that must be set aside, and why."""

    folder: str
    key: str
    reason: str


@dataclass(frozen=True)
class DemoTruth:
    """Everything a demo or a test may check a demo dataset against."""

    path: Path
    seed: int
    num_samples: int
    version: int = GENERATOR_VERSION
    #: Samples per folder, planted faults included; they add up to num_samples.
    num_samples_by_folder: dict[str, int] = field(default_factory=dict)
    num_text_only: int = 0
    #: Bytes of all files but truth.json.
    num_bytes: int = 0
    #: By path relative to the dataset.
    images: dict[str, ImageTruth] = field(default_factory=dict)
    set_aside: list[PlantedFault] = field(default_factory=list)

    @property
    def exif_rotated(self) -> list[str]:
        """Relative paths of the pictures that are stored rotated."""
        return [name for name, image in self.images.items() if image.orientation != 1]

    def to_bytes(self) -> bytes:
        """JSON without the path, so that equal datasets in two places have equal bytes."""
        record = asdict(self)
        del record["path"]
        record["exif_rotated"] = self.exif_rotated
        return orjson.dumps(record, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)

    @classmethod
    def read(cls, path: Path) -> "DemoTruth":
        """The truth of the dataset at `path`; FileNotFoundError or ValueError if there is none."""
        try:
            record = orjson.loads((path / TRUTH_NAME).read_bytes())
            del record["exif_rotated"]
            images = {
                name: ImageTruth(tuple(image["size"]), image["orientation"], image["objects"])
                for name, image in record.pop("images").items()
            }
            faults = [PlantedFault(**fault) for fault in record.pop("set_aside")]
            return cls(path=path, images=images, set_aside=faults, **record)
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"'{path / TRUTH_NAME}' is not the truth of a demo dataset") from error
