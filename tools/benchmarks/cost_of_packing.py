"""Cost of packing a dataset in object storage, from measured rates per core and per request, and
list prices; docs/what_it_costs.md has the table.

    python tools/benchmarks/cost_of_packing.py [--samples 85_000_000] [--picture-bytes 190_000]

Processor times are those of docs/dev/benchmarks.md; hashing is measured here. A core is two of the
cloud's virtual ones. Nothing is added for machines that wait for their network.
"""

import argparse
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from offline_packing.storage.files import hash_file

#: US dollars, list prices of AWS us-east-1 as we assume them in November 2026.
CORE_HOUR = 0.0893  # of c7i on demand, half of an .xlarge's 0.1785
GET, PUT = 0.4e-6, 5e-6  # S3 Standard, per request
GB_MONTH = 0.023
PART_BYTES = 16 << 20  # of a multipart upload

#: Seconds of one core per sample: benchmark_measure.py; scale_test.py --lengths and --records.
MEASURE, PLAN, REFER, VERIFY_LINE = 136e-6, 1.3e-6, 80e-6, 35e-6
#: Seconds of one core per byte copied: benchmark_write.py.
COPY = 1 / (1520 * 2**20)
#: Of remote tars (docs/dev/benchmarks.md): bytes of a request to measure; requests per sample to
#: copy, its record and picture by one.
BLOCK, COPY_GETS = 4 << 20, 1
TEXT_BYTES = 1200  # a caption and its record
SAMPLES_PER_SHARD = 13_000  # 1,000 packs


@dataclass
class Step:
    """Use of one stage: core seconds, requests, and bytes that move."""

    name: str
    seconds: float
    gets: float = 0
    puts: float = 0
    moved: float = 0

    @property
    def dollars(self) -> float:
        """Price of cores and requests."""
        return self.seconds / 3600 * CORE_HOUR + self.gets * GET + self.puts * PUT

    def line(self) -> str:
        """A row of the table."""
        numbers = f"{self.seconds / 3600:12,.1f}{(self.gets + self.puts) / 1e6:18,.1f}"
        return f"{self.name:<20}{numbers}{self.moved / 1e12:10,.1f}{self.dollars:9,.0f}"


def hash_seconds() -> float:
    """Core seconds per byte of the hash of a file in the page cache."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "file")
        path.write_bytes(os.urandom(1 << 26))
        hash_file(path)
        start = time.process_time()
        for _ in range(4):
            hash_file(path)
        return (time.process_time() - start) / (4 << 26)


def steps_of(samples: int, picture_bytes: int, per_hashed_byte: float) -> list[Step]:
    """The stages; writing and checking packs that hold their pictures, or that refer to them."""
    stored = samples * (picture_bytes + TEXT_BYTES)
    shards = samples / SAMPLES_PER_SHARD
    parts, texts = stored / PART_BYTES, samples * TEXT_BYTES
    return [
        Step("measure", samples * MEASURE, stored / BLOCK, moved=stored),
        Step("plan, on one node", samples * PLAN),
        Step("write tars", stored * COPY, samples * COPY_GETS, parts + shards, 2 * stored),
        Step("verify their hashes", stored * per_hashed_byte, parts, moved=stored),
        Step("or write references", samples * REFER, samples, texts / PART_BYTES, 2 * texts),
        Step("verify them", samples * VERIFY_LINE, texts / PART_BYTES, moved=texts),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=85_000_000)
    parser.add_argument("--picture-bytes", type=int, default=190_000)
    given = parser.parse_args()
    print(f"{'stage':<20}{'core hours':>12}{'million requests':>18}{'TB moved':>10}{'dollars':>9}")
    per_byte = hash_seconds()
    for step in steps_of(given.samples, given.picture_bytes, per_byte):
        print(step.line())
    stored = given.samples * (given.picture_bytes + TEXT_BYTES)
    month = stored / 1e9 * GB_MONTH
    print(f"\na month of {stored / 1e12:,.1f} TB: {month:,.0f} dollars")
    print(f"hashing: {1 / per_byte / 2**30:.1f} GiB/s a core")


if __name__ == "__main__":
    main()
