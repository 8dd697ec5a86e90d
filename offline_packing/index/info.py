"""Content of _packing/index.json: parts, counts and fingerprint of an index; written last."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

from offline_packing.errors import DamagedError, StageError
from offline_packing.storage.files import read_json, seal, to_json, write_atomically
from task_encoders.storage.paths import REMEDY

INDEX_VERSION: Final = 1

#: Content of IndexInfo.common -> from which number and share of all samples on it is warned of,
#: and the warning.
_COMMON: Final = MappingProxyType(
    {
        "copies": (1, 0, "samples repeat an earlier one, such as {!r}"),
        "media": (100, 0.01, "samples show 1 image or video, such as {!r}"),
        "answers": (100, 0.1, "answers are {}"),
    }
)


@dataclass(frozen=True)
class IndexInfo:
    """Content of index.json."""

    fingerprint: dict[str, str | int]
    versions: dict[str, str]
    #: rows of each part, in order
    part_rows: list[int]
    #: samples set aside while measuring, by reason
    set_aside: dict[str, int]
    #: image files that no sample uses
    num_unused_images: int = 0
    #: what samples go without, such as a field with media -> about how many (measure/diagnosis.py)
    lost_fields: dict[str, int] = field(default_factory=dict)
    #: the same -> one of the samples, and what it holds
    lost_examples: dict[str, str] = field(default_factory=dict)
    #: how many samples have the same content, and an example: `copies` of earlier ones, those that
    #: show the image or video that most show (`media`), about those with the most frequent answer
    common: dict[str, tuple[int, str]] = field(default_factory=dict)
    #: sum of num_tokens
    num_tokens: int = 0
    #: conversations that were cut, and the samples they became
    split: dict[str, int] = field(default_factory=dict)
    #: samples left out by source.skip; neither in the index nor set aside
    num_skipped: int = 0
    #: samples with loss weights other than 0 and 1
    num_weighted: int = 0
    #: images and videos of samples of whose bytes only the first count for their hash
    num_part_hashed: int = 0
    #: what the sources' listings warn of
    source_warnings: list[str] = field(default_factory=list)
    #: xxh3_128 of the files in the folders index, set_aside and files
    hashes: dict[str, dict[str, str]] = field(default_factory=dict)
    version: int = INDEX_VERSION

    @property
    def num_samples(self) -> int:
        """Rows of the index."""
        return sum(self.part_rows)

    @property
    def num_set_aside(self) -> int:
        """Samples set aside while measuring."""
        return sum(self.set_aside.values())

    @property
    def num_records(self) -> int:
        """Records of the samples: fewer, if some were cut into several."""
        more = self.split.get("samples", 0) - self.split.get("conversations", 0)
        return self.num_samples - more

    @property
    def splitting(self) -> str:
        """Line that says how many conversations were cut; empty if none was."""
        if not self.split:
            return ""
        return "{conversations:,} were cut between turns into {samples:,} samples".format_map(
            self.split
        )

    @property
    def warnings(self) -> list[str]:
        """A line for each thing that is probably a mistake, as what samples go without."""
        lines = list(self.source_warnings)
        for what, count in sorted(self.lost_fields.items()):
            example = self.lost_examples.get(what)
            such = f", such as {example}" if example else ""
            lines.append(f"{what} (about {count:,} samples{such})")
        if self.num_unused_images:
            lines.append(f"{self.num_unused_images:,} image and video files are used by no sample")
        for what, (least, share, line) in _COMMON.items():
            count, example = self.common.get(what, (0, ""))
            total = self.num_samples if what == "media" else self.num_records
            if count >= max(least, share * total) or 1 < count == total:
                about = "about " if what == "answers" else ""
                lines.append(f"{about}{count:,} of {total:,} {line.format(example)}")
        return lines

    def save(self, path: Path) -> None:
        """Write index.json: from now on the index is complete."""
        write_atomically(path, to_json(seal(asdict(self))))

    @classmethod
    def load(cls, path: Path) -> "IndexInfo | None":
        """Read index.json; None if the index is not complete. Raises StageError if it is damaged,
        or of another format version."""
        content = read_json(path)
        if content is None:
            return None
        if content.get("version") != INDEX_VERSION:
            raise StageError(
                f"{path} has format version {content.get('version')}, this version reads "
                f"{INDEX_VERSION}; measure again with another output.path"
            )
        try:
            info = cls(**content)
        except TypeError as error:
            raise DamagedError(f"{path} is damaged: {error}; {REMEDY}") from error
        if not isinstance(info.hashes, dict) or not isinstance(info.part_rows, list):
            raise DamagedError(f"{path} is damaged; {REMEDY}")
        return info
