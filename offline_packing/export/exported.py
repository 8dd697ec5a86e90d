"""The task of exporting a shard; see export.py."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from task_encoders.packs.manifest import Manifest, ShardLine

#: Folder of the export's own files: other converters take every `*.json` next to packs for a pack.
OWN: Final = "_export"
#: Files that the last step joins.
PIECES: Final = f"{OWN}/pieces"


@dataclass(frozen=True)
class ShardExport:
    """A shard of an output, to be exported into a folder."""

    output: Path
    folder: Path
    #: the output's manifest without its shards, which would travel with each task
    manifest: Manifest
    line: ShardLine

    @property
    def name(self) -> str:
        """The shard's name, without a folder."""
        return Path(self.line.name).stem

    @property
    def done(self) -> Path:
        """The file that marks the shard as exported."""
        return self.folder / OWN / f"{self.name}.json"
