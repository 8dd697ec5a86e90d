"""LLaMA-Factory's dataset_info.json: which file a dataset is in, and how its records are laid out.

    {"mllm_demo": {"file_name": "mllm_demo.json", "formatting": "sharegpt",
                   "columns": {"messages": "messages", "images": "images"},
                   "tags": {"role_tag": "role", "content_tag": "content",
                            "user_tag": "user", "assistant_tag": "assistant"}}}

The path is that file or its folder, `dataset` the name of the entry. The data are read from files
next to it (.json, .jsonl, .parquet, .txt); data on a hub, and preference data, are refused. So are
options that change the set of samples: a `split` other than train, and `num_samples`, which
LLaMA-Factory draws afresh in every run. Records with audio are set aside.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

import orjson

from offline_packing.errors import StageError
from offline_packing.sources.base import Source
from offline_packing.sources.formats.jsonl import JsonlSource, JsonSource, TextSource
from offline_packing.sources.formats.tables import ParquetSource
from offline_packing.sources.options import FieldMap, MediaOptions
from offline_packing.sources.roots.roots import Root, open_root
from offline_packing.storage.files import to_json
from task_encoders.records.forms import read_history, with_input
from task_encoders.records.record import load_json
from task_encoders.samples import SampleError

_INFO_NAME: Final = "dataset_info.json"
_FORMATS: Final[Mapping[str, type[Source]]] = {
    one.ENDINGS[0]: one for one in (JsonSource, JsonlSource, ParquetSource, TextSource)
}
#: Fields of an entry; `subset`, `folder` and `revision` mean nothing to a file here.
_ENTRY_FIELDS: Final = frozenset(
    "file_name formatting ranking split num_samples columns tags subset folder revision".split()
)
#: Fields that LLaMA-Factory would read the data from, instead of `file_name`.
_ELSEWHERE: Final = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
_COLUMN_FIELDS: Final = frozenset(
    "prompt query response history messages system images videos "
    "tools audios chosen rejected kto_tag".split()
)
#: Names in tags, and the role of ours that each means.
_TAG_ROLES: Final = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "system_tag": "system",
    "observation_tag": "tool",
    "function_tag": "function_call",
}
_TAG_NAMES: Final = ("role_tag", "content_tag", *_TAG_ROLES)
#: Defaults of columns and tags, by formatting.
_COLUMNS: Final = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output"},
    "sharegpt": {"messages": "conversations"},
    "openai": {"messages": "messages"},
}
#: What goes with every formatting.
_KEPT: Final = ("id", "images", "videos", "system", "tools", "audios")
_TAGS: Final = {
    "sharegpt": ("from", "value", "human", "gpt", "system", "observation", "function_call"),
    "openai": ("role", "content", "user", "assistant", "system", "tool", "function_call"),
}


class LlamaFactoryOptions(MediaOptions):
    """Options of a file that describes several datasets."""

    #: which of them is read
    dataset: str | None = None


class LlamaFactorySource(JsonSource):
    """One entry of dataset_info.json. To open it is to open the source of its file."""

    Options: ClassVar[Any] = LlamaFactoryOptions

    def __new__(cls, options: LlamaFactoryOptions, **places: Any) -> Source:  # type: ignore[misc]
        root, file_name = open_root(options.path)
        entry = _read_entry(root, file_name or _INFO_NAME, options.dataset)
        name = entry.get("file_name")
        reader = _FORMATS.get(Path(str(name)).suffix.lower())
        if not isinstance(name, str) or reader is None:
            raise StageError(
                f"dataset {options.dataset!r} has file_name {name!r}; only files beside "
                f"{_INFO_NAME} that end in {', '.join(_FORMATS)} are read: download it first"
            )
        folder = root.path("").rstrip("/")
        own = {"path": f"{folder}/{name}", "image_root": options.image_root or folder}
        of_file = {"format": options.format, "task": options.task, **own}
        source = reader(reader.Options.model_validate(of_file), **places)
        source.options, source.path, source.fields = options, options.path, _EntryFields(entry)
        source.description = to_json(entry).decode()
        return source

    @classmethod
    def recognise(cls, path: Path) -> Mapping[str, Any] | None:
        info = path / _INFO_NAME if path.is_dir() else path
        if info.name != _INFO_NAME or not info.is_file():
            return None
        try:
            entries = orjson.loads(info.read_bytes())
        except orjson.JSONDecodeError:
            return None
        for name, entry in entries.items() if isinstance(entries, dict) else ():
            if isinstance(entry, dict) and (info.parent / str(entry.get("file_name"))).is_file():
                return {"dataset": name}
        return None


def _read_entry(root: Root, container: str, dataset: str | None) -> Mapping[str, Any]:
    """Read the entry of a dataset. Raises StageError if it cannot be read as LLaMA-Factory does."""
    path = root.path(container)
    try:
        info = load_json(root.read(container))
    except SampleError as error:
        raise StageError(f"{path} cannot be read: {error}; restore it") from error
    if dataset is None or dataset not in info:
        raise StageError(
            f"{path} has no dataset {dataset!r}; set source.dataset to one of: {', '.join(info)}"[
                :1000
            ]
        )
    entry: Mapping[str, Any] = info[dataset]
    if problem := _find_problem(entry):
        raise StageError(f"dataset {dataset!r} in {path} {problem}")
    return entry


def _find_problem(entry: Any) -> str | None:
    """Tell why an entry cannot be read as LLaMA-Factory reads it, with the remedy."""
    if not isinstance(entry, dict):
        return f"is {entry!r:.100}, not an object"
    columns, tags = entry.get("columns") or {}, entry.get("tags") or {}
    for name, known, fields in (("columns", _COLUMN_FIELDS, columns), ("tags", _TAG_NAMES, tags)):
        are_names = isinstance(fields, dict) and all(
            value is None or isinstance(value, str) for value in fields.values()
        )
        if not are_names:
            return f"has {name} {fields!r:.100}, not an object of names"
        if unknown := sorted(fields.keys() - known):
            return f"has {name}.{unknown[0]}, which is not known; known: {', '.join(sorted(known))}"
    elsewhere = next((field for field in _ELSEWHERE if field in entry), None)
    if elsewhere is not None:
        return (
            f"is read from its {elsewhere}, which takes precedence over a file; download it, "
            "and name the file by file_name alone"
        )
    if unknown := sorted(entry.keys() - _ENTRY_FIELDS):
        return f"has a field {unknown[0]!r}, which is not known; take it out of a copy of the file"
    if entry.get("ranking") or columns.get("kto_tag"):
        return "holds preferences (ranking or columns.kto_tag), which are not packed"
    if entry.get("split") not in (None, "train"):
        return f"has split {entry['split']!r}; a file is all train: leave it out or split the file"
    if entry.get("num_samples") is not None:
        return (
            f"has num_samples {entry['num_samples']!r}, which LLaMA-Factory draws at random; leave "
            "it out and set source.repeat or source.weight"
        )
    if entry.get("formatting", "alpaca") not in tuple(_COLUMNS):
        return f"has formatting {entry['formatting']!r}; known: {', '.join(_COLUMNS)}"
    return None


class _EntryFields(FieldMap):
    """Makes the fields of a record that we read, as the entry's columns and tags say."""

    def __init__(self, entry: Mapping[str, Any]) -> None:
        super().__init__({})
        formatting = entry.get("formatting", "alpaca")
        columns = {name: at for name, at in (entry.get("columns") or {}).items() if at}
        own = dict(_COLUMNS[formatting])
        if columns and formatting == "alpaca":  # the others have no default then
            own = {"prompt": own["prompt"]}
        own |= {name: name for name in ("id", "images", "videos", "system", "history")}
        self._names = own | columns
        tags = {name: tag for name, tag in (entry.get("tags") or {}).items() if tag}
        #: empty where records hold no messages
        self._tags = dict(zip(_TAG_NAMES, _TAGS.get(formatting, ()), strict=False))
        if self._tags:
            self._tags |= tags
        self._roles = {self._tags[name]: role for name, role in _TAG_ROLES.items() if self._tags}

    def columns(self) -> set[str]:
        return {*self._names.values()}

    def media_columns(self) -> set[str]:
        return {self._names["images"], self._names["videos"]}

    def apply(self, content: Mapping[str, Any]) -> Mapping[str, Any]:
        named: dict[str, Any] = {name: content.get(at) for name, at in self._names.items()}
        kept = {name: value for name in _KEPT if (value := named.get(name)) not in (None, "")}
        if self._tags:
            said = named["messages"]
            said = list(map(self._said, said)) if isinstance(said, list) else said
            return {**kept, "messages": said}
        if "response" not in self._names:  # plain text, of which LLaMA-Factory pretrains
            return {**kept, "text": named["prompt"]}
        question, query = named["prompt"], named.get("query")
        if query:
            if not isinstance(query, str):
                raise SampleError("bad_record", f"the query is {query!r:.50}, not text")
            question = with_input(question, query)
        turns = [*read_history(named.get("history")), (question, named["response"])]
        messages = [{"user": user, "assistant": assistant} for user, assistant in turns]
        return {**kept, "messages": messages}

    def _said(self, message: Any) -> Any:
        """Return a message with our names of fields and roles."""
        if not isinstance(message, dict):
            return message
        role, content = (message.get(self._tags[name]) for name in ("role_tag", "content_tag"))
        role = self._roles.get(role, f"unknown ({role})") if isinstance(role, str) else role
        return {"role": role, "content": content, "tool_calls": message.get("tool_calls")}
