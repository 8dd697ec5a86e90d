"""Packs: each sub-sample becomes a sample again, to be repacked.

    packed/train-000000.tar: ps_00000000.img000.jpg  ps_00000000.json   as written here or by others
    raw_packing_data/        ps_00000000.img000.jpg  ps_00000000.json   the same as files

Samples keep the keys they had before packing; packs without keys give `SHARD/PACK/NUMBER`. All
shards of a folder are read, whatever their split. The JSON of a pack that is files may also name
images by their path, from its own folder or `image_root` on.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

from offline_packing.errors import StageError, as_sample_error
from offline_packing.sources.base import Embedded, Scan, SourcePart, SourceRecord
from offline_packing.sources.formats.webdataset import TarSample, WebDatasetSource, embedded_media
from offline_packing.sources.options import MediaOptions
from offline_packing.sources.reading.contents import file_names, holds_packs
from offline_packing.sources.reading.locators import Locator, to_json
from offline_packing.sources.roots.listing import hash_files, walk
from task_encoders.packs.pack import PackFormatError, match_images, parse_json, restore_pack
from task_encoders.packs.pack_format import JSON_PART
from task_encoders.records.record import load_json
from task_encoders.samples import SampleError

_LOOSE_PACK: Final = re.compile(r"(?:.*/)?([A-Za-z0-9_-]*ps_\d+)\.json")


class PacksOptions(MediaOptions):
    """Options of packs, whose captions may have prompts that no trainer shows to the model."""

    ignore_prompts: bool = True


class PacksSource(WebDatasetSource):
    """A part is one tar, or a list of the JSON files of packs that are files."""

    Options = PacksOptions
    SPLITS = False

    def scan(self, samples_per_part: int) -> Scan:
        if self._is_tars:
            return super().scan(samples_per_part)
        files = sorted((name, size) for name, size, _ in self.entries())
        packs = [name for name, _ in files if _LOOSE_PACK.fullmatch(name)]
        if not packs:
            raise StageError(f"source path {self.path!r} holds no packs: *.tar, ps_*.json")
        starts = range(0, len(packs), samples_per_part)
        parts = (SourcePart(packs[start : start + samples_per_part], None) for start in starts)
        return Scan(tuple(parts), hash_files(files))

    @classmethod
    def recognise(cls, path: Path) -> Mapping[str, Any] | None:
        names = file_names(path)
        tars = [name for name in names if name.lower().endswith(".tar")]
        is_pack = holds_packs(path, tars[0]) if tars else any(map(_LOOSE_PACK.fullmatch, names))
        return {} if is_pack else None

    def is_read(self, container: str) -> bool:
        return super().is_read(container) if self._is_tars else True

    @functools.cached_property
    def _is_tars(self) -> bool:
        return self.file_name is not None or any(
            name.lower().endswith(".tar") for name, *_ in walk(self.root)
        )

    def records(self, part: SourcePart) -> Iterator[SourceRecord]:
        if isinstance(part.items, str):
            yield from super().records(part)
        else:
            for container in part.items:
                at = Locator("bytes", container, 0, 0)
                yield from self._sub_samples(container.removesuffix(".json"), at)

    def _records(self, key: str, sample: TarSample) -> Iterator[SourceRecord]:
        return self._sub_samples(key, sample.at(), sample)

    def _sub_samples(
        self, key: str, at: Locator, sample: TarSample | None = None
    ) -> Iterator[SourceRecord]:
        """Yield the records of a pack: of its JSON in a file at a locator, or of a tar's sample."""
        embedded: dict[str, Embedded] = {}
        media: list[str] = []
        try:
            if sample is None:
                data = self.root.read(at.container)
            elif JSON_PART not in sample.members:
                raise SampleError("bad_json", f"pack {key!r} has no .json member")
            else:
                at = sample.at(sample.members[JSON_PART].offset)
                data, media = sample.read(JSON_PART), self._media(sample)
                embedded = embedded_media(sample, media)
            content = parse_json(data, key)
            meta = content.get("meta")
            meta = meta if isinstance(meta, dict) else {}
            if "media" in meta:
                raise StageError(
                    f"{self.path}: packs refer to their media (output.media=refer); take the "
                    "source that they were packed from, or export them: offline-packing export"
                )
            packed_as = meta.get("task")
            if self.task == "captioning" and packed_as not in (None, self.task):  # of questions
                problem = f"the pack's task is {packed_as!r}; set source.task to it"
                raise SampleError("lost_prompt", problem)
            pack = restore_pack(content, key, self.task)
        except PackFormatError as error:
            yield SourceRecord(key, at, SampleError("bad_json", str(error)))
            return
        except Exception as error:  # noqa: BLE001 - of this record
            yield SourceRecord(key, at, as_sample_error(error))
            return
        matched = match_images(content.get("images"), key.rpartition("/")[2], media)
        embedded |= {name: embedded[part] for name, part in matched.items()}
        kind = "stream_sub_sample" if at.kind == "stream" else "sub_sample"
        for i, (sub_key, sub) in enumerate(zip(pack.keys, pack.sub_samples, strict=True)):
            record = b"" if isinstance(sub, SampleError) else to_json(sub)
            column = f"{self.task}.{i}.{len(data)}"
            place = Locator(kind, at.container, at.offset, len(record), column)
            found = sub if isinstance(sub, SampleError) else load_json(record)
            yield SourceRecord(sub_key, place, found, None, embedded)

    def open_media(self, record: SourceRecord, name: str) -> tuple[Locator, BinaryIO]:
        # Packs that are files: 'img000.jpg' of a/ps_0.json is ps_0.img000.jpg next to it.
        stem, _, suffix = record.locator.container.rpartition("/")[2].rpartition(".")
        if suffix == "json" and "/" not in name and not name.startswith(f"{stem}."):
            name = f"{stem}.{name}"
        return super().open_media(record, name)

    def files_at(self, record: Locator) -> None:
        return None

    def parse(self, data: bytes, column: str = "") -> Mapping[str, Any]:
        return load_json(data)
