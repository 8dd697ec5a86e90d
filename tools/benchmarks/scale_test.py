"""Many generated records through all stages.

    python tools/benchmarks/scale_test.py [--records 1_000_000] [--workers 2] [--folder FOLDER]

Records are dialogues, half of them about one of 1,000 black pictures. Prints wall and processor
seconds, peak memory of the driver and of a worker, and files; then the same for another seq_length,
another mixture, and a tenth of new data beside the old (source.skip).
"""

import argparse
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import orjson
from PIL import Image

PICTURES = 1000


def peak_mib(pid: int | str = "self") -> float:
    """Peak memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def black_pictures(rng: np.random.Generator) -> Iterator[bytes]:
    """PICTURES black pictures of different sizes."""
    for side in rng.integers(8, 40, PICTURES).tolist():
        buffer = io.BytesIO()
        Image.new("RGB", (28 * side, 28 * (48 - side))).save(buffer, "JPEG")
        yield buffer.getvalue()


def make_records(folder: Path, first: int, count: int) -> None:
    """Dialogues as lines of JSON; every other one names a picture."""
    rng = np.random.default_rng(first)
    pictures = folder / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(black_pictures(rng)):
        (pictures / f"{number:04d}.jpg").write_bytes(data)
    words = [
        f"{a}{b}" for a in ("red", "tall", "old", "wet") for b in ("dog", "hill", "car", "sea")
    ]
    sizes = np.clip(rng.lognormal(3.6, 0.8, count), 4, 600).astype(int).tolist()
    with open(folder / f"records-{first:010d}.jsonl", "wb") as file:
        for number, size in enumerate(sizes, first):
            answer = " ".join([words[i] for i in rng.integers(0, len(words), size)])
            shown = {"image": f"pictures/{number % PICTURES:04d}.jpg"} if number % 2 else {}
            question = "<image>\nSay what it is." if shown else "Say something."
            turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
            line = {"id": f"sample-{number:010d}", **shown, "conversations": turns}
            file.write(orjson.dumps(line) + b"\n")


def run_stage(name: str, *arguments: str) -> float:
    """Run the command, print its cost, and return its processor seconds. A driver's peak is that of
    its process; a worker's the largest of its descendants."""
    before, start = os.times(), time.perf_counter()
    command = [sys.executable, "-m", "offline_packing", *arguments, "--quiet"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peaks = [0.0, 0.0]
    while process.poll() is None:
        for pid in (process.pid, *descendants(process.pid)):
            with suppress(OSError, IndexError):
                peaks[pid != process.pid] = max(peaks[pid != process.pid], peak_mib(pid))
        time.sleep(0.2)
    if process.returncode:
        raise SystemExit(f"{name}: exit status {process.returncode}")
    after, taken = os.times(), time.perf_counter() - start
    seconds = after.children_user + after.children_system
    seconds -= before.children_user + before.children_system
    load = os.getloadavg()[0]
    print(
        f"{name:<20}{seconds:9.1f} CPU s {taken:9.1f} s   driver {peaks[0]:6,.0f} MiB   "
        f"worker {peaks[1]:6,.0f} MiB   load {load:.0f}",
        flush=True,
    )
    return seconds


def descendants(pid: int) -> list[int]:
    """Processes below one."""
    with suppress(OSError):
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [one for child in map(int, found) for one in (child, *descendants(child))]
    return []


def run_records(folder: Path, count: int, workers: int) -> None:
    """Run all stages on generated records, and after changes to them."""
    data, config = folder / "data", folder / "pack.yaml"
    make_records(data, 0, count)
    source = {"format": "jsonl", "path": str(data), "task": "bmr"}
    content = {
        "source": [source],
        "model": {"family": "qwen2_vl", "processor": "builtin"},
        "output": {"path": f"{folder}/out", "media": "refer"},
        "engine": {"workers": workers},
    }
    config.write_bytes(orjson.dumps(content))
    for stage in ("measure", "plan", "write", "verify", "report"):
        run_stage(stage, stage, str(config))
    run_stage("run again", "run", str(config))
    run_stage("verify --hash-only", "verify", "--hash-only", str(config))
    run_stage("verify --samples", "verify", "--deep", "--samples=1000", str(config))
    files = sum(len(names) for _, _, names in os.walk(folder / "out"))
    size = sum(path.stat().st_size for path in (folder / "out").rglob("*") if path.is_file())
    print(f"files {files:,}, {size / count:,.0f} bytes a record")
    make_records(data, count, count // 10)
    output = {"path": f"{folder}/more", "media": "refer"}
    more = {**content, "output": output, "source": [{**source, "skip": [f"{folder}/out"]}]}
    added = folder / "more.yaml"
    added.write_bytes(orjson.dumps(more))
    run_stage("new tenth: measure", "measure", str(added))
    run_stage("new tenth: plan", "plan", str(added))
    (data / f"records-{count:010d}.jsonl").unlink()
    shorter = [str(config), "pack.seq_length=4096", "output.overwrite=true"]
    run_stage("seq_length: measure", "measure", *shorter)
    run_stage("seq_length: plan", "plan", *shorter)
    content["source"] = [{**source, "repeat": 1.5}]
    config.write_bytes(orjson.dumps(content))
    run_stage("mixture: measure", "measure", *shorter)
    run_stage("mixture: plan", "plan", *shorter)


def main() -> None:
    """Print one line per stage."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, default=None, help="where to work")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        run_records(Path(name), arguments.records, arguments.workers)


if __name__ == "__main__":
    main()
