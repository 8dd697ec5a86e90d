"""Count the files, functions and moves between files that the first batch of packs goes through.

    OFFLINE_PACKED_DATA=1 OFFLINE_PACKING_VQA=1 python tools/count_calls.py out/packed --list

The loader reads in this process, so that all calls are seen. Comprehensions, lambdas and modules
count for none; a function counts once, however often it is called.
"""

import argparse
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from megatron.energon import WorkerConfig, get_savable_loader

from launch.data.packed_data import read_packed_data
from task_encoders.loading.packed_dataset import get_packed_train_dataset
from task_encoders.packed_task_encoder import PackedTaskEncoder

ROOT = f"{Path(__file__).resolve().parents[1]}/"


class Calls:
    """Functions of this project in the order of their first calls; use it as a profiler."""

    def __init__(self) -> None:
        #: (file, qualified name) -> calls
        self.functions: dict[tuple[str, str], int] = {}
        self.moves = 0
        self._last = ""

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        path, name = frame.f_code.co_filename, frame.f_code.co_qualname
        if event != "call" or not path.startswith(ROOT) or "/.venv/" in path or name[-1] == ">":
            return
        called = path.removeprefix(ROOT), name
        self.functions[called] = self.functions.get(called, 0) + 1
        self.moves += self._last not in ("", path)
        self._last = path


def first_batch_calls(folder: Path) -> Calls:
    """The calls until the first batch of a folder of packs is there."""
    data, calls = read_packed_data(folder), Calls()
    task_encoder = PackedTaskEncoder(seq_length=data.seq_length, model=data.model)
    here = WorkerConfig(rank=0, world_size=1, num_workers=0)
    rows = iter(
        get_savable_loader(get_packed_train_dataset(folder, task_encoder, worker_config=here))
    )
    sys.setprofile(calls)
    try:
        next(rows)
    finally:
        sys.setprofile(None)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--list", action="store_true", help="name the functions of each file")
    options = parser.parse_args()
    calls = first_batch_calls(options.folder)
    by_file: dict[str, list[str]] = {}
    for path, name in calls.functions:
        by_file.setdefault(path, []).append(name)
    print(f"{len(by_file)} files, {len(calls.functions)} functions, {calls.moves} moves")
    for path, names in sorted(by_file.items()) if options.list else ():
        print(f"{path}: {', '.join(names)}")


if __name__ == "__main__":
    main()
