"""A plan in many parts from an index in many parts, for datasets larger than memory.

::

    FOLDER/part-00000/   plan.json, *.npy   the packs that became ready while index part 0 was read
                         state.npz          the samples that wait, written before plan.json
    FOLDER/part-…/       one folder per index part, and one for the samples that waited at the end
    FOLDER/parts.json    written last: the plan is complete

Sample ids are row numbers of the whole index. A killed run goes on after its last complete part,
with the same result.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from offline_packing.errors import StageError
from offline_packing.planner.admission import admit_samples
from offline_packing.planner.pack_plan import PackPlan, PlanInfo
from offline_packing.planner.windows import WindowOptions, WindowPlanner
from offline_packing.storage.files import (
    atomic_file,
    hash_bytes,
    read_json,
    to_json,
    write_atomically,
)


def read_num_tokens(paths: Iterable[Path]) -> Iterator[np.ndarray]:
    """Lengths of the samples of each Parquet part of an index, one part in memory at a time."""
    for path in paths:
        yield pq.read_table(path, columns=["num_tokens"])["num_tokens"].to_numpy()


def plan_parts(
    parts: Iterable[np.ndarray],
    folder: str | Path,
    options: WindowOptions,
    *,
    pad_multiple: int = 1,
) -> dict[str, Any]:
    """Plan ``parts``, integer arrays (n,) of num_tokens, and write one part of the plan for each.

    Samples that no pack can hold are set aside, as by :func:`offline_packing.plan_packs`. Needs
    memory for one part. Returns what parts.json holds: settings and numbers of samples, packs and
    tokens. Raises StageError if the folder holds a plan of other lengths or with other settings.
    """
    folder = Path(folder)
    settings = {"window_options": asdict(options), "pad_multiple": pad_multiple}
    totals = dict.fromkeys(("num_samples", "num_set_aside", "num_packs", "num_tokens"), 0)
    planner = WindowPlanner(options)
    history = ""  # hash of all lengths so far: a part depends on what waited before it
    number = 0
    for number, num_tokens in enumerate(parts, start=1):
        part = folder / _part_name(number - 1)
        history = hash_bytes(history.encode() + np.ascontiguousarray(num_tokens).tobytes())
        source = {**settings, "lengths_hash": history}
        if _is_complete(part, source):
            plan = PackPlan.load(part)
            planner = _load_planner(part, options)
        else:
            plan = _plan_part(planner, num_tokens, totals["num_samples"], pad_multiple, source)
            _save_planner(part, planner)
            plan.save(part)
        _count(totals, plan, len(num_tokens))
    nothing = np.zeros(0, np.int32)
    plan = _plan_part(planner, nothing, 0, pad_multiple, settings, last=True)
    plan.save(folder / _part_name(number))
    _count(totals, plan, 0)
    document = {"num_parts": number + 1, **totals, **settings}
    write_atomically(folder / "parts.json", to_json(document))
    return document


def load_parts(folder: str | Path) -> Iterator[PackPlan]:
    """The parts of a complete plan, in order, their arrays on disk.

    Raises FileNotFoundError if the plan is absent or incomplete.
    """
    document = read_json(Path(folder) / "parts.json")
    if document is None:
        raise FileNotFoundError(
            f"no complete plan in {folder}: parts.json is missing; plan again, complete parts are "
            "kept"
        )
    for number in range(document["num_parts"]):
        yield PackPlan.load(Path(folder) / _part_name(number))


def _part_name(number: int) -> str:
    return f"part-{number:05d}"


def _plan_part(
    planner: WindowPlanner,
    num_tokens: np.ndarray,
    first_row: int,
    pad_multiple: int,
    settings: dict[str, Any],
    *,
    last: bool = False,
) -> PackPlan:
    """The packs that become ready with one more part of the index, or with its end."""
    options = planner.options
    admission = admit_samples(num_tokens, options.seq_length, pad_multiple=pad_multiple)
    rows = np.arange(len(num_tokens)) if admission.sample_ids is None else admission.sample_ids
    tokens = planner.waiting_tokens + int(admission.lengths.sum(dtype=np.int64))
    packs = planner.push(admission.lengths, first_row + rows.astype(np.int64))
    if last:
        packs = planner.finish()
    tokens -= planner.waiting_tokens
    info = PlanInfo(
        seq_length=options.seq_length,
        strategy="window_fill",
        seed=options.seed,
        pad_multiple=pad_multiple,
        num_tokens=tokens,
        lower_bound=-(-tokens // options.seq_length),
        reason_names=admission.reason_names,
        settings=settings,
    )
    aside = first_row + admission.set_aside_ids.astype(np.int64)
    return PackPlan(packs.sample_ids, packs.pack_offsets, aside, admission.set_aside_reasons, info)


def _count(totals: dict[str, int], plan: PackPlan, num_samples: int) -> None:
    totals["num_samples"] += num_samples
    totals["num_set_aside"] += len(plan.set_aside_ids)
    totals["num_packs"] += plan.num_packs
    totals["num_tokens"] += plan.info.num_tokens


def _is_complete(part: Path, settings: dict[str, Any]) -> bool:
    """Whether a part was planned; StageError if from other lengths or with other settings."""
    document = read_json(part / "plan.json")
    if document is None:
        return False
    if document["settings"] != settings:
        raise StageError(
            f"{part} was planned from other lengths or with other settings "
            f"({document['settings']}, now {settings}); remove the folder, or choose another"
        )
    return True


def _save_planner(part: Path, planner: WindowPlanner) -> None:
    """What waits after a part; the options are in plan.json."""
    part.mkdir(parents=True, exist_ok=True)
    state = planner.state()
    del state["options"]
    with atomic_file(part / "state.npz") as file:
        np.savez(file, allow_pickle=False, **state)


def _load_planner(part: Path, options: WindowOptions) -> WindowPlanner:
    with np.load(part / "state.npz", allow_pickle=False) as arrays:
        return WindowPlanner.from_state({"options": asdict(options), **arrays})
