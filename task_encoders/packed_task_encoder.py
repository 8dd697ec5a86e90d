"""The Energon task encoder: pack -> sub-samples -> encoded samples -> row -> batch.

It works in any Energon call, and checks every dataset that it is given before the first pack is
read. Samples that are not packs become rows of one sub-sample, or packs of Energon's own buffer.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    Sample,
    SavableDataset,
    WorkerConfig,
    stateless,
)
from megatron.energon.epathlib import EPath
from megatron.energon.errors import FatalSampleError
from megatron.energon.metadataset.loader_interface import LoadedDataset
from megatron.energon.task_encoder.base import get_failure_tolerance, get_stateless

from task_encoders.energon_samples import (
    CrudeRecord,
    PackedBatch,
    PackedRowSample,
    PackedSample,
    TextDecoder,
    batch_rows,
    sample_loader,
)
from task_encoders.families import ModelOptions, build_sample_encoder, model_options
from task_encoders.families.base.family import FamilyEncoder
from task_encoders.field_types import Count, checked
from task_encoders.media.patches import PixelTransport
from task_encoders.packs.manifest import WRITTEN_AGAIN, read_manifest
from task_encoders.packs.pack import (
    LOST_PROMPTS,
    Pack,
    SubSample,
    count_lost_prompts,
    parse_json,
    sub_samples_of_pack,
)
from task_encoders.packs.pack_format import JSON_PART
from task_encoders.rows.encoded_rows import EncodedRows
from task_encoders.rows.pack_dealing import OnePass, deal_evenly
from task_encoders.rows.row_encoder import RowEncoder
from task_encoders.rows.unpacked import cook, is_pack, unpacked_sub_sample
from task_encoders.settings import (
    FRACTIONS,
    NO_PACKS,
    OWN_FIELDS,
    TREES,
    PackingSettings,
    PackingSettingsError,
    describe_change,
)

logger = logging.getLogger(__name__)


class PackedTaskEncoder(DefaultTaskEncoder[Sample, PackedRowSample, PackedBatch, PackedBatch]):
    """Restores packs, tokenizes each sub-sample as it was measured, and concatenates them.

    Args:
        seq_length: capacity of a pack in tokens. If a pack written by others is longer, sub-samples
            at its end are dropped, and counted.
        model: the model the packs were measured with, as manifest.json says.
        options: instead of `model`, its fields by name: family, processor ("builtin", a checkpoint
            folder or a hub name), min_pixels, max_pixels, …
        pad_multiple: pad every sub-sample to a multiple (see `required_pad_multiple`).
        fits_padded: padded packs are known to fit `seq_length`, whatever they were planned with.
        pad_to_seq_length: pad every pack to `seq_length`, for kernels compiled per shape.
        cross_sample_attention: let a pack's samples attend to each other.
        pixel_transport: "uint8" sends pixels as bytes, an eighth of what their values take;
            `normalise_pixels(batch)` computes the same values on the device.
        encode_threads: how many sub-samples of a pack are encoded at the same time; a process
            keeps these threads, and up to two decoded images for each.
        check_lengths: compare each sub-sample's tokens with the length stored in the pack, and
            stop on the first that differs: the shards were measured with other settings.
        settings: instead of the environment variables.
        trees: rows go to an attention that knows `parents`; otherwise packs of samples that share
            prefixes (`pack.share_prefixes`) stop the run.
    """

    decoder = TextDecoder()
    cookers = (Cooker(cook),)

    @checked
    def __init__(
        self,
        *,
        seq_length: Count,
        model: ModelOptions | None = None,
        pad_multiple: Count = 1,
        fits_padded: bool = False,
        pad_to_seq_length: bool = False,
        cross_sample_attention: bool = False,
        pixel_transport: PixelTransport = "float32",
        encode_threads: Count = 1,
        check_lengths: bool = True,
        settings: PackingSettings | None = None,
        trees: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.settings = settings or PackingSettings.from_env()
        self.model = model or model_options(**options)
        self.seq_length, self.pad_multiple = seq_length, pad_multiple
        self._fits_padded = fits_padded
        self._rows = RowEncoder(
            encoder=build_sample_encoder(self.model),
            seq_length=seq_length,
            multiple=pad_multiple,
            pad_to_seq_length=pad_to_seq_length,
            cross_sample_attention=cross_sample_attention,
            pixel_transport=pixel_transport,
            encode_threads=encode_threads,
            check_lengths=check_lengths,
        )
        self.trees = trees
        self.is_blend = False
        #: whose loss takes no weights but 0 and 1
        self._trainer = ""
        #: the folders that were checked, and whether they hold other weights
        self._folders: list[tuple[EPath | Path, bool]] = []
        #: folders of the datasets that are being built, and the generation of their packs
        self._opened: list[tuple[EPath | Path, str]] = []

    @property
    def encoder(self) -> FamilyEncoder:
        """The sample encoder."""
        return self._rows.encoder

    @stateless
    def encode_sample(self, sample: Sample) -> PackedRowSample:
        """Encode a pack, or a plain sample, as one row. Bad sub-samples are left out and listed.

        Raises:
            FatalSampleError: the environment contradicts the sample, lengths differ from those
                measured, or the output was written again; such a run must stop.
            SampleError, PackFormatError: no sub-sample can be used.
        """
        return self.encode_row(sample, self.sub_samples(sample))

    def sub_samples(self, sample: Sample) -> list[SubSample]:
        """Return the sub-samples of a sample. Raises PackFormatError; and FatalSampleError, also if
        a pack is of another generation than its folder was when opened, by its subflavors, or holds
        trees and this encoder was built without them."""
        if isinstance(sample, CrudeRecord) and is_pack(
            sample.parts.get(JSON_PART), packed=self.settings.packed
        ):
            notes = {"__key__": sample.__key__, "__sources__": sample.__sources__}
            fields = sample_loader({**notes, **sample.parts})
            sample = PackedSample.derive_from(sample, **fields)
        if isinstance(sample, PackedSample):
            meta, flavors = sample.record.get("meta") or {}, sample.__subflavors__ or {}
            opened, found = flavors.get("generation"), meta.get("generation")
            name = f"pack {sample.__key__!r}"
            if opened is not None and found != opened:
                raise FatalSampleError(WRITTEN_AGAIN.format(name, found, opened))
            declared = meta.get("task"), flavors.get("offline_packing")
            try:
                task = self.settings.resolve_task(*declared, blend=self.is_blend)
            except PackingSettingsError as error:
                raise FatalSampleError(str(error)) from error
            if task == "vqa" and (lost := count_lost_prompts(sample.record)):
                raise FatalSampleError(f"{name}: {LOST_PROMPTS.format(lost, lost)}")
            pack = Pack(sample.__key__, sample.record, sample.media)
            sub_samples = sub_samples_of_pack(pack, task)
            if not self.trees and any(one.tree is not None for one in sub_samples):
                raise FatalSampleError(TREES.format(name))
            return sub_samples
        if self.settings.packed and not self.is_blend:
            raise FatalSampleError(NO_PACKS.format(f"sample {sample.__key__!r}"))
        return [unpacked_sub_sample(sample)]

    def encode_pack(self, pack: Pack, **energon: Any) -> PackedRowSample:
        """Encode a pack read without Energon, as `encode_sample`; `energon` holds its notes."""
        record = parse_json(pack.record, pack.key)
        own = {"__key__": pack.key, "__restore_key__": (), "__subflavors__": {}, **energon}
        return self.encode_sample(PackedSample(**own, record=record, media=pack.media))

    def encode_row(self, sample: Sample, sub_samples: Sequence[SubSample]) -> PackedRowSample:
        """Encode all usable sub-samples to one row; `sample` is the pack, for key and source.
        Raises SampleError: there is none; FatalSampleError: see encode_sample."""
        row, keys, dropped = self._rows.encode(sub_samples)
        if self._trainer and ((row.loss_weights > 0) & (row.loss_weights != 1)).any():
            raise FatalSampleError(FRACTIONS.format(sample.__key__, self._trainer))
        key = sample.__key__
        if self.is_blend and sample.__sources__:  # folders of a blend may have equal keys
            key = f"{sample.__sources__[0].dataset_path}/{key}"
        encoded = {"row": row, "sub_sample_keys": keys, "dropped": dropped}
        return PackedRowSample.derive_from(sample, __key__=key, **encoded)

    #: Energon's hook: k packs to one row with merged cu_lengths; nothing is padded.
    batch = staticmethod(stateless(batch_rows))

    def build_train_datasets(
        self, *, datasets: Sequence[Any], repeat: bool = True, **kwargs: Any
    ) -> SavableDataset[PackedBatch]:
        """Check the datasets that Energon gives, and keep the end of those that do not repeat.
        Raises PackingSettingsError as well for a weighted blend that Energon does not draw from."""
        self._check_datasets(datasets)
        for one in datasets:
            if one.weight is not None and one.weight <= 0:
                raise PackingSettingsError(
                    f"{one.dataset.path} has weight {one.weight:g} in a blend; a weight is above "
                    "0: remove the entry"
                )
            if one.weight is not None and not repeat:
                raise PackingSettingsError(
                    "a blend by weights has no end, so it cannot be read with repeat=False (in "
                    "launch: data.repeat=false); write a blend_epochized with repetitions, as "
                    "offline-packing blend --epochs does"
                )
        if self.settings.packed and kwargs.get("shuffle_buffer_size"):
            logger.warning(
                "shuffle_buffer_size %d undoes the order packs were written in, which gives ranks "
                "equal work; set it to None",
                kwargs["shuffle_buffer_size"],
            )
        shuffles = [one for one in datasets if getattr(one.dataset, "shuffle_over_epochs", None)]
        for folder in (path for one in shuffles for path in one.dataset.paths):
            if (manifest := read_manifest(folder)) and manifest.has_mixture:
                logger.warning(
                    "%s: its shards are shuffled, which undoes its mixture (pack.mixture); read it "
                    "by get_packed_train_dataset",
                    folder,
                )
        built = super().build_train_datasets(datasets=datasets, repeat=repeat, **kwargs)
        return built if repeat else OnePass(built)

    def build_val_datasets(
        self, *, datasets: Sequence[Any], **kwargs: Any
    ) -> SavableDataset[PackedBatch]:
        """Check the datasets that Energon gives, and keep their end."""
        self._check_datasets(datasets)
        return OnePass(super().build_val_datasets(datasets=datasets, **kwargs))

    def build_encode_sample(
        self, dataset: SavableDataset[Any], *, worker_config: WorkerConfig
    ) -> SavableDataset[PackedRowSample]:
        """Build Energon's stage that encodes samples; it reports those that are left out."""
        return EncodedRows(
            dataset,
            self.encode_sample,
            worker_config=worker_config,
            opened=self._opened,
            stateless_map_fn=get_stateless(self.encode_sample),
            failure_tolerance=get_failure_tolerance(
                self.encode_sample, self.__default_failure_tolerance__
            ),
        )

    def build_batch(
        self,
        dataset: SavableDataset[PackedRowSample],
        *,
        packing_buffer_size: int | None = None,
        **kwargs: Any,
    ) -> SavableDataset[PackedBatch]:
        """Build Energon's stage of batches. Raises ValueError for Energon's own packing."""
        if packing_buffer_size is not None:
            raise ValueError(
                f"packing_buffer_size {packing_buffer_size}: packs are packed already, and samples "
                "are packed by offline_packing.online.energon; leave it out"
            )
        return super().build_batch(dataset, **kwargs)

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
        if self.settings.packed and not isinstance(self.decoder, TextDecoder | None):
            raise PackingSettingsError(
                f"{type(self).__name__}.decoder is a {type(self.decoder).__name__}: packs take the "
                "bytes of media, which are decoded as they were measured; remove it"
            )
        self._opened = []
        for loaded in datasets:
            factory = loaded.dataset
            subflavors = getattr(factory, "subflavors", None) or {}
            task = subflavors.get("offline_packing")
            sample_type = factory.__sample_type__
            is_typed = isinstance(sample_type, type) and issubclass(sample_type, Sample)
            has_packs = is_typed and issubclass(sample_type, PackedSample)
            if task is not None or (has_packs and not self.settings.packed):
                self.settings.resolve_task(None, task, blend=self.is_blend)
            elif is_typed and not has_packs and self.settings.packed and not self.is_blend:
                raise PackingSettingsError(NO_PACKS.format(factory.paths[0]))
            for path in factory.paths:
                self.check_manifest(path)
                self._opened.append((path, subflavors.get("generation", "")))

    def check_manifest(self, folder: EPath | Path) -> None:
        """Compare the settings that a packed folder was made with to these; the first folder gives
        its control tokens to a model without. One that others wrote, without a manifest.json, has
        nothing to compare.

        Raises:
            PackingSettingsError: sub-samples would have different lengths, packs would not fit, or
                they share prefixes, which the reader does not know.
            ManifestError: the manifest cannot be read.
        """
        manifest = read_manifest(folder)
        if manifest is None:
            self._folders.append((folder, False))
            return
        stored = manifest.fingerprint.get("model.control_tokens")
        if stored and not self._folders and not self.model.control_tokens:
            update = {"control_tokens": tuple(str(stored).split())}
            self.model = self.model.model_copy(update=update)
            self._rows = replace(self._rows, encoder=build_sample_encoder(self.model))
        if manifest.version == 2 and not self.trees:
            raise PackingSettingsError(TREES.format(folder))
        measured = {f"model.{name}": None for name in OWN_FIELDS} | manifest.fingerprint
        # First what explains others: a family has its tokenizer, a tokenizer its chat template.
        first = ("model.family", "model.tokenizer")
        for field in sorted(measured, key=lambda name: [name != one for one in first]):
            value, own = measured[field], self.encoder.fingerprint.get(field.removeprefix("model."))
            if field.startswith("model.") and own != value:
                models = manifest.config.get("model", {}), dict(self.encoder.options)
                was, has = describe_change(field, (value, own), *models)
                raise PackingSettingsError(
                    f"{folder}: packs were measured with {was}, the task encoder has {has}; use "
                    "the same, or measure and pack again"
                )
        if manifest.seq_length > self.seq_length:
            raise PackingSettingsError(
                f"{folder}: packs hold up to seq_length {manifest.seq_length} tokens > the task "
                f"encoder's seq_length {self.seq_length}; raise it, or pack again"
            )
        multiple = self.pad_multiple
        if not self._fits_padded and not manifest.is_padded_to(multiple):
            raise PackingSettingsError(
                f"{folder}: the packs have no room for the padding of samples to multiples of "
                f"{multiple}, which the task encoder does; pack again with "
                f"pack.pad_multiple={multiple}"
            )
        self._folders.append((folder, bool(manifest.loss_weights)))
        self.check_trainer(self._trainer)

    def check_trainer(self, trainer: str) -> None:
        """Refuse packs with loss weights other than 0 and 1, also in rows, which this trainer
        cannot train. Raises PackingSettingsError if a folder checked so far has them."""
        self._trainer = trainer
        for folder, has_fractions in self._folders:
            if trainer and has_fractions:
                raise PackingSettingsError(FRACTIONS.format(folder, trainer))


#: The name in the trainers that the task encoder was first written for.
Qwen2VLTaskEncoder = PackedTaskEncoder
