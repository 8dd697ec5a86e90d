"""Several questions on one image -> `{img, json}` pairs: numbered copies, or one dialogue.

    python tools/convert_questions.py jsonl questions.jsonl pairs/ --form dialogue --max-turns 8
    python tools/convert_questions.py parquet data/ pairs/ --form copies --fields question=q

A record may ask several questions in lists; one with messages is a conversation, which stays whole.
FORMAT is any source format of `offline-packing`. Samples without an image are written as they are,
those with several are left out and listed. A dialogue may outgrow a sequence: --max-turns.
"""

import argparse
import sys
from pathlib import Path

from offline_packing.errors import StageError
from offline_packing.sources import source_class
from offline_packing.upkeep.questions import FORMS, group_by_image, read_samples, write_pairs


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("format", help="pairs, json, jsonl, parquet, webdataset, ...")
    parser.add_argument("path", help="the source")
    parser.add_argument("output", type=Path, help="folder for the pairs; must not exist")
    parser.add_argument("--form", choices=FORMS, required=True)
    parser.add_argument("--max-turns", type=int, default=16, help="of a dialogue (default: 16)")
    parser.add_argument("--image-root", help="image paths are relative to this folder")
    parser.add_argument("--fields", nargs="*", default=[], metavar="NAME=PLACE")
    given = parser.parse_args(arguments)
    fields = dict(field.split("=", 1) for field in given.fields)
    if given.output.exists():
        parser.error(f"{given.output} exists; choose another folder")
    skipped: list[str] = []
    try:
        source = source_class(given.format)(
            given.path,
            "bmr",
            image_root=given.image_root,
            fields=fields,
            unpack_folder=given.output / ".unpacked",
        )
        found = read_samples(source, skipped, split_lists=given.form == "copies")
        if given.form == "dialogue":
            found = group_by_image(found, given.max_turns)
        count = write_pairs(source, found, given.output)
    except StageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {count:,} pairs to {given.output}; left out {len(skipped):,}")
    for line in skipped[:20]:
        print(f"  {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
