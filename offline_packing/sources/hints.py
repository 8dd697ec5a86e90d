"""A hint on samples of a source that are set aside: one line, or none."""

import re
from typing import Final

from offline_packing.sources.options import MediaOptions, SourceOptions
from offline_packing.sources.roots.contents import describe_others, find_image_root

#: Suffix that a format reads, for those whose folders may hold the wrong files.
_READ: Final = {"pairs": "*.json", "json": "*.json", "jsonl": "*.jsonl", "parquet": "*.parquet"}


def hint_for(reason: str, detail: str, source: SourceOptions) -> str | None:
    """What to change in a source's configuration, if that is known.

    Args:
        reason: a name in REASONS.
        detail: of one sample that was set aside for it.
    """
    if reason == "missing_image":
        image_root = source.image_root if isinstance(source, MediaOptions) else None
        return _missing_image(detail, source.path, source.format, image_root)
    if reason == "path_outside_root":
        return "set source.image_root to a folder above the images"
    if reason == "bad_record" and detail.startswith(("none of ", "no prompt")):
        return "name the record's own fields in source.fields: {question: q, answer: a}"
    if reason == "overlong":
        return "raise pack.seq_length or lower model.max_pixels"
    return None


def _missing_image(
    detail: str, path: str, source_format: str, image_root: str | None
) -> str | None:
    named = re.match(r"'(.+?)': ", detail)
    if named is None:  # no image beside the record
        return describe_others(path, _READ.get(source_format, "")) or None
    found = find_image_root(path, named[1])
    if found is not None and found != image_root:
        return f"it is under {found!r}: set source.image_root={found}"
    if image_root is not None:
        return f"is source.image_root={image_root} the folder that image names are relative to?"
    return "set source.image_root to the folder that image names are relative to"
