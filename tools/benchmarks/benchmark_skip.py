"""Cost of `source.skip`: measuring new samples among many that another output already has.

    PYTHONPATH=. python tools/benchmarks/benchmark_skip.py [--samples 60000] [--new 600]

Makes captioning pairs, packs all but the new ones, then measures into two outputs:
everything, and with `source.skip` only the new ones. Prints processor time (of this process, which
does all the work: engine.workers=0) and how many samples are in both outputs.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from offline_packing.config.packing import parse_config
from offline_packing.engines.local import LocalEngine
from offline_packing.measure.measure import measure
from offline_packing.plan.plan import plan
from offline_packing.runs.artifacts import open_index
from offline_packing.runs.run import Run
from offline_packing.write.write import write
from tests.helpers.datasets import WORDS, image_bytes, write_json


def make_pairs(root: Path, first: int, end: int) -> None:
    """Pictures of some sizes, in folders of 1,000, with captions as long as ShareGPT4V's: about 940
    characters on average."""
    rng = np.random.default_rng(first)
    images = [image_bytes(28 * (4 + i), 28 * (12 - i)) for i in range(8)]
    for i in range(first, end):
        stem = root / f"{i // 1000:04d}" / f"{i:08d}"
        caption = " ".join(rng.choice(WORDS, rng.integers(100, 300)))
        write_json(stem.with_suffix(".json"), {"captions": [{"content": caption}]})
        stem.with_suffix(".jpg").write_bytes(images[i % len(images)])


def make_run(root: Path, output: Path, skip: Path | None = None) -> Run:
    """A run in this process."""
    source: dict[str, Any] = {"format": "pairs", "path": str(root), "task": "captioning"}
    if skip is not None:
        source["skip"] = str(skip)
    config = parse_config(
        {"source": source, "output": {"path": str(output)}, "engine": {"workers": 0}}
    )
    return Run(config, LocalEngine(0))


def processor_seconds(function: Callable[[], object]) -> float:
    """Seconds of one call."""
    begin = time.process_time()
    function()
    return time.process_time() - begin


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--new", type=int, default=600)
    parser.add_argument("--folder", type=Path, help="a new folder; default: a temporary one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        data, old = folder / "data", make_run(folder / "data", folder / "old")
        make_pairs(data, 0, arguments.samples - arguments.new)
        samples = measure(old)  # also loads the tokenizer, which counts for neither
        write(old, samples, plan(old, samples))
        make_pairs(data, arguments.samples - arguments.new, arguments.samples)
        new = make_run(data, folder / "new", skip=folder / "old")
        everything = make_run(data, folder / "all")
        seconds = {
            "source.skip": processor_seconds(lambda: measure(new)),
            "everything": processor_seconds(lambda: measure(everything)),
        }
        keys = [set(open_index(run).table("key")["key"].to_pylist()) for run in (old, new)]
    for name, value in seconds.items():
        print(f"{name:<12}{value:8.2f} s of processor time")
    share = seconds["source.skip"] / seconds["everything"]
    print(f"{share:.1%}; {len(keys[1]):,} new samples, {len(keys[0] & keys[1]):,} in both outputs")


if __name__ == "__main__":
    main()
