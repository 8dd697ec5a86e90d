"""How long it takes to append a few samples to a large dataset.

    python tools/benchmark_append.py [--samples 200_000] [--share 0.01] [--format jsonl|webdataset]

Tiny samples in files of 1,000 are packed; then files with a share of new ones stand beside the old
and are appended, and after that nothing is new. Processor time of one process on local disk, with
text only: what must be done for every sample is all there is to do.
"""

import argparse
import io
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np
import orjson

from offline_packing.config.packing import parse_config
from offline_packing.engines.local import LocalEngine
from offline_packing.measure.measure import measure
from offline_packing.plan.plan import plan
from offline_packing.runs.run import Stage, open_encoder
from offline_packing.upkeep.append import append
from offline_packing.write.write import write

SAMPLES_PER_FILE = 1_000
WORDS = "the red circle stands left of a small blue square below two green stars".split()


def make_files(folder: Path, first: int, end: int, source_format: str) -> None:
    """Samples `first` to `end`, of a question and an answer each."""
    rng = np.random.default_rng(first)
    for start in range(first, end, SAMPLES_PER_FILE):
        records = [
            orjson.dumps(
                {
                    "id": f"{i:09d}",
                    "question": f"What is in picture {i}?",
                    "answer": " ".join(rng.choice(WORDS, rng.integers(5, 40))),
                }
            )
            for i in range(start, min(start + SAMPLES_PER_FILE, end))
        ]
        if source_format == "jsonl":
            (folder / f"{start:09d}.jsonl").write_bytes(b"\n".join(records) + b"\n")
            continue
        with tarfile.open(folder / f"{start:09d}.tar", "w") as tar:
            for i, record in enumerate(records, start):
                member = tarfile.TarInfo(f"{i:09d}.json")
                member.size = len(record)
                tar.addfile(member, io.BytesIO(record))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--format", choices=("jsonl", "webdataset"), default="jsonl")
    parser.add_argument("--folder", type=Path, default=None, help="where to work")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        source = Path(name) / "source"
        source.mkdir()
        make_files(source, 0, arguments.samples, arguments.format)
        config = parse_config(
            {
                "source": {"format": arguments.format, "path": str(source), "task": "vqa"},
                "output": {"path": f"{name}/out"},
                "engine": {"workers": 0},
            }
        )
        open_encoder(config.model)  # reading the vocabulary takes as long as many samples
        stage = Stage(config, LocalEngine(0))
        seconds: dict[str, float] = {}
        added = round(arguments.samples * arguments.share)
        for what, function in (
            ("measure", measure),
            ("plan", plan),
            ("write", write),
            (f"append {added:,}", append),
            ("append nothing", append),
        ):
            if function is append and added:
                make_files(source, arguments.samples, arguments.samples + added, arguments.format)
                added = 0
            begin = time.process_time()
            function(stage)
            seconds[what] = time.process_time() - begin
            share = seconds[what] / seconds["measure"]
            print(f"{what:<16}{seconds[what]:8.2f} s{share:9.1%} of measure", flush=True)


if __name__ == "__main__":
    main()
