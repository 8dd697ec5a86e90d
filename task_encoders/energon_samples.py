"""Packs as Energon loads them, and the batch that a trainer receives.

A written folder names one of the Packed*Sample classes in its dataset.yaml, and `sample_loader` and
`part_filter` below through its `.nv-meta/sample_loader.py`.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import field, fields, replace
from typing import Any, Final

import orjson
import torch
from megatron.energon import Batch, Sample, SampleDecoder
from megatron.energon.edataclass import edataclass
from megatron.energon.errors import FatalSampleError

from task_encoders.concatenate import PackedRow, merge_rows
from task_encoders.packs.manifest import html_table
from task_encoders.packs.pack import PackFormatError, parse_json
from task_encoders.packs.pack_format import JSON_PART, MEDIA_EXTENSIONS, extension_of
from task_encoders.packs.stored_media import pack_of
from task_encoders.samples import IGNORE_INDEX
from task_encoders.storage.energon_paths import renew_clients_after_fork
from task_encoders.storage.remote_requests import RemoteError
from task_encoders.versions import require_supported

require_supported("megatron-energon")

renew_clients_after_fork()  # whoever loads packs through Energon imports this module


@edataclass
class PackedSample(Sample):
    """One pack, not restored yet: the fields of packs.pack.Pack, its JSON parsed."""

    record: Mapping[str, Any]
    media: Mapping[str, Any]


@edataclass
class PackedCaptioningSample(PackedSample):
    """A pack of captioning samples."""


@edataclass
class PackedVQASample(PackedSample):
    """A pack of single-turn VQA samples."""


@edataclass
class PackedMultiMixQASample(PackedSample):
    """A pack of multi-turn and mixed samples."""


@edataclass
class MultiMixQASample(Sample):
    """A conversation that is not a pack, for folders that are trained unpacked."""

    #: in any of the forms of records/messages.py
    messages: list[Any]
    #: bytes of the files, one or several
    image: Any = None
    video: Any = None
    system: str | None = None


@edataclass
class CrudeRecord(Sample):
    """A crude sample as it was read, a pack or not: member name -> bytes, or parsed JSON."""

    parts: dict[str, Any]


class TextDecoder(SampleDecoder):
    """Parses JSON, which Energon's `field_map` looks into; texts and media stay bytes until they
    are encoded, and so does JSON that cannot be parsed."""

    def __init__(self) -> None:
        """Leave out Energon's decoders of media, and their options."""

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        decoded = dict(sample)
        for part, value in sample.items():
            if isinstance(value, bytes) and extension_of(part) == JSON_PART:
                with suppress(orjson.JSONDecodeError):
                    decoded[part] = orjson.loads(value)
        return decoded

    def config(self) -> dict[str, Any]:
        return {}


def part_filter(part: str) -> bool:
    """Select the members of a pack to read: its JSON and its media."""
    return part == JSON_PART or extension_of(part) in MEDIA_EXTENSIONS


def sample_loader(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Turn Energon's raw sample (member name -> bytes or decoded) into the fields of PackedSample.
    Raises FatalSampleError if media that a pack refers to cannot be read, or have changed."""
    sources = parts.get("__sources__")
    folder = sources[0].dataset_path if sources else ""
    pack = pack_of(str(parts.get("__key__")), parts, folder)
    record = parse_json(pack.record, pack.key)
    try:
        return {"record": record, "media": dict(pack.media)}
    except (PackFormatError, OSError, RemoteError) as error:
        raise FatalSampleError(f"pack {pack.key!r}: {error}") from error


@edataclass
class PackedRowSample(Sample):
    """One encoded pack."""

    row: PackedRow
    #: Keys of the sub-samples in the row.
    sub_sample_keys: list[str]
    #: "key: reason: detail" of each sub-sample that had to be left out.
    dropped: list[str]


def merge_row_samples(samples: Sequence[PackedRowSample]) -> PackedRowSample:
    """Join encoded packs to one, under the key of the first."""
    return PackedRowSample.derive_from(
        samples[0],
        __sources__=tuple(source for sample in samples for source in sample.__sources__ or ()),
        row=merge_rows([sample.row for sample in samples]),
        sub_sample_keys=[key for sample in samples for key in sample.sub_sample_keys],
        dropped=[line for sample in samples for line in sample.dropped],
    )


def _tensor(dtype: torch.dtype, *shape: str) -> Any:
    return field(metadata={"spec": (dtype, shape)})


@edataclass
class PackedBatch(Batch):
    """k packs in one row of S tokens and P segments, under the names Megatron trainers read.

    N images have L patches and M videos K patches in all, each of D = C·T·p·p values. Where pixels
    travel as bytes, `model_inputs.normalise_pixels` converts them to values on any device.
    """

    tokens: torch.Tensor = _tensor(torch.int64, "1", "S")
    #: not shifted; IGNORE_INDEX at every sub-sample's first token, so that a shift of the whole
    #: row is safe
    labels: torch.Tensor = _tensor(torch.int64, "1", "S")
    #: the weight of each label in the loss, 0 where there is none
    loss_mask: torch.Tensor = _tensor(torch.float32, "1", "S")
    #: True = padding
    attn_mask: torch.Tensor = _tensor(torch.bool, "1", "S")
    #: M-RoPE's temporal, height and width position (R = 3); R = 1 where positions count tokens
    position_ids: torch.Tensor = _tensor(torch.int64, "R", "1", "S")
    cu_lengths: torch.Tensor = _tensor(torch.int32, "1", "P+1")
    #: the trunk whose tokens a segment sees as well, -1: none; (1, 0) without prefix trees
    parents: torch.Tensor = _tensor(torch.int32, "1", "P|0")
    #: the longest segment
    max_lengths: torch.Tensor = _tensor(torch.int32, "1")
    #: [[0.]] without images; as bytes: (L, C·p·p), one frame
    imgs: torch.Tensor = _tensor(torch.float32, "L", "D")
    #: in patches
    image_grid_thw: torch.Tensor = _tensor(torch.int32, "N", "3")
    #: [[0.]] without videos
    pixel_values_videos: torch.Tensor = _tensor(torch.float32, "K", "D")
    #: in patches
    video_grid_thw: torch.Tensor = _tensor(torch.int32, "M", "3")
    #: one tile per image
    num_tiles: torch.Tensor = _tensor(torch.int32, "N")
    #: the value of each byte per channel; (0, 256): pixels are values already
    byte_values: torch.Tensor = _tensor(torch.float32, "C", "256")
    #: T, how often an image's frame is repeated in its values
    frame_repeats: int
    #: tokens that are not padding
    num_tokens: int
    #: whether padding was requested, needed or not
    is_padded: bool
    #: keys of the sub-samples, in order
    sub_sample_keys: list[str]
    #: "key: reason: detail" of each sub-sample left out of this batch
    dropped: list[str]
    #: how transformers' model takes imgs: a name in model_inputs.IMAGE_LAYOUTS
    image_layout: str = "patches"

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> "PackedBatch":
        """Move the tensors of the batch to a device."""
        own = [(name, getattr(self, name)) for name in BATCH_TENSORS]
        return replace(self, **{n: one.to(device, non_blocking=non_blocking) for n, one in own})

    def _repr_html_(self) -> str:
        """Show the batch in a notebook: the tensors' types and shapes, and the samples in it."""
        shapes = {name: getattr(self, name) for name in BATCH_TENSORS}
        rows = {name: f"{t.dtype} {tuple(t.shape)}" for name, t in shapes.items()}
        rows["samples"] = f"{len(self.sub_sample_keys)}, {self.num_tokens:,} tokens"
        return html_table("PackedBatch", rows)


#: The tensors of a batch, for code that copies, sends or checks one: dtype, and shape with letters
#: for sizes that vary.
BATCH_TENSORS: Final[Mapping[str, tuple[torch.dtype, tuple[str, ...]]]] = {
    f.name: f.metadata["spec"] for f in fields(PackedBatch) if "spec" in f.metadata
}


def batch_rows(samples: Sequence[PackedRowSample]) -> PackedBatch:
    """Make one batch of k encoded packs."""
    merged = samples[0] if len(samples) == 1 else merge_row_samples(samples)
    row = merged.row
    num_images, normalisation = len(row.image_grid_thw), row.normalisation
    return PackedBatch(
        __key__=[sample.__key__ for sample in samples],
        __restore_key__=tuple(sample.__restore_key__ for sample in samples),
        __subflavors__=[sample.__subflavors__ for sample in samples],
        __sources__=merged.__sources__,
        tokens=row.tokens[None],
        labels=row.labels[None],
        loss_mask=row.loss_weights[None],
        attn_mask=row.attn_mask[None],
        position_ids=row.position_ids[:, None],
        cu_lengths=row.cu_lengths[None],
        parents=row.parents[None],
        max_lengths=row.cu_lengths.diff().max()[None],
        imgs=row.pixel_values if num_images else row.pixel_values.new_zeros(1, 1),
        image_grid_thw=row.image_grid_thw,
        pixel_values_videos=row.pixel_values_videos
        if len(row.video_grid_thw)
        else row.pixel_values_videos.new_zeros(1, 1),
        video_grid_thw=row.video_grid_thw,
        byte_values=torch.empty(0, 256)
        if normalisation is None
        else torch.from_numpy(normalisation.table),
        frame_repeats=1 if normalisation is None else normalisation.repeats,
        image_layout=row.image_layout,
        num_tokens=int((~row.attn_mask).sum()),
        is_padded=row.is_padded,
        num_tiles=torch.ones(num_images, dtype=torch.int32),
        sub_sample_keys=merged.sub_sample_keys,
        dropped=merged.dropped,
    )


def empty_batch(
    position_rows: int, num_tokens: int = 1, keys: Sequence[str] = (), dropped: Sequence[str] = ()
) -> PackedBatch:
    """Make a row of padding without a sample, for a rank that has none at a step where others do.

    Args:
        position_rows: R, see PackedBatch.
        num_tokens: S.
        keys: of packs that hold no usable sample; `dropped` says why.
    """
    sizes = {"S": num_tokens, "R": position_rows, "P+1": 2, "L": 1, "K": 1, "D": 1}
    tensors = {}
    for name, (dtype, letters) in BATCH_TENSORS.items():
        shape = [int(one) if one.isdigit() else sizes.get(one, 0) for one in letters]
        tensors[name] = torch.zeros(shape, dtype=dtype)
    tensors["labels"] += IGNORE_INDEX
    tensors["attn_mask"] |= True
    tensors["position_ids"] += torch.arange(num_tokens)
    tensors["cu_lengths"][0, 1] = num_tokens
    tensors["max_lengths"] += num_tokens
    return PackedBatch(
        __key__=list(keys),
        __restore_key__=(),
        **tensors,
        frame_repeats=1,
        num_tokens=0,
        is_padded=True,
        sub_sample_keys=[],
        dropped=list(dropped),
    )
