"""An index of many synthetic rows through plan, a dry write, report, and a plan of another
seq_length: seconds, peak memory, and how many of the source's files were opened.

    python tools/benchmarks/scale_test.py [--rows 10_000_000] [--limit-gib 4] [--folder FOLDER]
    python tools/benchmarks/scale_test.py --lengths 100_000_000
    python tools/benchmarks/scale_test.py --records 1_000_000 [--workers 2]

With --lengths, `plan-lengths` of a Parquet file with names and lengths. With --records, all stages
of that many generated dialogues, half of them about one of 1,000 black pictures: wall
and processor seconds, peak memory of the driver and of a worker, and files; then what is read again
for another seq_length, another mixture, and a tenth of new data beside the old (source.skip).

The rows look like those of `{img,json}` pairs, but the files that they name do not exist. The dry
write builds every shard's task and its rows as Python objects, as a worker does, but reads nothing.
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
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image

from offline_packing.config.packing import PackingConfig, parse_config
from offline_packing.engines.local import LocalEngine
from offline_packing.index import table as index
from offline_packing.index.info import IndexInfo
from offline_packing.index.table import INDEX_SCHEMA
from offline_packing.plan.plan import plan, preview_plan
from offline_packing.report.report import report
from offline_packing.runs.artifacts import (
    config_fingerprint,
    library_versions,
    open_index,
    open_plan,
)
from offline_packing.runs.run import Run
from offline_packing.runs.tasks import iterate_tasks, plan_shards

_LENGTHS_AT_ONCE = 1 << 20
PICTURES = 1000


def make_part(first: int, count: int, rng: np.random.Generator) -> pa.Table:
    """Rows `first` to `first + count`: one image and some text each."""
    names = [f"folder{(first + i) // 10_000:05d}/{first + i:012d}" for i in range(count)]
    num_tokens = np.clip(rng.lognormal(6.2, 0.7, count), 20, 8192).astype(np.int32)
    grids = np.tile(np.array([1, 24, 24], np.int32), count)
    columns = {
        "key": pa.array(names, pa.large_string()),
        "key_hash": pa.array(rng.integers(0, 1 << 64, count, dtype=np.uint64)),
        "content_hash": pa.array(np.zeros(count, np.uint64)),
        "sample_hash": pa.array(rng.integers(0, 1 << 64, count, dtype=np.uint64)),
        "source_id": pa.array(np.zeros(count, np.int32)),
        "task": pa.array(["captioning"] * count),
        "num_tokens": pa.array(num_tokens),
        "num_loss_tokens": pa.array(num_tokens // 2),
        "num_vision_patches": pa.array(np.full(count, 576, np.int32)),
        "num_images": pa.array(np.ones(count, np.int32)),
        "num_videos": pa.array(np.zeros(count, np.int32)),
        "num_turns": pa.array(np.ones(count, np.int32)),
        "traits": pa.array(np.zeros(count, np.uint8)),
        "grid_thw": pa.ListArray.from_arrays(np.arange(count + 1, dtype=np.int32) * 3, grids),
        "stamp": pa.array(rng.integers(0, 1 << 64, count, dtype=np.uint64)),
        "json": _locators(names, "json", rng, INDEX_SCHEMA.field("json").type),
        "media": pa.LargeListArray.from_arrays(
            np.arange(count + 1, dtype=np.int64),
            _locators(names, "jpg", rng, INDEX_SCHEMA.field("media").type.value_type),
        ),
        "media_hash": pa.LargeListArray.from_arrays(
            np.arange(count + 1, dtype=np.int64), rng.integers(0, 1 << 64, count, dtype=np.uint64)
        ),
    }
    arrays = [
        columns[field.name].cast(field.type)
        if field.name in columns
        else pa.nulls(count, field.type)
        for field in INDEX_SCHEMA
    ]
    return pa.Table.from_arrays(arrays, schema=INDEX_SCHEMA)


def _locators(
    names: list[str], suffix: str, rng: np.random.Generator, kind: pa.StructType
) -> pa.StructArray:
    count = len(names)
    values = {
        "kind": pa.array(["file"] * count),
        "container": pa.array([f"{name}.{suffix}" for name in names], pa.large_string()),
        "offset": pa.array(np.zeros(count, np.int64)),
        "size": pa.array(rng.integers(200, 400_000, count)),
        "column": pa.array([""] * count),
        "extension": pa.array([suffix] * count),
    }
    fields = list(kind)
    return pa.StructArray.from_arrays(
        [values[field.name].cast(field.type) for field in fields], fields=fields
    )


def make_index(config: PackingConfig, run: Run, num_rows: int) -> None:
    """A complete index, part by part."""
    rng = np.random.default_rng(0)
    size = config.engine.samples_per_part
    run.workspace.index.mkdir(parents=True)
    rows = [min(size, num_rows - first) for first in range(0, num_rows, size)]
    for number, count in enumerate(rows):
        table = make_part(number * size, count, rng)
        path = run.workspace.index / index.part_name(number)
        with index.table_writer(path, INDEX_SCHEMA) as write:
            write(table)
    fingerprint = {**config_fingerprint(config), "source.0.listing": "synthetic"}
    info = IndexInfo(fingerprint, library_versions(), rows, {})
    info.save(run.workspace.index_info)


def dry_write(run: Run) -> int:
    """Make all tasks and their rows; returns the number of samples."""
    samples, packs = open_index(run), open_plan(run).packs
    shards = plan_shards(run, samples, packs)
    run.workspace.write.mkdir()
    run.workspace.started.write_text('{"output.key_prefix": ""}', "utf-8")
    tasks = iterate_tasks(run, samples, packs, shards)
    return sum(len(rows) for task in tasks for _, rows in task.packs())


def peak_mib(pid: int | str = "self") -> float:
    """Peak memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def with_half_length(run: Run) -> Run:
    """The run with packs of half the length."""
    pack = run.config.pack.model_copy(update={"seq_length": run.config.pack.seq_length // 2})
    return replace(run, config=run.config.model_copy(update={"pack": pack}))


def note_opened(opened: list[str], source: Path, event: str, values: tuple[object, ...]) -> None:
    """An audit hook: keeps the names of the files below the source that are opened."""
    if event == "open" and str(values[0]).startswith(f"{source}/"):
        opened.append(str(values[0]))


def make_lengths(path: Path, count: int) -> None:
    """A Parquet file of names and lengths."""
    rng = np.random.default_rng(0)
    schema = pa.schema([("key", pa.large_string()), ("num_tokens", pa.int32())])
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for first in range(0, count, _LENGTHS_AT_ONCE):
            own = min(_LENGTHS_AT_ONCE, count - first)
            names = pa.array(np.arange(first, first + own)).cast(pa.large_string())
            keys = pc.binary_join_element_wise(
                pa.scalar("sample", names.type), names, pa.scalar("/", names.type)
            )
            lengths = np.clip(rng.lognormal(6.2, 0.7, own), 20, 8192).astype(np.int32)
            writer.write_table(pa.table([keys, pa.array(lengths)], schema=schema))


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
    """Run the command, print what it takes, and return its processor seconds. A driver's peak is
    that of its process; a worker's the largest of its descendants."""
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
    """All stages of generated records, and those of changes to them."""
    data, config = folder / "data", folder / "pack.yaml"
    make_records(data, 0, count)
    source = {"format": "jsonl", "path": str(data), "task": "bmr"}
    content = {
        "source": [source],
        "model": {"family": "qwen2_vl", "processor": "builtin"},
        "output": {"path": f"{folder}/out", "layout": "references"},
        "engine": {"workers": workers},
    }
    config.write_bytes(orjson.dumps(content))
    for stage in ("measure", "plan", "write", "verify", "report"):
        run_stage(stage, stage, str(config))
    run_stage("verify --hash-only", "verify", "--hash-only", str(config))
    run_stage("verify --samples", "verify", "--deep", "--samples=1000", str(config))
    files = sum(len(names) for _, _, names in os.walk(folder / "out"))
    size = sum(path.stat().st_size for path in (folder / "out").rglob("*") if path.is_file())
    print(f"files {files:,}, {size / count:,.0f} bytes a record")
    make_records(data, count, count // 10)
    output = {"path": f"{folder}/more", "layout": "references"}
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
    """Print one line per stage; exit with 1 above the limit."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--limit-gib", type=float, default=4)
    parser.add_argument("--folder", type=Path, default=None, help="where to work")
    parser.add_argument("--lengths", type=int, help="of plan-lengths instead")
    parser.add_argument("--records", type=int, help="through all stages instead")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        if arguments.records:
            run_records(Path(name), arguments.records, arguments.workers)
            return
        if arguments.lengths:
            lengths, config_file = Path(name, "lengths.parquet"), Path(name, "pack.yaml")
            make_lengths(lengths, arguments.lengths)
            config_file.write_text("pack: {seq_length: 8192}")
            output = f"--output={name}/assignment.parquet"
            run_stage("plan-lengths", "plan-lengths", str(config_file), str(lengths), output)
            return
        source = Path(name) / "source"
        source.mkdir()
        config = parse_config(
            {
                "source": {"format": "pairs", "path": str(source), "task": "captioning"},
                "output": {"path": f"{name}/out", "max_shard_bytes": 2 << 30},
                "engine": {"workers": 0},
            }
        )
        run = Run(config, LocalEngine(0))
        opened: list[str] = []
        sys.addaudithook(lambda event, values: note_opened(opened, source, event, values))
        start = time.perf_counter()
        for what in ("index", "plan", "dry write", "report", "plan again"):
            if what == "index":
                make_index(config, run, arguments.rows)
            elif what == "plan":
                plan(run, open_index(run))
            elif what == "dry write":
                assert dry_write(run) == arguments.rows
            elif what == "report":
                report(run)
            else:
                preview_plan(with_half_length(run), open_index(run))
            taken, start = time.perf_counter() - start, time.perf_counter()
            print(f"{what:<12}{taken:8.1f} s   peak {peak_mib():7,.0f} MiB", flush=True)
        print(f"files of the source opened: {len(opened)}")
    sys.exit(bool(opened) or peak_mib() > arguments.limit_gib * 1024)


if __name__ == "__main__":
    main()
