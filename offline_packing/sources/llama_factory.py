"""LLaMA-Factory's dataset_info.json: which file a dataset is in, and how its records are laid out.

    {"mllm_demo": {"file_name": "mllm_demo.json", "formatting": "sharegpt",
                   "columns": {"messages": "messages", "images": "images"},
                   "tags": {"role_tag": "role", "content_tag": "content",
                            "user_tag": "user", "assistant_tag": "assistant"}}}

The path is that file or its folder, `dataset` the name of the entry. The data are read from files
beside it (.json, .jsonl, .parquet); those on a hub, and preference data, are refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import orjson

from offline_packing.errors import StageError
from offline_packing.sources.base import (
    MAX_JSON_BYTES,
    Growth,
    Scan,
    Source,
    SourcePart,
    Stretch,
)
from offline_packing.sources.base import SourceRecord as Record
from offline_packing.sources.fields import FieldMap
from offline_packing.sources.jsonl import JsonlSource, JsonSource
from offline_packing.sources.tables import ParquetSource
from task_encoders.samples import SampleError

_INFO_NAME: Final = "dataset_info.json"
_FORMATS: Final[Mapping[str, type[Source]]] = {
    ".json": JsonSource,
    ".jsonl": JsonlSource,
    ".parquet": ParquetSource,
}
_COLUMNS: Final = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output"},
    "sharegpt": {"messages": "conversations"},
    "openai": {"messages": "messages"},
}
_TAGS: Final = {
    "sharegpt": {
        "role_tag": "from",
        "content_tag": "value",
        "user_tag": "human",
        "assistant_tag": "gpt",
        "system_tag": "system",
    },
    "openai": {
        "role_tag": "role",
        "content_tag": "content",
        "user_tag": "user",
        "assistant_tag": "assistant",
        "system_tag": "system",
    },
}


class LlamaFactorySource(Source):
    """One entry of dataset_info.json. The source of its file does the work."""

    OPTIONS = frozenset({"dataset", "image_root"})

    def __init__(self, path: str, task: str, **options: Any) -> None:
        super().__init__(path, task, **options)
        entry = self._entry()
        name = entry.get("file_name")
        suffix = Path(str(name)).suffix
        if not isinstance(name, str) or suffix not in _FORMATS:
            raise StageError(
                f"dataset {self.dataset!r} has file_name {name!r}; only files beside "
                f"{_INFO_NAME} that end in {', '.join(_FORMATS)} are read: download it first"
            )
        folder = self.root.path("").rstrip("/")
        options = {**options, "image_root": self.image_root or folder}
        self._file = _FORMATS[suffix](f"{folder}/{name}", task, **options)
        self._file.fields = self.fields = _EntryFields(entry)
        self.root, self.media = self._file.root, self._file.media
        self.image_root = self._file.image_root

    def scan(self, samples_per_part: int) -> Scan:
        return self._file.scan(samples_per_part)

    def scan_new(self, samples_per_part: int, growth: Growth) -> Scan:
        return self._file.scan_new(samples_per_part, growth)

    def entries(self) -> Iterator[tuple[str, int, int]]:
        return self._file.entries()

    def find_end(self, container: str, measured: Sequence[Stretch]) -> tuple[int, int] | None:
        return self._file.find_end(container, measured)

    def unread_parts(self) -> Sequence[SourcePart]:
        return self._file.unread_parts()

    def records(self, part: SourcePart) -> Iterator[Record]:
        return self._file.records(part)

    def _entry(self) -> Mapping[str, Any]:
        container = self.file_name or _INFO_NAME
        try:
            info = orjson.loads(self.root.read(container, MAX_JSON_BYTES))
        except (SampleError, orjson.JSONDecodeError) as error:
            raise StageError(f"{self.root.path(container)} cannot be read: {error}") from error
        if self.dataset is None or self.dataset not in info:
            raise StageError(
                f"{self.root.path(container)} has no dataset {self.dataset!r}; set source.dataset "
                f"to one of: {', '.join(info)}"[:1000]
            )
        entry: Mapping[str, Any] = info[self.dataset]
        if entry.get("ranking"):
            raise StageError(f"dataset {self.dataset!r} holds preferences, which are not packed")
        if entry.get("formatting", "alpaca") not in _COLUMNS:
            raise StageError(
                f"dataset {self.dataset!r} has formatting {entry['formatting']!r}; known: "
                f"{', '.join(_COLUMNS)}"
            )
        return entry


class _EntryFields(FieldMap):
    """Makes `messages`, `images`, `videos` and `system` of a record, as the entry's columns and
    tags say."""

    def __init__(self, entry: Mapping[str, Any]) -> None:
        super().__init__({})
        formatting = entry.get("formatting", "alpaca")
        self._names = {
            **_COLUMNS[formatting],
            "images": "images",
            "videos": "videos",
            "system": "system",
            "history": "history",
            **(entry.get("columns") or {}),
        }
        self._tags = {**_TAGS.get(formatting, {}), **(entry.get("tags") or {})}

    def columns(self) -> set[str]:
        return set(self._names.values())

    def media_columns(self) -> set[str]:
        return {self._names["images"], self._names["videos"]}

    def apply(self, content: Mapping[str, Any]) -> Mapping[str, Any]:
        named = {name: content.get(column) for name, column in self._names.items()}
        kept = {"id": content.get("id")} if "id" in content else {}
        for name in ("images", "videos", "system"):
            if named[name] not in (None, ""):
                kept[name] = named[name]
        messages = self._dialogue(named) if self._tags else _alpaca(named)
        return {**kept, "messages": messages}

    def _dialogue(self, named: Mapping[str, Any]) -> Any:
        """The messages with our names of roles."""
        messages = named["messages"]
        if not isinstance(messages, list):
            return messages
        tags = self._tags
        roles = {
            tags["user_tag"]: "user",
            tags["assistant_tag"]: "assistant",
            tags["system_tag"]: "system",
        }
        return [
            {
                "role": roles.get(message.get(tags["role_tag"]), "unknown"),
                "content": message.get(tags["content_tag"]),
            }
            if isinstance(message, dict)
            else message
            for message in messages
        ]


def _alpaca(named: Mapping[str, Any]) -> list[dict[str, Any]]:
    """History, then the instruction with its input, then the answer."""
    question = named["prompt"]
    if isinstance(question, str) and named.get("query"):
        question = f"{question}\n{named['query']}"
    turns = [*(named.get("history") or ()), (question, named["response"])]
    messages: list[dict[str, Any]] = []
    for turn in turns:
        if not isinstance(turn, list | tuple) or len(turn) != 2:
            raise SampleError("bad_record", "'history' is no list of pairs")
        messages += [
            {"role": "user", "content": turn[0]},
            {"role": "assistant", "content": turn[1]},
        ]
    return messages
