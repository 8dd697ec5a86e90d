"""preview: packs as training sees them, read from the shards, restored and encoded by the task
encoder, and spelled out token by token with the trained parts marked."""

import functools
import io
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from offline_packing.errors import StageError
from offline_packing.layouts.container import read_pack
from offline_packing.layouts.energon_metadata import check_energon
from offline_packing.report.spelled import MediumPreview, Span, spell_segment
from offline_packing.runs.manifest import require_manifest
from offline_packing.runs.run import Run
from task_encoders.families.base.family import FamilyEncoder
from task_encoders.media.video_file import decode_frames
from task_encoders.packs.manifest import Manifest
from task_encoders.packs.pack import Pack, restore_pack
from task_encoders.packs.pack_format import is_video_name, pack_key
from task_encoders.samples import SourceSample
from task_encoders.samples.medium_options import MediumOptions
from task_encoders.settings import PackingSettings

if TYPE_CHECKING:
    from task_encoders.energon_samples import PackedRowSample
    from task_encoders.packed_task_encoder import PackedTaskEncoder


@dataclass(frozen=True)
class SubSamplePreview:
    """One segment of a row: a sub-sample, a branch, or a trunk. `num_tokens` counts its padding."""

    #: of a trunk: the one of its first branch
    sample: SourceSample
    num_tokens: int
    num_loss_tokens: int
    images: tuple[MediumPreview, ...]
    videos: tuple[MediumPreview, ...]
    spans: tuple[Span, ...]
    #: whether it goes on after the last trunk before it
    is_branch: bool
    #: sub-samples that go on after it; 0: it is not a trunk
    num_branches: int

    @property
    def title(self) -> str:
        """Its key, with an arrow if it is a branch; or that it is a trunk."""
        if self.num_branches:
            return f"trunk of {self.num_branches} samples"
        return "↳ " * self.is_branch + self.sample.key


@dataclass(frozen=True)
class PackPreview:
    """One pack as a row."""

    key: str
    shard: str
    split: str
    #: room for tokens
    seq_length: int
    cu_lengths: tuple[int, ...]
    sub_samples: tuple[SubSamplePreview, ...]
    #: "key: reason: detail" of sub-samples that the task encoder leaves out
    dropped: tuple[str, ...]

    @property
    def fill(self) -> float:
        """Tokens over seq_length."""
        return self.cu_lengths[-1] / self.seq_length


def preview(
    run: Run, *, num_packs: int = 3, packs: Sequence[str] = (), seed: int = 0
) -> Iterator[PackPreview]:
    """Yield the packs with these keys or numbers, or `num_packs` drawn ones, of a complete output.
    Raises StageError if packs are not written or not found, or were measured with another model
    than the configuration's."""
    check_energon()
    from task_encoders.packed_task_encoder import PackedTaskEncoder

    manifest = require_manifest(run.workspace.root)
    numbers, task = choose(manifest, num_packs, packs, seed), manifest.task
    try:
        task_encoder = PackedTaskEncoder(
            model=run.config.model,
            seq_length=manifest.seq_length,
            pad_multiple=manifest.pad_multiple,
            settings=PackingSettings(packed=True, vqa=task == "vqa", bmr=task == "bmr"),
            trees=True,
        )
        task_encoder.check_manifest(run.workspace.root)
    except ValueError as error:
        raise StageError(str(error)) from error
    return (_preview_pack(run.workspace.root, manifest, task_encoder, number) for number in numbers)


def choose(manifest: Manifest, num_packs: int, packs: Sequence[str], seed: int) -> list[int]:
    """Return the numbers of the named packs, or of some drawn ones, ascending. Raises StageError if
    a pack is not found."""
    total = sum(shard.packs for shard in manifest.shards)
    if not packs:
        drawn = np.random.default_rng(seed).choice(total, min(num_packs, total), replace=False)
        return sorted(drawn.tolist())
    prefix = manifest.config["output"]["key_prefix"]
    form = re.compile(rf"(?:(?:{re.escape(prefix)})?ps_)?(\d+)")
    numbers = []
    for name in packs:
        match = form.fullmatch(name)
        if match is None or int(match[1]) >= total:
            raise StageError(
                f"no pack {name!r}; there are {pack_key(0, prefix)} to "
                f"{pack_key(total - 1, prefix)}, or 0 to {total - 1}"
            )
        numbers.append(int(match[1]))
    return numbers


def _preview_pack(
    root: Path, manifest: Manifest, task_encoder: "PackedTaskEncoder", number: int
) -> PackPreview:
    """Encode a pack as the loader's task encoder does. Raises StageError if the pack cannot be
    used."""
    from megatron.energon.errors import FatalSampleError

    ends = np.cumsum([shard.packs for shard in manifest.shards])
    shard = manifest.shards[int(np.searchsorted(ends, number, side="right"))]
    key = pack_key(number, manifest.config["output"]["key_prefix"])
    pack = read_pack(root, shard.name, key)
    try:
        row = task_encoder.encode_pack(pack)
    except (FatalSampleError, ValueError) as error:
        raise StageError(f"pack {key!r} cannot be trained on: {error}") from error
    return PackPreview(
        key=key,
        shard=shard.name,
        split=shard.split,
        seq_length=manifest.seq_length,
        cu_lengths=tuple(row.row.cu_lengths.tolist()),
        sub_samples=tuple(_sub_samples(task_encoder.encoder, row, pack)),
        dropped=tuple(row.dropped),
    )


def _sub_samples(
    encoder: FamilyEncoder, row: "PackedRowSample", pack: Pack
) -> Iterator[SubSamplePreview]:
    """Yield each segment of a row with the source sample that it was made from."""
    sub_samples = restore_pack(pack.record, pack.key).sub_samples
    samples = (sub for sub in sub_samples if isinstance(sub, SourceSample))
    keys = iter(row.sub_sample_keys)
    bounds = list(itertools.pairwise(row.row.cu_lengths.tolist()))
    parents = row.row.parents.tolist() or [-1] * len(bounds)

    @functools.cache
    def medium(name: str, grid: tuple[int, ...], options: MediumOptions) -> MediumPreview:
        own, data = encoder.for_medium(options), pack.media[name]
        if not is_video_name(name):
            return MediumPreview(name, *own.decode_image(data).size, grid, data)
        header = own.video_header(io.BytesIO(data))
        frames = own.sample_video(header).frames
        first = next(decode_frames(data, header, frames[:1], own.max_image_pixels))
        first.save(file := io.BytesIO(), "PNG")
        return MediumPreview(name, *first.size, grid, file.getvalue(), len(frames))

    for number, ((start, end), parent) in enumerate(zip(bounds, parents, strict=True)):
        if parent < 0 or parent < number - 1:  # a first branch goes with its trunk
            sub_key = next(keys)
            sample = next(sample for sample in samples if sample.key == sub_key)
        images = [encoder.image_header(io.BytesIO(pack.media[name])) for name in sample.images]
        videos = [encoder.video_header(io.BytesIO(pack.media[name])) for name in sample.videos]
        given = sample, [(one.height, one.width) for one in images], videos
        measured, tokenized = encoder.measure(*given), encoder.tokenize(*given)
        media = map(medium, sample.media, measured.grid_thw, sample.media_options)
        before = 0 if parent < 0 else bounds[parent][1] - bounds[parent][0]  # the trunk's tokens
        shown = [
            ((place - before, count), one)
            for (place, count), one in zip(
                [*tokenized.images, *tokenized.videos], media, strict=True
            )
            if before <= place < before + end - start
        ]
        tokens, weights, is_padding = (
            column[start:end].numpy()
            for column in (row.row.tokens, row.row.loss_weights, row.row.attn_mask)
        )
        yield SubSamplePreview(
            sample,
            num_tokens=end - start,
            num_loss_tokens=int((weights > 0).sum()),
            images=tuple(one for _, one in shown if not one.num_frames),
            videos=tuple(one for _, one in shown if one.num_frames),
            spans=tuple(spell_segment(tokens, weights, is_padding, encoder, shown)),
            is_branch=parent >= 0,
            num_branches=parents.count(number),
        )
