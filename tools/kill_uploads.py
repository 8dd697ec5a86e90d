"""Kill runs that write to object storage, fail their requests, and deny their writes.

    python -m tools.kill_uploads [--kills 60] [--workers 0] [--seed 0] [--media copy]

As kill_test.py, but the output is s3:// on a server of moto, whose uploads have many parts and take
some time. A kill ends a process group, or with workers every other time one worker. In the end a
tenth of a run's requests fail, and other runs are denied all writes after the first few: they must
end with an error. Every named object must at any moment equal one of an undisturbed local run;
after a complete run, all must be there, and no unfinished upload.
"""

import argparse
import os
import random
import signal
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from offline_packing.config.packing import PackingConfig
from offline_packing.runs.run import open_encoder
from tests.helpers.object_store import Faults, ObjectStore, serve_objects
from tools.kill_test import (
    content,
    differences,
    ended_well,
    kill_after,
    make_config,
    make_samples,
    pack,
    stage_of,
    start,
)

#: So that shards of two small packs are sent in parts.
_PART_BYTES = 1024
_SECONDS_PER_WRITE = 0.02
_NUM_SAMPLES = 16
_BUCKET = "packed"


@dataclass
class Trials:
    """Settings that all runs share."""

    store: ObjectStore
    source: Path
    expected: dict[str, bytes]
    workers: int
    media: str
    dice: random.Random

    def config(self, name: str) -> PackingConfig:
        """A run of its own."""
        place = f"s3://{_BUCKET}/{name}"
        return make_config(self.source, place, self.workers, self.media)

    def check(self, name: str, when: str, *, complete: bool) -> None:
        """Raise SystemExit if something was lost, left over, or is half-written."""
        found = self.store.objects(f"s3://{_BUCKET}/{name}")
        if wrong := differences(found, self.expected, complete=complete):
            raise SystemExit(f"{name}: differs {when}: {wrong}")
        if complete and (left := self.store.unfinished_uploads(_BUCKET)):
            raise SystemExit(f"{name}: unfinished uploads {when}: {left}")

    def kill(self, name: str, seconds: float) -> tuple[str, int] | None:
        """Kill a run at a random moment; the stage it was in, and unfinished uploads that it left.
        None: it had ended."""
        config = self.config(name)
        process, moment = start(lambda: pack(config)), self.dice.uniform(0, seconds)
        if self.workers and self.dice.random() < 0.5:
            killed = kill_worker_after(process, moment, self.dice)
        else:
            killed = kill_after(process, moment)
        if not killed:
            return None
        time.sleep(0.5)  # the server may still be at work on the last requests
        self.check(name, "after a kill", complete=False)
        return stage_of(set(self.store.keys(f"s3://{_BUCKET}/{name}"))), len(
            self.store.unfinished_uploads(_BUCKET)
        )

    def complete(self, name: str, when: str) -> None:
        """Run to the end."""
        config = self.config(name)
        if not ended_well(start(lambda: pack(config))):
            raise SystemExit(f"{name}: the run failed {when}")
        self.check(name, when, complete=True)

    def be_denied(self, name: str, writes: int) -> None:
        """A run must fail when it may not write any more, and be completed when it may."""
        config = self.config(name)
        self.store.set_faults(Faults(writes_allowed=writes))
        if ended_well(start(lambda: pack(config))):
            raise SystemExit(f"{name}: ended well, though writes were denied after {writes}")
        self.store.set_faults()
        self.check(name, f"after {writes} writes", complete=False)
        self.complete(name, f"after {writes} writes")


def kill_worker_after(process: int, seconds: float, dice: random.Random) -> bool:
    """Kill one worker of a run, or without any the run; False if it ended well."""
    time.sleep(seconds)
    children = Path(f"/proc/{process}/task/{process}/children")
    found = [int(one) for one in children.read_text().split()] if children.exists() else []
    with suppress(ProcessLookupError):  # it has ended since
        os.kill(dice.choice([*filter(is_worker, found)] or [process]), signal.SIGKILL)
    ended = os.waitpid(process, 0)[1] == 0
    return not ended


def is_worker(process: int) -> bool:
    """Whether a process, which may have ended, is a worker."""
    with suppress(OSError):
        return b"spawn_main" in Path(f"/proc/{process}/cmdline").read_bytes()
    return False


def run(base: Path, store: ObjectStore, num_kills: int, workers: int, seed: int, media: str) -> str:
    """All trials; returns what happened."""
    dice = random.Random(seed)
    make_samples(base / "source", 0, _NUM_SAMPLES)
    local = make_config(base / "source", base / "local", 0, media)
    open_encoder(local.model)  # loaded once, before the forks
    pack(local)
    trials = Trials(store, base / "source", content(base / "local"), workers, media, dice)
    store.set_faults(Faults(write_seconds=_SECONDS_PER_WRITE))
    begin = time.perf_counter()
    trials.complete("undisturbed", "undisturbed")
    seconds = time.perf_counter() - begin
    num_writes = store.counts()["writes"]
    kills: Counter[str] = Counter()
    num_left = num_trials = 0
    while kills.total() < num_kills:
        name = f"killed{num_trials}"
        num_trials += 1
        if (killed := trials.kill(name, seconds)) is None:
            seconds *= 0.8  # other programs have ended since it was measured
        while killed is not None:
            kills[killed[0]] += 1
            num_left += killed[1]
            killed = trials.kill(name, seconds) if dice.random() < 1 / 3 else None
        trials.complete(name, "after kills")
    store.fail(0.1, seed)
    trials.complete("failing", "with failing requests")
    num_failed = store.counts()["failed"]
    for writes in sorted(dice.sample(range(num_writes), 5)):
        trials.be_denied(f"denied{writes}", writes)
    stages = ", ".join(f"{stage} {count}" for stage, count in sorted(kills.items()))
    return (
        f"undisturbed: {seconds:.1f} s, {len(trials.expected)} objects, {num_writes} writes; "
        f"workers: {workers}\n{kills.total()} kills ({stages}) left {num_left} uploads; every "
        f"rerun made the local run's objects and left none; so did a run with {num_failed} failed "
        "requests, and 5 that were denied writes, when they were run again"
    )


def main() -> None:
    """Run the trials, and print what happened."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--media", default="copy")
    arguments = parser.parse_args()
    own = arguments.kills, arguments.workers, arguments.seed, arguments.media
    with tempfile.TemporaryDirectory() as name, serve_objects(_PART_BYTES) as store:
        os.environ.update(store.environment)
        store.make_bucket(_BUCKET)
        print(run(Path(name), store, *own))


if __name__ == "__main__":
    main()
