"""Content of a folder, to recognise its format, and for hints on missing files."""

import contextlib
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

from offline_packing.errors import StageError
from offline_packing.sources.options import MediaOptions, SourceOptions
from offline_packing.storage.streams import DamagedStreamError, open_unpacked
from offline_packing.storage.tars import TarReader
from task_encoders.families import FAMILIES
from task_encoders.storage.paths import is_url
from task_encoders.text.chat_templates import JinjaTemplate

#: Suffix of a file, and the value of source.format that reads it; none is the end of another.
_FORMATS: Final = {
    ".tar": "webdataset",
    ".tar.gz": "webdataset",
    ".tgz": "webdataset",
    ".tar.zst": "webdataset",
    ".parquet": "parquet",
    ".arrow": "huggingface",
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".json": "json or pairs",
}
_PACK_NAME: Final = re.compile(r"[A-Za-z0-9_-]*ps_\d+\.")
_DAMAGED_MEDIA: Final = ("bad_image", "truncated_image", "bad_video", "truncated_video")
#: Names that are looked at: a source may hold millions.
_MAX_NAMES: Final = 10_000


def hint_for(reason: str, detail: str, source: SourceOptions) -> str | None:
    """Return a hint for samples set aside like this one: a change of the source's options, if
    known."""
    if reason == "missing_image":
        return _missing_image(detail, source)
    if reason == "path_outside_root":
        return _outside_root(detail)
    if reason == "bad_record" and detail.startswith(("none of '", "no prompt")):
        return "name the record's own fields in source.fields: {question: q, answer: a}"
    if reason == "bad_record" and detail.startswith("none of the answers"):
        return "all weigh 0 (loss_weight, weight, loss, train): leave such samples out"
    if reason == "bad_roles" and " is none of " in detail:
        return "rename the roles, or map them by the tags of source.format=llama_factory"
    if reason == "damaged_source":
        return "restore the file, or move it out of source.path; what else could be read is kept"
    if reason in _DAMAGED_MEDIA and "; convert it" not in detail:
        return "repair or remove it in the source"
    found = re.search(r"(?:writes|has) no (?:tool )?(calls|tools|thoughts)", detail)
    if reason == "not_in_template" and found is not None:
        templates = {name: JinjaTemplate(f.build.TEMPLATE or "") for name, f in FAMILIES.items()}
        able = ", ".join(name for name, one in templates.items() if found[1] in one.writes)
        return f"those of {able} do: set model.family and model.processor"
    if reason == "overlong":
        return "raise pack.seq_length or lower model.max_pixels"
    return None


def _missing_image(detail: str, source: SourceOptions) -> str | None:
    named = re.match(r"'(.+?)': ", detail)
    if named is None:  # no image beside the record
        wanted = {"pairs": "json", "captions": "txt"}.get(source.format, source.format)
        return describe_others(source.path, f"*.{wanted}") or None
    root = source.image_root if isinstance(source, MediaOptions) else None
    found = find_image_root(source.path, named[1])
    if found is not None and found != root:
        return f"it is under {found!r}: set source.image_root={found}"
    if root is not None:
        return f"is source.image_root={root} the folder that image names are relative to?"
    return "set source.image_root to the folder that image names are relative to"


def _outside_root(detail: str) -> str:
    linked = re.match(r"'(.+?)' is (?:behind )?a link to '(.+?)', outside", detail)
    if linked is None:
        return "set source.image_root to a folder above the images"
    name, target = (PurePosixPath(one).parts for one in linked.groups())
    pairs = zip(reversed(name), reversed(target), strict=False)
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    if same == len(name) or same > 1:
        return f"set source.image_root={PurePosixPath(*target[:-same])}"
    return (
        f"its name in the record is not the end of {linked[2]!r}: rename what the link leads to "
        "and set source.image_root to the folder that holds it, or move it to where the link is"
    )


def nothing_found(path: str, wanted: str) -> StageError:
    """Return the error of a source that holds nothing of its format; it names what it holds
    instead."""
    others = describe_others(path, wanted)
    hint = f", or {others}" if others else ""
    return StageError(f"source path {path!r} holds no {wanted}; set source.path{hint}")


def describe_others(path: str, wanted: str) -> str:
    """Describe files at a path and below that another format than the wanted one reads: '2 *.tar
    here: source.format=webdataset'; "" if there are none, or the path is remote."""
    if is_url(path):
        return ""
    names = [name.lower() for name in file_names(Path(path))]
    counts = Counter(end for name in names for end in _FORMATS if name.endswith(end))
    return ", ".join(
        f"{count:,} *{suffix} here: source.format={_FORMATS[suffix]}"
        for suffix, count in counts.most_common()
        if f"*{suffix}" != wanted
    )


def find_image_root(path: str, name: str) -> str | None:
    """Find a folder at, below or above a source from which a missing image can be reached by its
    name in the record: the value of source.image_root; or None. Where a link leads out of such a
    folder, it is the one that the name is relative to after the link."""
    if is_url(path) or name.startswith("/"):
        return None
    start = Path(path) if Path(path).is_dir() else Path(path).parent
    near = (  # the folder, the two above it, and the folders in each
        os.path.normpath(folder)
        for above in (start, start / "..", start / "../..")
        for folder in (above, *(above / one.name for one in _entries(above) if os.path.isdir(one)))
    )
    found = (_root_in(folder, os.path.normpath(name)) for folder in itertools.islice(near, 500))
    return next(filter(None, found), None)


def _root_in(folder: str, name: str) -> str | None:
    path = os.path.join(folder, name)
    if not os.path.isfile(path):  # False of a name that no file can have, where Path raises
        return None
    real, real_folder = map(os.path.realpath, (path, folder))
    if os.path.commonpath((real, real_folder)) == real_folder:
        return folder
    return real.removesuffix(f"/{name}") if real.endswith(f"/{name}") else None


#: Ends of the names of img2dataset's files on a tar.
_ABOUT_TAR: Final = re.compile(r"(_stats\.json|\.parquet)$")


def file_names(path: Path) -> list[str]:
    """Return names of the files at a path and below it, relative to it, up to a limit; for a file
    its own name. Hidden files, a run's own, and what img2dataset tells of a tar, are left out."""
    if path.is_file():
        return [path.name]
    names = dict.fromkeys(itertools.islice(_walk(path), _MAX_NAMES))
    return [name for name in names if f"{_ABOUT_TAR.sub('', name)}.tar" not in names]


def _walk(folder: Path, inside: str = "") -> Iterator[str]:
    entries = _entries(folder)
    yield from (inside + entry.name for entry in entries if not os.path.isdir(entry))
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(folder / entry.name, f"{inside}{entry.name}/")


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """List some of a folder's content, by name; nothing of a folder that cannot be read."""
    try:
        with os.scandir(folder) as found:
            some = list(itertools.islice(found, _MAX_NAMES))
    except OSError:
        return []
    seen = (entry for entry in some if not entry.name.startswith((".", "_packing")))
    return sorted(seen, key=lambda entry: entry.name)


def file_head(path: Path, name: str) -> bytes:
    """Read the first bytes of a text file at a path (which may be that file), without leading white
    space."""
    with open(path if path.is_file() else path / name, "rb") as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()


def holds_packs(path: Path, tar: str) -> bool:
    """Tell whether a tar at a path (which may be that tar) begins with a pack."""
    file = path if path.is_file() else path / tar
    with open(file, "rb") as packed, contextlib.suppress(DamagedStreamError):
        for member in TarReader(open_unpacked(packed, tar)):
            return is_pack_name(member.name)
    return False


def is_pack_name(name: str) -> bool:
    """Tell whether a file is named like a pack's: 'ps_00000000.img000.jpg'."""
    return _PACK_NAME.match(name.rpartition("/")[2]) is not None
