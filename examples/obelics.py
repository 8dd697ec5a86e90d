"""OBELICS with files in the place of addresses: list these, and after img2dataset write the lines.

python examples/obelics.py urls PARQUET_FOLDER URLS.txt
python examples/obelics.py records PARQUET_FOLDER IMAGE_FOLDER OUT.jsonl

A picture that could not be downloaded is left out of its document.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq


def rows(folder: str, *columns: str) -> Iterator[dict[str, Any]]:
    """Rows of all Parquet files below a folder."""
    for path in sorted(Path(folder).rglob("*.parquet")):
        for batch in pq.ParquetFile(path).iter_batches(columns=list(columns)):
            yield from batch.to_pylist()


def urls(documents: str, output: str) -> None:
    found = {url for row in rows(documents, "images") for url in row["images"] if url}
    Path(output).write_text("".join(f"{url}\n" for url in sorted(found)))


def records(documents: str, images: str, output: str) -> None:
    # img2dataset writes 00000/000000012.jpg, and 00000.parquet with its key and address.
    files = {
        row["url"]: f"{row['key'][:-4]}/{row['key']}.jpg"
        for row in rows(images, "url", "key", "status")
        if row["status"] == "success"
    }
    with open(output, "w") as lines:
        for row in rows(documents, "texts", "images"):
            names = [files.get(url) if url else None for url in row["images"]]
            kept = [(t, n) for t, n in zip(row["texts"], names, strict=True) if t or n]
            if kept:
                texts, names = map(list, zip(*kept, strict=True))
                lines.write(json.dumps({"texts": texts, "images": names}) + "\n")


if __name__ == "__main__":
    {"urls": urls, "records": records}[sys.argv[1]](*sys.argv[2:])
