"""Packs in the files of megatron-core's IndexedDataset: one document of int32 per pack.

    PREFIX.bin    the sequences of all documents, one after another
    PREFIX.idx    their lengths and offsets, and where documents begin

    cu_lengths    (P + 1,)    boundaries of the P sub-samples
    tokens        (S,)        as they are trained, with all tokens of the images
    labels        (S,)        not shifted; -100 where there is no loss
    loss_mask     (S,) bytes  1 where there is a label; four to an int32, filled up with 0
    pack          JSON in UTF-8, filled up with blanks: what the pack is, and where its media lie

    {"key": "ps_00000000", "images": [["img000.jpg"], []], "videos": [[], []],
     "media": [["files0", "a/17.jpg", null, 81204, 1763766381000000000, 5, 576]],
     "meta": {"task": "bmr", "keys": [...], "num_tokens": [...], "tokenized_with": ..., "loss": [],
              "generation": ...}}

`media` holds an entry for each image, then for each video: root, file, offset (null: the whole
file), number of bytes, modification time of the file (in ns; 0 if remote), and its place and length
in `tokens`. `meta` is that of a tokenized pack (pack_format.py) without `token_ids`, which follow
from `tokens`.

    media_roots.json    {"files0": "/data/images", "tars0": "/data"}: of the first source


Written and read with numpy: neither needs megatron-core, which opens the files as its own.
"""

import itertools
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from task_encoders.packs.pack import Pack, PackFormatError, StoredMedia, StoredMedium, parse_json
from task_encoders.packs.pack_format import PREFIX, is_video_name, media_part_names
from task_encoders.packs.tokenized import (
    ExpandedText,
    TokenizedPack,
    TokenizedText,
    collapse,
    labels_of,
)
from task_encoders.storage.paths import REMEDY, check_exists, is_url, path_of, read_range

#: Beside them: the folders, or URLs, that `media` names.
MEDIA_ROOTS: Final = "media_roots.json"

SEQUENCES: Final = ("cu_lengths", "tokens", "labels", "loss_mask", "pack")

#: The turn of a restored sub-sample, whose text is in its token ids only.
NO_TEXT: Final = ("", "(stored as token ids)")

_HEADER: Final = b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, 4)  # version; 4: int32
_ITEM: Final = np.dtype("<i4")

Sequence32 = npt.NDArray[np.int32]


def find_prefix(path: str | Path) -> Path | None:
    """The prefix that a path is, or that a folder holds; None: it is something else."""
    found = (path_of(path), path_of(path) / PREFIX)
    return next((one for one in found if path_of(f"{one}.idx").is_file()), None)


class IndexedSubSample(NamedTuple):
    """One sub-sample to be written into a document; images come first, then videos."""

    key: str
    text: TokenizedText
    expanded: ExpandedText
    extensions: Sequence[str]
    #: root, file, offset, bytes and time of each
    media: Sequence[Sequence[Any]]


def make_document(
    key: str, task: str, subs: Sequence[IndexedSubSample], made_with: str, generation: str
) -> list[bytes]:
    """The bytes of a pack's SEQUENCES. `made_with`: the digest of the encoder's fingerprint;
    `generation`: of the output."""
    texts = [sub.expanded for sub in subs]
    ends = np.cumsum([0, *(len(text.tokens) for text in texts)])
    names = iter(media_part_names([e for sub in subs for e in sub.extensions]))
    own_names = [[next(names) for _ in sub.extensions] for sub in subs]
    media = []
    for sub, start in zip(subs, ends.tolist(), strict=False):
        places = (*sub.expanded.images, *sub.expanded.videos)
        for stored, (first, count) in zip(sub.media, places, strict=True):
            media.append([*stored, start + first, count])
    meta = {"task": task, "keys": [sub.key for sub in subs], "num_tokens": np.diff(ends).tolist()}
    meta |= TokenizedPack([sub.text for sub in subs], made_with).meta()
    del meta["token_ids"]  # they follow from `tokens`
    meta["generation"] = generation
    record = {
        "key": key,
        "images": [[name for name in own if not is_video_name(name)] for own in own_names],
        "videos": [[name for name in own if is_video_name(name)] for own in own_names],
        "media": media,
        "meta": meta,
    }
    tokens = np.concatenate([text.tokens for text in texts])
    weights = np.concatenate([text.loss_weights for text in texts])
    return [
        ends.astype(_ITEM).tobytes(),
        tokens.astype(_ITEM).tobytes(),
        labels_of(tokens, weights).astype(_ITEM).tobytes(),
        _fill(bytes(weights > 0), b"\0"),
        _fill(orjson.dumps(record), b" "),
    ]


def _fill(data: bytes, filler: bytes) -> bytes:
    """Filled up to whole items."""
    return data + filler * (-len(data) % _ITEM.itemsize)


def index_file(sizes: Sequence[npt.NDArray[np.integer]]) -> bytes:
    """The .idx of documents; `sizes` are arrays (packs, sequences) of bytes, one after another."""
    flat = np.concatenate([some.reshape(-1) for some in sizes], dtype="<i8")
    ends = np.arange(0, len(flat) + 1, len(SEQUENCES), dtype="<i8")
    lengths = (flat // _ITEM.itemsize).astype("<i4")
    offsets = np.cumsum(flat, dtype="<i8") - flat
    counts = struct.pack("<QQ", len(flat), len(ends))
    return b"".join([_HEADER, counts, lengths.tobytes(), offsets.tobytes(), ends.tobytes()])


def read_media_roots(folder: Path) -> Mapping[str, str]:
    """The folders, or URLs, that packs in a folder name; empty if there is no such file. Raises
    PackFormatError if it is damaged."""
    path = folder / MEDIA_ROOTS
    try:
        return dict(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        raise PackFormatError(f"{path} is damaged ({error}); {REMEDY}") from error


class IndexedFile:
    """The documents of a prefix; cheap to send to another process. A local file is mapped into
    memory; of a URL each document is a request.

    Raises:
        PackFormatError: the files are missing or damaged, or their documents are not packs.
        StorageError: a URL leads nowhere.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        idx, bin_ = path_of(f"{prefix}.idx"), path_of(f"{prefix}.bin")
        check_exists(idx)
        self._roots = read_media_roots(idx.parent)
        try:
            index = np.frombuffer(idx.read_bytes(), np.uint8)
            self._items = None if is_url(prefix) else np.memmap(bin_, dtype=_ITEM, mode="r")
            size = bin_.stat().st_size
        except (OSError, ValueError) as error:
            raise PackFormatError(f"{prefix}.idx and .bin cannot be read: {error}") from error
        start = len(_HEADER) + 16
        if index[: len(_HEADER)].tobytes() != _HEADER or len(index) < start:
            raise PackFormatError(f"{prefix}.idx is no index of int32 of an IndexedDataset")
        count, documents = struct.unpack("<QQ", index[len(_HEADER) : start].tobytes())
        if len(index) < start + 12 * count + 8 * documents:
            raise PackFormatError(f"{prefix}.idx is damaged: it ends early")
        self._lengths = np.frombuffer(index, "<i4", count, start)
        self._offsets = np.frombuffer(index, "<i8", count, start + 4 * count)
        self._documents = np.frombuffer(index, "<i8", documents, start + 12 * count)
        if (np.diff(self._documents) != len(SEQUENCES)).any():
            raise PackFormatError(
                f"{prefix} holds documents that are no packs of {', '.join(SEQUENCES)}"
            )
        if int(self._lengths.sum(dtype=np.int64)) * _ITEM.itemsize != size:
            raise PackFormatError(f"{prefix}.bin is damaged: it is not as long as .idx says")

    def __reduce__(self) -> tuple[type["IndexedFile"], tuple[str]]:
        return type(self), (self.prefix,)

    def __len__(self) -> int:
        """Packs."""
        return len(self._documents) - 1

    def __getitem__(self, number: int) -> "IndexedPack":
        first = int(self._documents[number])
        some = slice(first, first + len(SEQUENCES))
        starts = self._offsets[some] // _ITEM.itemsize
        ends = starts + self._lengths[some]
        begin, end = int(starts.min()), int(ends.max())
        document = self._read(begin, end)
        bounds = zip((starts - begin).tolist(), (ends - begin).tolist(), strict=True)
        return IndexedPack([document[slice(*one)] for one in bounds], self._roots)

    def _read(self, begin: int, end: int) -> Sequence32:
        """Items of the .bin. Raises PackFormatError."""
        if self._items is not None:
            return self._items[begin:end]
        path = path_of(f"{self.prefix}.bin")
        try:
            data = read_range(path, begin * _ITEM.itemsize, end * _ITEM.itemsize)
            return np.frombuffer(data, _ITEM, end - begin)
        except (OSError, ValueError) as error:
            raise PackFormatError(f"{path} cannot be read: {error}") from error


class IndexedPack:
    """A document: the arrays of a row, and the pack that it was made from, without texts."""

    def __init__(self, sequences: Sequence[Sequence32], roots: Mapping[str, str]) -> None:
        """Raises PackFormatError if the document is not a pack."""
        self._roots = roots
        self.cu_lengths, self.tokens, self.labels, _, document = sequences
        self._stored = parse_json(document.tobytes(), "document")
        #: of the pack
        self.key: str = self._stored["key"]
        meta = self._stored["meta"]
        #: the digest of the settings that its token ids were made with
        self.made_with: str = meta["tokenized_with"]
        #: of the output that it belongs to; "": of an earlier version
        self.generation: str = meta.get("generation", "")
        #: what the pack is trained as
        self.task: str = meta["task"]
        #: the keys of its sub-samples
        self.sub_sample_keys: list[str] = meta["keys"]

    @property
    def pack(self) -> Pack:
        """Same form as a tokenized pack. Raises PackFormatError if it is damaged."""
        stored = self._stored
        try:
            images, videos, meta = (stored[name] for name in ("images", "videos", "meta"))
            kinds = list(zip(images, videos, strict=True))
            names = (name for own in kinds for some in own for name in some)
            media = dict(zip(names, stored["media"], strict=True))
            ids = []
            bounds = itertools.pairwise(self.cu_lengths.tolist())
            for own, (start, end) in zip(kinds, bounds, strict=True):
                at = [[media[name][-2:] for name in some] for some in own]
                places = [[(first - start, count) for first, count in some] for some in at]
                ids.append(collapse(self.tokens[start:end], *places))
        except (LookupError, ValueError, TypeError) as error:
            raise PackFormatError(f"pack {self.key!r} is damaged: {error}") from error
        prompt, answer = NO_TEXT
        record = {
            "images": images,
            "videos": videos,
            "prompt": [[prompt]] * len(ids),
            "captions": [[answer]] * len(ids),
            "meta": {**meta, "token_ids": ids},
        }
        read, check = (lambda at: self._at(at).read()), (lambda at: self._at(at).check())
        return Pack(self.key, record, StoredMedia(media, read, check))

    def _at(self, place: Sequence[Any]) -> StoredMedium:
        """Address of a medium. Raises PackFormatError if its root is unknown."""
        root, file, offset, size, mtime_ns, _, _ = place
        if root not in self._roots:
            raise PackFormatError(
                f"pack {self.key!r}: {MEDIA_ROOTS} beside the packs does not say where {root} is; "
                f"{REMEDY}"
            )
        return StoredMedium(f"{self._roots[root]}/{file}", offset, size, mtime_ns)
