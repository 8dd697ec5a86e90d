"""WebDataset tars: plain ones by byte range; .tar.gz, .tgz and .tar.zst by streaming.

    shard-000000.tar:  0001.jpg  0001.json      {"caption": ...} and all other forms of records
                       0002.png  0002.txt       a caption
                       0003.img0.jpg  0003.img1.jpg  0003.json      {"images": ["img0.jpg", ...]}

Adjacent members that share the name up to its first dot are one sample; its key is `SHARD/NAME`,
so that shards may use the same names. `divide_parts` splits them where keys have dots (v1.00.jpg,
v1.00.json, v1.01.jpg, v1.01.json). The JSON names images and videos by member, or names none, or
one of any name where there is one. Links are not followed, and nothing but JSON, text, images and
videos is read: a `.pkl` is never loaded.
"""

import io
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final

from offline_packing.errors import as_sample_error
from offline_packing.sources.base import Embedded, Scan, Source, SourcePart, SourceRecord
from offline_packing.sources.reading.contents import file_names, holds_packs
from offline_packing.sources.reading.locators import Locator
from offline_packing.sources.roots.listing import hash_files
from offline_packing.storage.streams import (
    CODECS,
    UNREAD_SUFFIXES,
    DamagedStreamError,
    codec_of,
    open_unpacked,
)
from offline_packing.storage.tars import TarMember, TarReader
from task_encoders.packs.pack_format import MEDIA_EXTENSIONS, is_video_name
from task_encoders.records.forms import has_answer, named_media
from task_encoders.records.record import decode_text
from task_encoders.samples import SampleError
from task_encoders.samples.limits import MAX_JSON_BYTES

#: Key and part of a member, parted at the first dot of the file name as by WebDataset readers.
_MEMBER: Final = re.compile(r"(?:\./)?((?:.*/|)[^./]+)\.([^/]*)", re.DOTALL)
_UNNAMED: Final = "the name of a member is not KEY.PART"
_IN_NONE: Final = "it belongs to no record, or to one of several, of its name up to the first dot"
#: Files that macOS adds; all others without KEY.PART are set aside.
_ADDED: Final = re.compile(r"(.*/)?\.(_.*|DS_Store)", re.DOTALL)
_TEXT_PARTS: Final = ("txt", "caption", "text")
_RECORD_EXTENSIONS: Final = frozenset(("json", *_TEXT_PARTS))
#: Bytes up to which parts of a compressed tar, which have to be read on the way, are kept in
#: memory, by their extension; a sample with a larger medium is set aside.
_KEPT_BYTES: Final[Mapping[str, int]] = {
    **dict.fromkeys(MEDIA_EXTENSIONS, 256 << 20),
    **dict.fromkeys(_RECORD_EXTENSIONS, MAX_JSON_BYTES),
}
#: Bytes of all these parts of a sample; a sample with more is set aside.
_MOST_KEPT: Final = 512 << 20

#: Column of a locator that spans several members, from a header on; of one member it is the part.
_SPAN: Final = "*"


@dataclass(slots=True)
class TarSample:
    """Members of one sample by their part ('json', 'img0.jpg'), and content that was read."""

    container: str
    file: BinaryIO
    key: str = ""
    members: dict[str, TarMember] = field(default_factory=dict)
    data: dict[str, bytes] = field(default_factory=dict)
    #: bytes of all content read on the way, even if it is too much to keep
    to_keep: int = 0
    #: why this sample is not whole, or, without members, why nothing follows in the tar
    damage: DamagedStreamError | None = None
    #: why it is not a sample, such as a member whose name is not KEY.PART
    refused: str = ""
    #: samples were taken out of it, so the others are split as well
    is_split: bool = False

    def at(self, offset: int = 0, size: int = 0, column: str = "") -> Locator:
        """Return the locator of a place in the tar."""
        kind = "stream" if codec_of(self.container) else "bytes"
        return Locator(kind, self.container, offset, size, column)

    def locator(self, parts: list[str]) -> Locator:
        """Return the locator of a record made of some parts."""
        members = [self.members[part] for part in parts]
        if len(parts) == 1:
            return self.at(members[0].offset, members[0].size, parts[0])
        begin = min(member.header_offset for member in members)
        return self.at(begin, max(one.offset + one.size for one in members) - begin, _SPAN)

    def read(self, part: str) -> bytes:
        """Read a text member. Raises SampleError where it is a link or too large."""
        member = self.members[part]
        if not member.is_file:
            raise SampleError("bad_json", f"{member.name!r} is a link or no file")
        if member.size > MAX_JSON_BYTES:
            raise SampleError("bad_record", f"{member.name!r} has {member.size} bytes")
        if part in self.data:
            return self.data[part]
        self.file.seek(member.offset)
        return self.file.read(member.size)

    def divide(self) -> "list[TarSample]":
        """Divide it by `divide_parts`."""
        samples = []
        for stem, parts, refused in divide_parts(self.members, self.is_split):
            key = f"{self.key}.{stem}".rstrip(".")
            one = TarSample(self.container, self.file, key, refused=_IN_NONE if refused else "")
            names = {part.removeprefix(stem) or part: part for part in parts}
            one.members = {own: self.members[part] for own, part in names.items()}
            one.data = {own: self.data[part] for own, part in names.items() if part in self.data}
            one.to_keep = self.to_keep if len(one.data) < len(names) else 0
            samples.append(one)
        return samples

    def take_finished(self) -> "Iterator[TarSample]":
        """Yield its finished samples and take them out, if they have half of its members, as all
        are looked at. The last sample, media without a record, and records without media stay, in
        case theirs follow; such records are finished if there are no media at all."""
        has_media = any(map(_is_medium, self.members))
        samples = (one for one in self.divide()[:-1] if not one.refused)
        finished = [one for one in samples if any(map(_is_medium, one.members)) == has_media]
        if 2 * sum(len(one.members) for one in finished) < len(self.members):
            return
        self.is_split = True
        for one in finished:
            for own in one.members:
                part = f"{one.key}.{own}"[len(self.key) + 1 :]
                del self.members[part]
                self.to_keep -= len(self.data.pop(part, b""))
            yield one


class WebDatasetSource(Source):
    """Samples in tars. A part is one tar."""

    ENDINGS = (".tar", ".tgz", *(f".tar.{name}" for name in CODECS))
    UNREAD = (".txz", ".tbz", ".tbz2", *(f".tar{end}" for end in UNREAD_SUFFIXES))
    #: whether members of several records are split, or always one sample, as WebDataset has it
    SPLITS: ClassVar[bool] = True

    def scan(self, samples_per_part: int) -> Scan:
        tars = self.files()
        return Scan(tuple(SourcePart(name, None) for name, _ in tars), hash_files(tars))

    @classmethod
    def recognise(cls, path: Path) -> Mapping[str, Any] | None:
        tars = [name for name in file_names(path) if name.lower().endswith(cls.ENDINGS)]
        is_other = not tars or (path / ".nv-meta").is_dir() or holds_packs(path, tars[0])
        return None if is_other else {}

    def records(self, part: SourcePart) -> Iterator[SourceRecord]:
        container: str = part.items
        ending = next((end for end in self.ENDINGS if container.lower().endswith(end)), "")
        stem = container[: len(container) - len(ending)]
        with self.open_container(container, sequential=True) as packed:
            file = open_unpacked(packed, container)
            for sample in group_members(container, file, split=self.SPLITS):
                key = f"{stem}/{sample.key}" if sample.key else container
                if sample.damage is not None:
                    yield self.damaged(key, sample.at(), sample.damage)
                elif sample.refused:
                    error = SampleError("bad_record", sample.refused)
                    yield SourceRecord(key, sample.at(), error)
                else:
                    yield from self._records(key, sample)

    def _records(self, key: str, sample: TarSample) -> Iterator[SourceRecord]:
        """Yield the records in a sample of the tar: one, except in a tar of packs."""
        at = sample.at()
        if self.is_known(key):
            yield SourceRecord(key, at, {}, known=1)
            return
        try:
            if sample.to_keep > _MOST_KEPT:
                text = f"{sample.to_keep:,} bytes in a compressed tar > {_MOST_KEPT:,}; unpack it"
                raise SampleError("too_costly", text)
            media = self._media(sample)
            embedded = embedded_media(sample, media)
            chosen = self._record_parts(sample)
            at = sample.locator(chosen)
            content = self.parse_parts({part: sample.read(part) for part in chosen})
            part = self._json_part(sample) if self.fields.beside else None
            if part and part not in chosen:  # it describes the image of a caption
                described = self.parse_parts({part: sample.read(part)})
                content = {**content, **{name: described[name] for name in self.fields.beside}}
        except Exception as error:  # noqa: BLE001 - of this record
            yield SourceRecord(key, at, as_sample_error(error))
            return
        for kind in ("images", "videos"):
            names = named_media(content, kind)
            parts = [part for part in media if is_video_name(part) == (kind == "videos")]
            if names is not None and len(names) == len(parts) == 1:
                embedded.setdefault(str(names[0]), embedded[parts[0]])
        paired = tuple(media) if media or self.task == "captioning" else None
        read = {"", _stem(self._json_part(sample) or chosen[0])}
        records = filter(_is_record, sample.members if self.SPLITS else ())
        unread = tuple(part for part in records if _stem(part) not in read)
        yield SourceRecord(key, at, content, paired, embedded, unread=((), unread))

    def _media_parts(self, sample: TarSample) -> list[str]:
        """List the parts that are the sample's images and videos."""
        return [part for part in sample.members if _is_medium(part)]

    def _media(self, sample: TarSample) -> list[str]:
        """List the parts with media. Raises SampleError where one is a link or too large to be
        held."""
        media = self._media_parts(sample)
        for part in media:
            member = sample.members[part]
            if not member.is_file:
                raise SampleError("missing_image", f"{member.name!r} is a link or no file")
            if sample.data and part not in sample.data:
                reason = "video_too_large" if is_video_name(part) else "image_too_large"
                raise SampleError(reason, f"{member.name!r} has {member.size} bytes")
        return media

    def _json_part(self, sample: TarSample) -> str | None:
        found = (part for part in sample.members if _extension(part) == "json")
        return find_part(sample.members, "json") or next(found, None)

    def _record_parts(self, sample: TarSample) -> list[str]:
        """List the parts of the record: the JSON; the text without one, or if it describes the
        image."""
        record = self._json_part(sample)
        texts = [part for name in _TEXT_PARTS if (part := find_part(sample.members, name))]
        if record is None and not texts:
            raise SampleError(
                "bad_record",
                f"no .json and no .txt among the members {', '.join(sample.members)}"[:200],
            )
        if record is not None:
            is_whole = not texts or self.fields
            if is_whole or has_answer(self.parse_parts({record: sample.read(record)})):
                return [record]
        return texts[:1]

    def parse(self, data: bytes, column: str = "") -> Mapping[str, Any]:
        if column != _SPAN:
            return self.parse_parts({column: data})
        # The span ends where its last member does, without an end marker.
        file = io.BytesIO(data)
        found = (one for one in group_members("", file) if not one.refused)
        sample = next(found, TarSample("", file))
        return self.parse_parts({part: sample.read(part) for part in self._record_parts(sample)})

    def parse_parts(self, parts: Mapping[str, bytes]) -> Mapping[str, Any]:
        """Parse the record made of some members. Raises SampleError."""
        ((part, data),) = parts.items()
        if _extension(part) == "json":
            return super().parse(data)
        return {"caption": decode_text(data)}


def group_members(container: str, file: BinaryIO, *, split: bool = False) -> Iterator[TarSample]:
    """Yield the samples of an open tar; members that belong to none, each as one that says so, as
    does the last if the tar is damaged. A part that comes twice begins another sample of the same
    key. Of a tar that cannot be read at any place, texts and media are read on the way, at most
    _MOST_KEPT bytes of a sample. `split`: members that share KEY are divided by `divide_parts`."""
    reader, is_seekable = TarReader(file), file.seekable()
    sample = TarSample(container, file)
    divide = TarSample.divide if split else lambda one: [one]
    try:
        for member in reader:
            match = _MEMBER.fullmatch(member.name)
            if match is None:
                if member.is_file and not _ADDED.fullmatch(member.name):
                    yield TarSample(container, file, member.name, refused=_UNNAMED)
                continue
            key, part = match.groups()
            if key != sample.key or part in sample.members:
                if sample.members:
                    yield from divide(sample)
                sample = TarSample(container, file, key)
            sample.members[part] = member
            most = -1 if is_seekable else _KEPT_BYTES.get(_extension(part), -1)
            if member.is_file and member.size <= most:
                sample.to_keep += member.size
                if split and sample.to_keep - member.size <= _MOST_KEPT < sample.to_keep:
                    yield from sample.take_finished()
                if sample.to_keep <= _MOST_KEPT:
                    sample.data[part] = reader.read(member)
    except DamagedStreamError as error:
        *others, sample = divide(sample)
        yield from others
        if reader.member_complete and any(map(_is_record, sample.members)):
            yield sample
            sample = TarSample(container, file)
        sample.damage = error
        yield sample
    else:
        if sample.members:
            yield from divide(sample)


def divide_parts(parts: Collection[str], is_split: bool) -> list[tuple[str, list[str], bool]]:
    """Divide the parts of members that share KEY into samples. Return the stem and the parts of
    each, and whether it is refused; the sample of the last part comes last.

    The stem of a record is its name up to its extension: '00.' of '00.json', '' of 'json'. A medium
    belongs to the longest stem that its name begins with. The parts are several samples if no stem
    is '' and two stems own media, or there are two stems and no media, or the only stem owns some
    media, but not all; or if `is_split`. A medium without a stem is then refused. Otherwise they
    are one sample; records other than its own are refused if they own media, or if no stem does.
    """
    stem_of = {part: _stem(part) for part in parts if _is_record(part)}
    stems, media = set(stem_of.values()), {part for part in parts if _is_medium(part)}
    if stems <= {""} and not is_split:
        return [("", [*parts], False)]
    begun: list[str] = []  # the stems that a name begins with, the longest last
    for name in sorted(stems | media):
        while begun and not name.startswith(begun[-1]):
            begun.pop()
        if name in media:
            stem_of[name] = begun[-1] if begun else name
        else:
            begun.append(name)
    owners = {stem_of[part] for part in media}
    owning = owners & stems
    if "" not in stems:  # no record KEY.json or KEY.txt
        is_split |= len(owning) > 1 or (len(stems) > 1 and not media)
        is_split |= len(stems) == len(owning) == 1 < len(owners)
    if is_split:
        refused = owners - stems | {""}
    else:
        first = min(stem_of, key=lambda part: (part.lower() != "json", _extension(part) != "json"))
        refused = stems - {"", stem_of[first]} & (owning or stems)
        apart = {part for part in stem_of.keys() - media if stem_of[part] in refused}
        stem_of = {part: stem_of[part] if part in apart else "" for part in parts}
    samples: dict[str, list[str]] = {}
    for part in filter(stem_of.__contains__, parts):
        samples.setdefault(last := stem_of[part], []).append(part)
    last = last if is_split else ""
    samples[last] = samples.pop(last)
    return [(stem, own, stem in refused) for stem, own in samples.items()]


def _stem(part: str) -> str:
    return part[: -len(_extension(part))]


def _is_record(part: str) -> bool:
    return _extension(part) in _RECORD_EXTENSIONS


def _is_medium(part: str) -> bool:
    return _extension(part) in MEDIA_EXTENSIONS


def find_part(parts: Iterable[str], name: str) -> str | None:
    """Find the part of this name: 'txt', or else 'TXT'; None if there is neither."""
    same = [part for part in parts if part.lower() == name.lower()]
    return name if name in same else next(iter(same), None)


def _extension(part: str) -> str:
    return part.rpartition(".")[2].lower()


def embedded_media(sample: TarSample, media: list[str]) -> dict[str, Embedded]:
    """Return the media by every name that a record may use."""
    embedded: dict[str, Embedded] = {}
    for part in media:
        member = sample.members[part]
        at = sample.at(member.offset, member.size, member.name)
        found = Embedded(at, sample.data.get(part))
        embedded |= dict.fromkeys((part, member.name, f"{sample.key}.{part}"), found)
    for part in media:  # WebDataset's own reader gives parts in lower case
        embedded.setdefault(part.lower(), embedded[part])
    return embedded
