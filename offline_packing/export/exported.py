"""The task of exporting a shard; see export.py."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from offline_packing.errors import DamagedError
from offline_packing.storage.files import hash_file, local_copy
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

    @contextmanager
    def tar(self) -> Iterator[Path]:
        """Hold a local copy of the shard. Raises DamagedError if it is not what was written."""
        path = self.output / self.line.name
        with local_copy(path) as tar:
            if not tar.is_file() or hash_file(tar) != self.line.xxh3_128:
                raise DamagedError(
                    f"{path} is missing, or not what was written; offline-packing verify names the "
                    "remedy"
                )
            yield tar
