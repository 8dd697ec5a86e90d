"""Kill runs at random moments, run them again, and compare with an undisturbed run.

    python tools/kill_test.py [--kills 200] [--workers 0] [--seed 0] [--media copy]

Each trial packs a small dataset into a new folder in a process of its own and kills it (SIGKILL,
with its workers) at a random moment of measure, plan or write. Whatever then has a final name
must be complete: equal to the undisturbed run's file. One rerun in three is killed again. The last
rerun must end with the undisturbed run's files, byte for byte, and nothing else.
"""

import argparse
import os
import random
import re
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import orjson
from PIL import Image
from tqdm import tqdm

from offline_packing.config.packing import PackingConfig, parse_config
from offline_packing.measure.measure import measure
from offline_packing.plan.plan import plan
from offline_packing.runs.run import Run, build_engine, open_encoder
from offline_packing.write.write import write

#: Gone when a stage is complete: what a measure has to do, and shards that are not joined yet.
_PASSING = re.compile(r"\.tmp(-journal)?$|\.started\.json$|-\d{6}\.(jsonl|bin)$")
_WORDS = "a red circle stands left of the small blue square below two green stars".split()


def make_samples(folder: Path, first: int, end: int) -> None:
    """Pictures with captions, one in ten with a broken JSON."""
    rng = np.random.default_rng(first)
    folder.mkdir(exist_ok=True)
    for i in range(first, end):
        width, height = (28 * int(n) for n in rng.integers(2, 8, 2))
        Image.new("RGB", (width, height), (i % 256, 100, 50)).save(folder / f"{i:04d}.png")
        record = orjson.dumps({"caption": " ".join(rng.choice(_WORDS, rng.integers(2, 60)))})
        (folder / f"{i:04d}.json").write_bytes(record[:-1] if i % 10 == 9 else record)


def make_config(source: Path, output: Path | str, workers: int, media: str) -> PackingConfig:
    """Small parts and shards, so that a kill can fall between any two."""
    return parse_config(
        {
            "source": {"format": "pairs", "path": str(source), "task": "captioning"},
            "model": {"max_pixels": 28 * 28 * 64},
            "pack": {"seq_length": 512},
            "output": {
                "path": str(output),
                "media": media,
                "packs_per_shard": 2,
                "split": {"train": 0.7, "val": 0.3},
            },
            "engine": {"workers": workers, "samples_per_part": 8},
        }
    )


def pack(config: PackingConfig) -> None:
    """measure, plan and write."""
    with build_engine(config.engine) as engine:
        run = Run(config, engine)
        with run.workspace.lock():
            samples = measure(run)
            write(run, samples, plan(run, samples))


def start(function: Callable[[], object]) -> int:
    """Fork a process in a group of its own, which exits with 0 if all went well. Its bars have a
    lock of their own: killed in that of all processes, it would stop the parent's for good."""
    process = os.fork()
    if process:
        return process
    os.setpgid(0, 0)
    tqdm.set_lock(threading.RLock())
    status = 1
    try:
        function()
        status = 0
    finally:
        os._exit(status)


def ended_well(process: int) -> bool:
    """Wait for a process."""
    return os.waitpid(process, 0)[1] == 0


def kill_after(process: int, seconds: float) -> bool:
    """Kill a process and its workers; False if it had ended before."""
    time.sleep(seconds)
    try:
        os.killpg(process, signal.SIGKILL)
    except ProcessLookupError:  # killed before it had its own group
        os.kill(process, signal.SIGKILL)
    return os.waitpid(process, 0)[1] != 0


def content(output: Path) -> dict[str, bytes]:
    """Content of every file but the lock."""
    paths = [path for path in output.rglob("*") if not path.is_dir() and path.name != "lock"]
    return {str(path.relative_to(output)): path.read_bytes() for path in paths}


def stage_of(names: set[str]) -> str:
    """The stage that a killed run was in, by the names of its files."""
    if "manifest.json" in names:
        return "after write"
    if "_packing/plan.json" in names:
        return "write"
    return "plan" if "_packing/measure.json" in names else "measure"


def differences(
    found: dict[str, bytes], expected: dict[str, bytes], *, complete: bool
) -> list[str]:
    """Names of files that are not as in the undisturbed run."""
    if complete:
        return sorted(name for name, _ in found.items() ^ expected.items())
    final = (name for name in found if not _PASSING.search(name))
    return sorted(name for name in final if found[name] != expected.get(name))


def trial(
    config: PackingConfig, expected: dict[str, bytes], seconds: float, dice: random.Random
) -> list[str]:
    """One output, killed once or more; returns the stages in which it was killed.

    Raises:
        SystemExit: something was lost, left over, or half-written under a final name.
    """
    output = Path(config.output.path)
    stages: list[str] = []
    while not stages or dice.random() < 1 / 3:
        if not kill_after(start(lambda: pack(config)), dice.uniform(0, seconds)):
            break  # it had ended
        found = content(output)
        stages.append(stage_of({*found}))
        if wrong := differences(found, expected, complete=False):
            raise SystemExit(f"{output}: half-written after a kill in {stages[-1]}: {wrong}")
    if not ended_well(start(lambda: pack(config))):
        raise SystemExit(f"{output}: the rerun failed after kills in {stages}")
    wrong = differences(content(output), expected, complete=True)
    if wrong:
        raise SystemExit(f"{output}: differs after kills in {stages}: {wrong}")
    return stages


def run(base: Path, num_kills: int, workers: int, seed: int, media: str = "copy") -> Counter[str]:
    """Trials until `num_kills` kills; returns the kills by stage."""
    dice = random.Random(seed)
    make_samples(base / "source", 0, 60)
    reference = make_config(base / "source", base / "reference", workers, media)
    open_encoder(reference.model)  # loaded once, before the forks
    pack(make_config(base / "source", base / "warm", 0, media))
    begin = time.perf_counter()
    if not ended_well(start(lambda: pack(reference))):
        raise SystemExit("the undisturbed run failed")
    seconds = time.perf_counter() - begin
    expected = content(base / "reference")
    kills: Counter[str] = Counter()
    while kills.total() < num_kills:
        output = base / f"trial{kills.total()}"
        config = make_config(base / "source", output, workers, media)
        kills.update(trial(config, expected, seconds, dice))
        shutil.rmtree(output)
    print(f"undisturbed run: {seconds:.2f} s, {len(expected)} files; workers: {workers}")
    return kills


def main() -> None:
    """Run the trials and print how many kills fell into which stage."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--media", choices=["copy", "refer"], default="copy")
    parser.add_argument("--folder", type=Path, default=None, help="where to work")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        own = arguments.kills, arguments.workers, arguments.seed, arguments.media
        kills = run(Path(name), *own)
    stages = ", ".join(f"{run} {count}" for run, count in sorted(kills.items()))
    print(f"{kills.total()} kills ({stages}); every rerun wrote the undisturbed run's files")


if __name__ == "__main__":
    main()
