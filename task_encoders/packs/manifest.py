"""manifest.json in a folder of packs: their content, and the settings they were made with.
offline_packing.runs.manifest writes it; packs written by others have none.
"""

import base64
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from task_encoders.field_types import Count, NonNegative, first_problem
from task_encoders.storage.paths import REMEDY, plain_name

NAME: Final = "manifest.json"

#: Name of a file in the folder of the file that names it; and of a split, which is part of others.
FileName = Annotated[str, AfterValidator(plain_name)]
SplitName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+$")]

#: Error for packs of another generation than the reader opened: what was found, its generation, and
#: the one opened.
WRITTEN_AGAIN: Final = (
    "{} is of generation {}, not {} as when it was opened: the output was written again while it "
    "was read; start this run again, and write to another output.path while packs are read"
)


class ManifestError(ValueError):
    """A manifest that cannot be read."""


class _Model(BaseModel):
    """Frozen; fields of later versions are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class PackColumns(NamedTuple):
    """A value per pack, (num_packs,) each."""

    #: 1 with images, 2 with videos, 3 with both, 0 with neither
    media: npt.NDArray[np.uint8]
    #: forward operations of the vision tower, and of the language model
    tower: npt.NDArray[np.float64]
    language: npt.NDArray[np.float64]

    @property
    def cost(self) -> npt.NDArray[np.float64]:
        """Operations of both."""
        return self.tower + self.language


class ShardLine(_Model):
    """A shard, and how much is in it."""

    name: FileName
    split: SplitName
    packs: NonNegative
    samples: NonNegative
    #: of its rows without padding: a prefix that samples share counts once
    tokens: NonNegative
    #: with a hash of them, and one of the shard's fragment in `_packing/write/`
    bytes: NonNegative
    xxh3_128: str
    fragment_xxh3_128: str
    #: a digit per pack: 1 with images, 2 with videos, 3 with both, 0 with neither
    media: str = ""
    #: forward operations of the vision tower and of the language model of each pack: base64 of
    #: little-endian float32 (packs, 2)
    flops: str = ""

    def media_of_packs(self) -> npt.NDArray[np.uint8]:
        """Return the digits of `media`, (packs,)."""
        return np.frombuffer(self.media.encode(), np.uint8) - ord("0")

    def flops_of_packs(self) -> npt.NDArray[np.float64]:
        """Return the numbers in `flops`, (packs, 2)."""
        return np.frombuffer(base64.b64decode(self.flops), "<f4").reshape(-1, 2).astype(np.float64)


class Counts(_Model):
    """Totals."""

    samples: NonNegative
    packed: NonNegative
    set_aside: dict[str, NonNegative]
    #: of all rows without padding: a prefix that samples share counts once
    tokens: NonNegative
    #: by split
    packs: dict[SplitName, NonNegative]
    #: records read, packed and set aside, if samples were made of several
    records: dict[str, NonNegative] = {}
    #: images and videos that splits know by size and first bytes only, since these were not all
    #: read; each as often as samples show it
    media_hashed_in_part: NonNegative = 0


class Manifest(_Model):
    """Content of a folder of packs, and the settings it was made with."""

    #: 2: samples share prefixes (`pack.share_prefixes`), which readers of version 1 do not know
    version: Literal[1, 2]
    task: str
    layout: str
    seq_length: Count
    pad_multiple: Count
    counts: Counts
    shards: tuple[ShardLine, ...]
    #: 16 hexadecimal digits, also in each pack; others where packs of another plan, or other shards
    #: of the same, are written in their place
    generation: str
    #: set if some answers weigh neither 0 nor 1
    loss_weights: Literal["fractional"] | None = None
    #: what samples were measured with; see offline_packing.runs.artifacts
    fingerprint: dict[str, str | int]
    config: dict[str, Any]
    #: hash of the plan's stage.json
    plan: str
    #: of all above: changes with the packs
    content_hash: str
    library_versions: dict[str, str]
    #: hashes of the layout's own files, by name
    metadata: dict[FileName, str]

    def _repr_html_(self) -> str:
        """Show the manifest in a notebook."""
        rows = {
            "packs": ", ".join(f"{split} {n:,}" for split, n in self.counts.packs.items()),
            "seq_length": f"{self.seq_length:,}",
            "samples": f"{self.counts.samples:,}, of which {self.counts.packed:,} are packed",
            "tokens": f"{self.counts.tokens:,}",
            "task": self.task,
            "layout": self.layout,
            "shards": f"{len(self.shards):,}",
            **{f"set aside: {reason}": f"{n:,}" for reason, n in self.counts.set_aside.items()},
        }
        return html_table("Manifest", rows)

    @property
    def has_mixture(self) -> bool:
        """Whether shares of the sources change over the packs (`pack.mixture`)."""
        return bool(self.config.get("pack", {}).get("mixture"))

    @property
    def order(self) -> Mapping[str, Any]:
        """Return the options of `pack.order`; {} if there are none."""
        return self.config.get("pack", {}).get("order") or {}

    def is_padded_to(self, multiple: int) -> bool:
        """Tell whether packs have room for samples that are padded to a multiple."""
        return self.pad_multiple % multiple == 0

    def total(self, what: Literal["packs", "samples", "tokens"], split: str = "train") -> int:
        """Return an amount in all shards of a split."""
        return sum(getattr(shard, what) for shard in self.shards if shard.split == split)


def read_manifest(folder: Any) -> Manifest | None:
    """Read the manifest in a folder, a Path or Energon's EPath; None if there is none. Raises
    ManifestError."""
    path = (Path(folder) if isinstance(folder, str) else folder) / NAME
    if not path.is_file() and not (isinstance(path, Path) and path.is_dir()):
        return None
    try:
        manifest = Manifest.model_validate_json(path.read_text())
        _ = manifest.order and int(manifest.order["num_ranks"])  # readers look into `config`
        return manifest
    except ValidationError as error:
        why = first_problem(error)
    except (AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        why = str(error)
    raise ManifestError(f"{path} is damaged ({why}); {REMEDY}")


def written_again(folder: Any, opened: str) -> str | None:
    """Return a line that says that the output in a folder is not of the generation that a reader
    opened; asked where reading fails. None: it is, or nobody can tell."""
    if not opened:
        return None
    try:
        manifest = read_manifest(folder)
    except (ManifestError, OSError):
        return None
    if manifest is None:
        return (
            f"{folder} has no manifest.json: the output was removed, or is being written again, "
            "while it was read; when it is complete, start this run again, and write to another "
            "output.path while packs are read"
        )
    if manifest.generation == opened:
        return None
    return WRITTEN_AGAIN.format(folder, manifest.generation or "another version", opened)


def html_table(title: str, rows: Mapping[str, object]) -> str:
    """Write a small HTML table: a caption, and a row for each name and its value."""
    lines = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th>'
        f'<td style="text-align:left">{escape(str(value))}</td></tr>'
        for name, value in rows.items()
    )
    return f"<table><caption>{escape(title)}</caption>{lines}</table>"
