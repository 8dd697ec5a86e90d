"""Hugging Face checkpoint folders: safetensors, one file or several with an index.

config.json  generation_config.json  tokenizer.json …  preprocessor_config.json
model.safetensors                                       or
model-00001-of-00002.safetensors …  model.safetensors.index.json
"""

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from launch.model.hf_weights import published_name

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
MAX_SHARD_BYTES: Final = 5 * 10**9

#: Files of a checkpoint besides its weights and config, which are copied unchanged.
COMPANION_FILES: Final = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tekken.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "vocab.json",
)


class CheckpointReader:
    """Slices of the tensors in a checkpoint folder, without reading the rest of the file."""

    def __init__(self, folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Open the folder and compare it with the tensors that the model needs.

        Raises:
            ValueError: no safetensors, or a tensor is missing.
        """
        self._stack = contextlib.ExitStack()
        self._files: dict[str, tuple[Any, str]] = {}  # published name -> (file, name in it)
        for path in weight_files(folder):
            file = self._stack.enter_context(safe_open(path, framework="pt"))
            for name in file.keys():  # noqa: SIM118  safe_open is not a mapping
                self._files[published_name(name)] = file, name
        missing = sorted(set(shapes) - set(self._files))
        if missing:
            self._stack.close()
            raise ValueError(
                f"checkpoint {folder} lacks {len(missing)} of {len(shapes)} tensors, the first is "
                f"{missing[0]!r}; is its download complete?"
            )

    def read(self, name: str, dim: int | None, rank: int, size: int) -> torch.Tensor:
        """The rank-th of `size` equal slices of a tensor along `dim` (None: all of it)."""
        file, stored = self._files[name]
        if dim is None or size == 1:
            return file.get_tensor(stored)
        tensor = file.get_slice(stored)
        length = tensor.get_shape()[dim] // size
        part = slice(rank * length, (rank + 1) * length)
        return tensor[part] if dim == 0 else tensor[:, part]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint.

    Raises:
        ValueError: there are none (other formats hold pickles and are not read), or the index
            names a file that is not there.
    """
    if (folder / INDEX_FILE).is_file():
        index = json.loads((folder / INDEX_FILE).read_bytes())
        names = sorted(set(index["weight_map"].values()))
    else:
        names = [SINGLE_FILE]
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise ValueError(
                f"checkpoint {folder} has no file {name!r}; give a folder with complete "
                "safetensors weights"
            )
    return [folder / name for name in names]


def write_checkpoint(
    folder: Path,
    tensors: Iterable[tuple[str, torch.Tensor | None]],
    hf_config: Any,
    *,
    like: Path | None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a checkpoint folder; it takes its name when it is complete.

    Args:
        folder: replaced if it exists.
        tensors: by published name; a rank that gets None for a tensor writes nothing.
        hf_config: transformers' config of the model.
        like: checkpoint whose tokenizer and config belong to it; None: the built-in vocabulary's.
        max_shard_bytes: a safetensors file is closed before it grows beyond this.
    """
    written = ((name, tensor) for name, tensor in tensors if tensor is not None)
    first = next(written, None)
    if first is None:
        return
    with replace_folder(folder) as temporary:
        writer = _ShardWriter(temporary, max_shard_bytes)
        for name, tensor in itertools.chain([first], written):
            writer.add(name, tensor)
        writer.finish()
        _write_config(temporary, hf_config, writer.dtype, like)
        write_companions(temporary, hf_config, like)


@contextlib.contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to write in, renamed to `folder` when the block ends without an error."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    yield temporary
    for path in temporary.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


class _ShardWriter:
    """Collects tensors and writes them in files of limited size."""

    def __init__(self, folder: Path, max_shard_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._total_bytes = 0
        self._shards: list[list[str]] = []
        self.dtype = torch.float32

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._pending and self._pending_bytes + tensor.nbytes > self._max_bytes:
            self._flush()
        self._pending[name] = tensor
        self._pending_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes
        self.dtype = tensor.dtype

    def finish(self) -> None:
        self._flush()
        count = len(self._shards)
        if count == 1:
            self._path(0).rename(self._folder / SINGLE_FILE)
            return
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self._shards):
            file_name = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            self._path(i).rename(self._folder / file_name)
            weight_map |= dict.fromkeys(names, file_name)
        index = {
            "metadata": {"total_size": self._total_bytes},
            "weight_map": dict(sorted(weight_map.items())),
        }
        (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")

    def _flush(self) -> None:
        save_file(self._pending, self._path(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def _path(self, shard: int) -> Path:
        return self._folder / f"shard-{shard}.safetensors"


def _write_config(folder: Path, hf_config: Any, dtype: torch.dtype, like: Path | None) -> None:
    """config.json: a checkpoint's own, byte for byte, unless the dtype changed."""
    name = str(dtype).removeprefix("torch.")
    if like is not None:
        text = (like / "config.json").read_text()
        values = json.loads(text)
        key = "dtype" if "dtype" in values else "torch_dtype"
        if values.get(key) != name:
            text = json.dumps({**values, key: name}, indent=2) + "\n"
        (folder / "config.json").write_text(text)
        return
    values = hf_config.to_dict()
    values["dtype"] = name
    values["architectures"] = [
        type(hf_config).__name__.replace("Config", "ForConditionalGeneration")
    ]
    type(hf_config).from_dict(values).save_pretrained(folder)


def write_companions(folder: Path, hf_config: Any, like: Path | None) -> None:
    """Tokenizer, image processor and generation settings, where there are any; those of the folder
    `like`, or the built-in ones."""
    if like is not None and like.is_dir():
        for name in COMPANION_FILES:
            if (like / name).is_file():
                shutil.copyfile(like / name, folder / name)
        return
    from task_encoders.families.builtin_processor import builtin_processor, has_builtin_processor

    if not has_builtin_processor(hf_config.model_type):
        return
    processor = builtin_processor(hf_config.model_type)
    if hf_config.text_config.vocab_size >= len(processor.tokenizer):
        processor.tokenizer.save_pretrained(folder)
        processor.image_processor.save_pretrained(folder)
