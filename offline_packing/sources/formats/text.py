"""Plain text: each line of a `.txt` file, plain or compressed, is a sample without an image.

With task captioning all of a line is trained, as in pretraining on text.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offline_packing.sources.formats.jsonl import JsonlSource
from offline_packing.sources.roots.contents import file_names
from task_encoders.samples import SampleError


class TextSource(JsonlSource):
    """One sample per line, whose key is `FILE:NUMBER`."""

    SUFFIX = "txt"

    @classmethod
    def recognise(cls, path: Path) -> Mapping[str, Any] | None:
        # A text beside other files tells of them.
        is_all = all(name.lower().split(".")[1:2] == ["txt"] for name in file_names(path))
        return super().recognise(path) if is_all else None

    def parse(self, data: bytes, column: str = "") -> Mapping[str, Any]:
        try:
            return self.fields.apply({"text": data.decode("utf-8").strip()})
        except UnicodeDecodeError as error:
            raise SampleError("bad_json", f"the text is not UTF-8: {error}") from error
