"""manifest.json beside packs: their content, and the settings they were made with.
offline_packing.runs.manifest writes it; packs written by others have none.
"""

from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from task_encoders.field_types import added

NAME: Final = "manifest.json"


class ManifestError(ValueError):
    """A manifest that cannot be read."""


class _Model(BaseModel):
    """Frozen; fields of later versions are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class ShardLine(_Model):
    """A shard, and how much is in it."""

    name: str
    split: str
    packs: int
    samples: int
    tokens: int
    #: with a hash of them, and one of the shard's fragment in `_packing/write/`
    bytes: int
    xxh3_128: str
    fragment_xxh3_128: str


class Counts(_Model):
    """Totals over all epochs."""

    samples: int
    packed: int
    set_aside: dict[str, int]
    tokens: int
    #: by split
    packs: dict[str, int]


class Manifest(_Model):
    """Content of a folder of packs, and the settings it was made with."""

    version: Literal[1]
    task: str
    layout: str
    seq_length: int
    pad_multiple: int
    counts: Counts
    shards: tuple[ShardLine, ...]
    #: by split, the packs of each epoch, where each has packs of its own
    epochs: dict[str, tuple[int, ...]] = added({})
    #: set if some answers weigh neither 0 nor 1
    loss_weights: Literal["fractional"] | None = added(None)
    #: what samples were measured with; see offline_packing.runs.artifacts
    fingerprint: dict[str, str | int]
    config: dict[str, Any]
    #: hash of the plan's stage.json
    plan: str
    #: of all above: changes with the packs
    content_hash: str
    library_versions: dict[str, str]
    #: hashes of the layout's own files, by name
    metadata: dict[str, str]

    def of_an_epoch(self, what: Literal["packs", "samples", "tokens"], split: str = "train") -> int:
        """Amount in one epoch; the mean, rounded up, where each has packs of its own."""
        total: int = sum(getattr(shard, what) for shard in self.shards if shard.split == split)
        return -(-total // len(self.epochs.get(split, (0,))))


def read_manifest(folder: Any) -> Manifest | None:
    """The manifest in a folder, a Path or Energon's EPath; None: there is none. Raises
    ManifestError."""
    path = (Path(folder) if isinstance(folder, str) else folder) / NAME
    if not path.is_file():
        return None
    try:
        return Manifest.model_validate_json(path.read_text())
    except ValidationError as error:
        first = error.errors()[0]
        why = ": ".join([*filter(None, [".".join(map(str, first["loc"]))]), first["msg"]])
    except (OSError, ValueError) as error:
        why = str(error)
    raise ManifestError(f"{path} is damaged ({why}); offline-packing verify names the remedy")
