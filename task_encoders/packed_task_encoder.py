"""The Energon task encoder: pack -> sub-samples -> encoded samples -> row -> batch.

`Qwen2VLTaskEncoder` works in any Energon call, and checks every dataset that it is given before
the first pack is read. `packed_dataset` has the calls that keep the order packs were written in.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

from megatron.energon import (
    Cooker,
    CrudeSample,
    DefaultTaskEncoder,
    SavableDataset,
    WorkerConfig,
    basic_sample_keys,
    stateless,
)
from megatron.energon.epathlib import EPath
from megatron.energon.errors import FatalSampleError
from megatron.energon.metadataset.loader_interface import LoadedDataset

from task_encoders.concatenate import Map, concatenate
from task_encoders.energon_samples import (
    PackedBatch,
    PackedRowSample,
    PackedSample,
    batch_rows,
    sample_loader,
)
from task_encoders.families import ModelSettings, build_sample_encoder
from task_encoders.media.pixel_values import PixelTransport
from task_encoders.media.video_file import MissingPyAVError
from task_encoders.pack_dealing import OnePass, deal_evenly
from task_encoders.pack_format import RestoredPack, match_images, restore_pack
from task_encoders.sample_encoder import IGNORE_INDEX, EncodedSample
from task_encoders.samples import SampleError
from task_encoders.settings import PackingSettings, PackingSettingsError, check_manifest
from task_encoders.tokenized import fingerprint_digest

logger = logging.getLogger(__name__)


@stateless
def cook_pack(sample: CrudeSample) -> PackedSample:
    """A pack in a folder that is declared as CrudeWebdataset."""
    return PackedSample(**basic_sample_keys(sample), **sample_loader(sample))


class Qwen2VLTaskEncoder(
    DefaultTaskEncoder[PackedSample, PackedRowSample, PackedBatch, PackedBatch]
):
    """Restores packs, tokenizes each sub-sample as it was measured, and concatenates them.

    Args:
        seq_length: capacity of a pack in tokens. Sub-samples of a pack written by others that go
            over it are dropped from its end, and counted.
        model: as when the packs were measured; the folder's manifest.json says what that was.
        options: instead of `model`, its fields by name: family, processor ("builtin", a checkpoint
            folder or a hub name), min_pixels, max_pixels, video (a VideoSettings), …
        pad_multiple: pad every sub-sample to a multiple (see `required_pad_multiple`).
        pad_to_seq_length: pad every pack to `seq_length`, for kernels compiled per shape.
        cross_sample_attention: let a pack's samples attend to each other.
        pixel_transport: "uint8" sends pixels as bytes, an eighth of what their values take;
            `normalise_pixels(batch)` computes the same values on the device.
        encode_threads: how many sub-samples of a pack are encoded at the same time.
        check_lengths: compare each sub-sample's tokens with the length stored in the pack, and
            stop on the first that differs: the shards were measured with other settings.
        settings: instead of the environment variables.
    """

    decoder = None  # media stay bytes until they are encoded
    cookers = (Cooker(cook_pack),)

    def __init__(
        self,
        *,
        seq_length: int,
        model: ModelSettings | None = None,
        pad_multiple: int = 1,
        pad_to_seq_length: bool = False,
        cross_sample_attention: bool = False,
        pixel_transport: PixelTransport = "float32",
        encode_threads: int = 1,
        check_lengths: bool = True,
        settings: PackingSettings | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if pad_to_seq_length and seq_length % pad_multiple:
            raise ValueError(
                f"pad_to_seq_length: seq_length {seq_length} is not a multiple of "
                f"pad_multiple {pad_multiple}; set {seq_length // pad_multiple * pad_multiple}"
            )
        if pixel_transport not in get_args(PixelTransport):
            raise ValueError(f"pixel_transport {pixel_transport!r}: float32 or uint8")
        if encode_threads < 1:
            raise ValueError(f"encode_threads {encode_threads} must be at least 1")
        self.settings = settings or PackingSettings.from_env()
        self.encoder = build_sample_encoder(model, **options)
        self._digest = fingerprint_digest(self.encoder.fingerprint)
        self.seq_length = seq_length
        self.pad_multiple = pad_multiple
        self.pad_to_length = seq_length if pad_to_seq_length else None
        self.cross_sample_attention = cross_sample_attention
        self.pixel_transport = pixel_transport
        self.encode_threads = encode_threads
        self.check_lengths = check_lengths
        self.is_blend = False

    @stateless
    def encode_sample(self, sample: PackedSample) -> PackedRowSample:
        """One pack to one row. Bad sub-samples are dropped and listed, not their pack.

        Raises:
            FatalSampleError: the environment contradicts the pack, or lengths differ from those
                measured; such a run must stop.
            SampleError, PackFormatError: nothing of the pack can be used.
        """
        with self._mapping() as map_:
            return self._encode_pack(sample, map_)

    def _encode_pack(self, sample: PackedSample, map_: Map) -> PackedRowSample:
        restored = self._restore(sample)
        encoded: list[EncodedSample] = []
        dropped: list[str] = []
        room = self.seq_length
        results = self._encode_sub_samples(sample, restored, map_)
        for key, sub_sample in zip(restored.keys, results, strict=True):
            try:
                if isinstance(sub_sample, SampleError):
                    raise sub_sample
                padded = -(-len(sub_sample.tokens) // self.pad_multiple) * self.pad_multiple
                if padded > room:
                    raise SampleError("overlong", f"{padded} tokens do not fit the {room} left")
            except SampleError as error:
                logger.warning("pack %s: dropped sub-sample %s: %s", sample.__key__, key, error)
                dropped.append(f"{key}: {error}")
            else:
                room -= padded
                encoded.append(sub_sample)
        if not encoded:
            raise SampleError("bad_record", f"pack {sample.__key__!r} has no usable sub-sample")
        row = concatenate(
            encoded,
            pad_token_id=self.encoder.pad_token_id,
            pad_multiple=self.pad_multiple,
            pad_to_length=self.pad_to_length,
            cross_sample_attention=self.cross_sample_attention,
            pixel_transport=self.pixel_transport,
            map_=map_,
        )
        keys = [one.key for one in encoded]
        return PackedRowSample.derive_from(sample, row=row, sub_sample_keys=keys, dropped=dropped)

    @stateless
    def batch(self, samples: list[PackedRowSample]) -> PackedBatch:
        """k packs to one row with merged cu_lengths; nothing is padded."""
        return batch_rows(samples, IGNORE_INDEX)

    def build_train_datasets(
        self, *, datasets: Sequence[Any], repeat: bool = True, **kwargs: Any
    ) -> SavableDataset[PackedBatch]:
        """Energon's hook: checks the datasets, and keeps the end of those that do not repeat."""
        self._check_datasets(datasets)
        built = super().build_train_datasets(datasets=datasets, repeat=repeat, **kwargs)
        return built if repeat else OnePass(built)

    def build_val_datasets(
        self, *, datasets: Sequence[Any], **kwargs: Any
    ) -> SavableDataset[PackedBatch]:
        """As build_train_datasets."""
        self._check_datasets(datasets)
        return OnePass(super().build_val_datasets(datasets=datasets, **kwargs))

    def _load_dataset(
        self, dataset: LoadedDataset, worker_rotation_offset: int, worker_config: WorkerConfig
    ) -> SavableDataset[Any]:
        built = super()._load_dataset(dataset, worker_rotation_offset, worker_config)
        return deal_evenly(built, dataset, worker_rotation_offset)

    def _check_datasets(self, datasets: Sequence[LoadedDataset]) -> None:
        """Raise PackingSettingsError where the environment or these settings differ from what the
        datasets declare."""
        # Never unset: Energon's get_val_datasets hands over the datasets of a blend one by one.
        self.is_blend = self.is_blend or len(datasets) > 1
        for loaded in datasets:
            subflavors = getattr(loaded.dataset, "subflavors", None) or {}
            task = subflavors.get("offline_packing")
            if task is not None or not self.settings.packed:
                self.settings.resolve_task(None, task, blend=self.is_blend)
            for path in loaded.dataset.paths:
                self.check_manifest(path)

    def check_manifest(self, folder: EPath | Path) -> None:
        """Compare the settings that a packed folder was made with to these.

        Raises:
            PackingSettingsError: they differ, or the manifest cannot be read.
        """
        check_manifest(
            folder,
            model=self.encoder.fingerprint,
            seq_length=self.seq_length,
            pad_multiple=self.pad_multiple,
        )

    def _restore(self, sample: PackedSample) -> RestoredPack:
        if not isinstance(sample, PackedSample):
            raise FatalSampleError(
                f"{type(self).__name__} reads packs, and {sample.__key__!r} is a "
                f"{type(sample).__name__}; point it at a folder written by offline-packing"
            )
        meta_task = (sample.meta or {}).get("task")
        subflavor_task = (sample.__subflavors__ or {}).get("offline_packing")
        try:
            task = self.settings.resolve_task(meta_task, subflavor_task, blend=self.is_blend)
        except PackingSettingsError as error:
            raise FatalSampleError(str(error)) from error
        record: dict[str, Any] = {
            "images": sample.image_names,
            "prompt": sample.prompts or [""] * len(sample.captions or ()),
            "captions": sample.captions,
            "meta": sample.meta,
        }
        if sample.video_names is not None:
            record["videos"] = sample.video_names
            if sample.image_names is None:
                del record["images"]
        return restore_pack(record, sample.__key__, task)

    @contextmanager
    def _mapping(self) -> Iterator[Map]:
        """`map`, or a thread pool's, started for each pack: a loader forks its workers."""
        if self.encode_threads == 1:
            yield map
        else:
            with ThreadPoolExecutor(self.encode_threads) as pool:
                yield pool.map

    def _encode_sub_samples(
        self, sample: PackedSample, restored: RestoredPack, map_: Map
    ) -> list[EncodedSample | SampleError]:
        matched = match_images(sample.image_names, sample.__key__.rpartition("/")[2], sample.images)
        images = {name: sample.images[member] for name, member in matched.items()}

        def encode(i: int) -> EncodedSample | SampleError:
            try:
                return self._encode_sub_sample(sample, restored, images, i)
            except SampleError as error:
                return error

        sizes = [
            sum(len(sample.images.get(matched.get(n, n), b"")) for n in getattr(sub, "media", ()))
            for sub in restored.sub_samples
        ]
        # Threads end together if the largest begin first.
        order = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
        results = dict(zip(order, map_(encode, order), strict=True))
        return [results[i] for i in range(len(order))]

    def _encode_sub_sample(
        self, sample: PackedSample, restored: RestoredPack, images: Mapping[str, Any], index: int
    ) -> EncodedSample:
        """Encode one sub-sample; `images` holds the images by their names in the pack's JSON."""
        sub_sample = restored.sub_samples[index]
        if isinstance(sub_sample, SampleError):
            raise sub_sample
        missing = [name for name in sub_sample.images if name not in images]
        missing += [name for name in sub_sample.videos if name not in sample.images]
        if missing:
            raise SampleError("missing_image", f"no member {missing[0]!r}")
        videos = [sample.images[name] for name in sub_sample.videos]
        tokenized = restored.tokenized
        if tokenized is not None and tokenized.made_with != self._digest:
            tokenized = None
        try:
            encoded = self.encoder.encode(
                sub_sample,
                [images[n] for n in sub_sample.images],
                videos,
                tokenized and tokenized.texts[index],
            )
        except MissingPyAVError as error:
            raise FatalSampleError(str(error)) from error
        if self.check_lengths and restored.num_tokens is not None:
            measured = restored.num_tokens[index]
            if measured != len(encoded.tokens):
                raise FatalSampleError(
                    f"sub-sample {sub_sample.key!r} of pack {sample.__key__!r} has "
                    f"{len(encoded.tokens)} tokens but was measured with {measured}; give the "
                    "task encoder the processor and pixel limits of the folder's manifest.json"
                )
        return encoded
