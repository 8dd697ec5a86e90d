"""Finished packs as token ids in the files of megatron-core's IndexedDataset, as NeMo's NeVA writes
them: one document of int32 per pack.

    packed_seq_dataset.bin    the sequences of all documents of the split train, one after another
    packed_seq_dataset.idx    their lengths and offsets, and where documents begin
    packed_seq_dataset_val.bin, .idx        any other split

    cu_lengths    (P + 1,)    boundaries of the P sub-samples
    tokens        (S,)        as they are trained, with all tokens of the images
    labels        (S,)        not shifted; -100 where there is no loss
    loss_mask     (S,) bytes  1 where there is a label; four to an int32, filled up with 0
    pack          JSON in UTF-8, filled up with blanks: what the pack is, and where its media are

    {"key": "ps_00000000", "images": [["img000.jpg"], []], "videos": [[], []],
     "media": [["files0", "a/17.jpg", null, 81204, 1763766381000000000, 5, 576]],
     "meta": {"task": "bmr", "keys": [...], "num_tokens": [...], "generation": ...}}

`media` holds an entry for each image, then for each video: its place as `packs.stored_media` has
it, by the roots in `media_roots.json` (`shards`: the exported output), and its first token and
number of tokens in `tokens`.
"""

import io
import itertools
import shutil
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import orjson

from offline_packing.errors import StageError
from offline_packing.export.exported import PIECES, ShardExport
from offline_packing.layouts.container import read_packs
from offline_packing.runs.run import open_encoder
from offline_packing.storage.files import atomic_file, hash_file, to_json, write_atomically
from offline_packing.storage.tars import PackEntry, scan_tar
from task_encoders.families import model_options
from task_encoders.families.base.family import FamilyEncoder
from task_encoders.packs.manifest import Manifest
from task_encoders.packs.pack import Pack, parse_json, restore_pack
from task_encoders.packs.stored_media import MEDIA_ROOTS, read_media_roots
from task_encoders.sample_encoder import TokenizedSample
from task_encoders.samples import SampleError

#: NeVA's name of the files, without their endings.
PREFIX: Final = "packed_seq_dataset"
SEQUENCES: Final = ("cu_lengths", "tokens", "labels", "loss_mask", "pack")

_HEADER: Final = b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, 4)  # version; 4: int32
_ITEM: Final = np.dtype("<i4")


def refuse(manifest: Manifest) -> str:
    """Return why an output's packs are not exported; "": they are."""
    if manifest.layout != "energon":
        return f"they are written for others (output.layout={manifest.layout}); pack to energon"
    if manifest.version != 1:
        return "they hold samples that share prefixes (pack.share_prefixes); pack without"
    return ""


def write(task: ShardExport, tar: Path) -> Mapping[str, str]:
    """Write a shard's documents and the sizes of their sequences, to be joined with those of
    others. Raises StageError if a pack is not encoded as it was measured."""
    model = model_options(**task.manifest.config["model"])
    # With the control tokens that were found where the packs were measured.
    if spelled := str(task.manifest.fingerprint.get("model.control_tokens", "")).split():
        model = model.model_copy(update={"control_tokens": tuple(spelled)})
    encoder, sizes = open_encoder(model), list[list[int]]()
    names = [f"{PIECES}/{task.name}.{ending}" for ending in ("bin", "sizes")]
    with atomic_file(task.folder / names[0]) as file:
        packs = read_packs(task.output, tar)
        for entry, pack in zip(scan_tar(tar), packs, strict=True):
            document = _document(encoder, task, entry, pack)
            file.write(b"".join(document))
            sizes.append([len(data) for data in document])
    write_atomically(task.folder / names[1], np.array(sizes, dtype="<i8").tobytes())
    return {name: hash_file(task.folder / name) for name in names}


def finish(folder: Path, tasks: Sequence[ShardExport]) -> list[str]:
    """Join the shards of each split, in the manifest's order; returns the names of all files."""
    found = []
    for split, own in itertools.groupby(tasks, key=lambda task: task.line.split):
        prefix = PREFIX if split == "train" else f"{PREFIX}_{split}"
        pieces = [folder / PIECES / task.name for task in own]
        with atomic_file(folder / f"{prefix}.bin") as file:
            for piece in pieces:
                with piece.with_suffix(".bin").open("rb") as source:
                    shutil.copyfileobj(source, file)
        read = [np.frombuffer(piece.with_suffix(".sizes").read_bytes(), "<i8") for piece in pieces]
        write_atomically(folder / f"{prefix}.idx", index_file(np.concatenate(read)))
        found += [f"{prefix}.bin", f"{prefix}.idx"]
    output, metadata = tasks[0].output, tasks[0].manifest.metadata
    roots = read_media_roots(str(output)) if MEDIA_ROOTS in metadata else {"shards": str(output)}
    write_atomically(folder / MEDIA_ROOTS, to_json({**roots}))
    return [*found, MEDIA_ROOTS]


def _document(
    encoder: FamilyEncoder, task: ShardExport, entry: PackEntry, pack: Pack
) -> list[bytes]:
    """Return the bytes of a pack's SEQUENCES."""
    restored = restore_pack(pack.record, pack.key)
    places = parse_json(pack.record, pack.key)["meta"].get("media") or {
        part.name: ["shards", task.line.name, part.offset, part.size, 0] for part in entry.parts
    }
    images, videos, media, texts = [], [], [], list[TokenizedSample]()
    start = 0
    for sample, measured in zip(restored.sub_samples, restored.num_tokens or (), strict=True):
        if isinstance(sample, SampleError):
            raise sample  # packed, so it was fit
        if sample.options:
            raise StageError(
                f"pack {pack.key!r}: {sample.key!r} has options of single images or videos (fps, "
                "video_start, ...), which its readers do not know; pack samples without them"
            )
        headers = [encoder.image_header(io.BytesIO(pack.media[name])) for name in sample.images]
        shown = [encoder.video_header(io.BytesIO(pack.media[name])) for name in sample.videos]
        text = encoder.tokenize(sample, [(one.height, one.width) for one in headers], shown)
        if len(text.tokens) != measured:
            raise StageError(
                f"pack {pack.key!r}: {sample.key!r} has {len(text.tokens)} tokens, was measured "
                f"with {measured}: the model's processor has changed; restore it, or pack again"
            )
        for name, (first, count) in zip(sample.media, (*text.images, *text.videos), strict=True):
            media.append([*places[name], start + first, count])
        images.append(list(sample.images))
        videos.append(list(sample.videos))
        texts.append(text)
        start += measured
    meta = {
        "task": restored.task,
        "keys": restored.keys,
        "num_tokens": restored.num_tokens,
        "generation": task.manifest.generation,
    }
    record = {"key": pack.key, "images": images, "videos": videos, "media": media, "meta": meta}
    return [
        np.cumsum([0, *(len(text.tokens) for text in texts)]).astype(_ITEM).tobytes(),
        np.concatenate([text.tokens for text in texts]).astype(_ITEM).tobytes(),
        np.concatenate([text.labels for text in texts]).astype(_ITEM).tobytes(),
        _fill(np.concatenate([text.loss_weights > 0 for text in texts]).tobytes(), b"\0"),
        _fill(orjson.dumps(record), b" "),
    ]


def _fill(data: bytes, filler: bytes) -> bytes:
    """Fill data up to whole items."""
    return data + filler * (-len(data) % _ITEM.itemsize)


def index_file(sizes: npt.NDArray[np.int64]) -> bytes:
    """Return the .idx of documents whose sequences have these (packs · sequences,) bytes, one after
    another."""
    ends = np.arange(0, len(sizes) + 1, len(SEQUENCES), dtype="<i8")
    lengths = (sizes // _ITEM.itemsize).astype("<i4")
    offsets = np.cumsum(sizes, dtype="<i8") - sizes
    counts = struct.pack("<QQ", len(sizes), len(ends))
    return b"".join([_HEADER, counts, lengths.tobytes(), offsets.tobytes(), ends.tobytes()])
