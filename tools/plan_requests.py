"""Print what `plan_packs` answers to 600 random requests, plans or refusals, and 40 schedules.

    python tools/plan_requests.py > before.txt
    python tools/plan_requests.py | diff before.txt -    # after a change that keeps all plans

A plan is shown by a hash of the files that `PackPlan.save` writes: packs, samples set aside and
figures. A schedule of ranks by a hash of its steps.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash

from offline_packing.planner.mixture import Mixture
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.planner.plan_packs import plan_packs
from offline_packing.planner.ranks.layout import RankLayout
from offline_packing.planner.strategies import STRATEGIES, kernels
from task_encoders.loading.schedule import InTurn, Stretch

NUM_REQUESTS: Final = 600
NUM_SCHEDULES: Final = 40
#: Among so many requests, one has more samples than are planned without compiling.
_LARGE: Final = 100


def draw_request(rng: np.random.Generator, *, is_large: bool) -> dict[str, Any]:
    """Draw arguments of `plan_packs`; some contradict each other, or are out of range."""
    num_samples = int(rng.integers(4000, 8000) if is_large else rng.integers(0, 120))
    seq_length = int(rng.choice([64, 256, 1000]))

    def chance(share: float) -> bool:
        return bool(rng.random() < share)

    def column(end: int, start: int = 0) -> np.ndarray:
        return rng.integers(start, end, num_samples)

    longest = seq_length + 1 + chance(0.2) * seq_length // 8
    shapes = (
        column(longest, 1),
        np.clip(rng.lognormal(np.log(seq_length / 5), 0.8, num_samples), 1, seq_length).astype(int),
        rng.choice(rng.integers(1, longest, 4), num_samples),
    )
    request: dict[str, Any] = {
        "num_tokens": shapes[rng.integers(3)] - chance(0.1),
        "seq_length": seq_length,
        "seed": int(rng.integers(5)),
    }
    others = {
        "strategy": str(rng.choice([*STRATEGIES, "best"])),
        "pad_multiple": int(rng.choice([2, 8, 100])),
        "max_samples": int(rng.integers(1, 9)),
        "budgets": {"patches": (column(30), int(rng.integers(20, 90)))},
        "groups": column(3),
        "homogeneous": chance(0.8),
        "cost": rng.random(num_samples) - chance(0.1),
        "tower_cost": rng.random(num_samples) / 2,
        "media": column(4),
        "features": [column(50), column(9)],
        "copy_of": column(max(1, num_samples // 2)),
        "order": RankLayout(int(rng.integers(1, 5)), int(rng.integers(3)), chance(0.5)),
        "source_order": rng.permutation(num_samples + chance(0.1)),
        "assignment": "locality",
        "window_packs": int(rng.integers(0, 40)),
    }
    request |= {name: value for name, value in others.items() if chance(0.2)}
    if request.get("strategy") == "knapsack" or chance(0.01):
        request["strategy_options"] = {"num_packs": 3}
    if request.get("homogeneous") and chance(0.9):
        request["groups"] = others["groups"]
    if "assignment" in request and chance(0.9):
        request["source_order"] = others["source_order"]
    if "order" in request and chance(0.9):
        request["media"] = others["media"]
    if chance(0.1):
        mixture = Mixture((0.7, 0.3), (0.2, 0.8))
        request |= {"mixture": mixture, "source": column(2), "source_order": others["source_order"]}
    return request


def hash_of(plan: PackPlan) -> str:
    """Hash the files of a plan."""
    with tempfile.TemporaryDirectory() as folder:
        plan.save(folder)
        files = sorted(Path(folder).iterdir())
        return xxhash.xxh3_64_hexdigest(b"".join(file.read_bytes() for file in files))


def answers(seed: int = 0) -> Iterator[str]:
    """Yield a line for each request and each schedule."""
    for number in range(NUM_REQUESTS):
        rng = np.random.default_rng([seed, number])
        request = draw_request(rng, is_large=number % _LARGE == 0)
        kernels._planned = 0  # each is planned as in a process of its own
        try:
            plan = plan_packs(**request)
        except (TypeError, ValueError) as error:
            answer = f"refused: {' '.join(str(error).split())}"
        else:
            answer = f"{plan.num_packs} packs, {plan.info.lower_bound} at least: {hash_of(plan)}"
        yield f"request {number}: {answer}"
    for number in range(NUM_SCHEDULES):
        rng = np.random.default_rng([seed, NUM_REQUESTS, number])
        num_packs, num_ranks, size = rng.integers(1, (200, 9, 4)).tolist()
        flags: dict[str, Any] = {name: rng.random() < 0.5 for name in ("keeps_steps", "repeat")}
        schedule = InTurn(num_packs, num_ranks, size, uniform_ranks=8 * number % 3, **flags)
        rows: list[Any] = [schedule.digest]
        for earlier in ((), (Stretch(2, 0), Stretch(3, 2))):
            epoch = schedule.epoch(1, earlier)
            steps = ((step, rank) for step in range(len(epoch)) for rank in range(num_ranks))
            rows += [epoch.begun, *(epoch.items(*place).tolist() for place in steps)]
        yield f"schedule {number}: {xxhash.xxh3_64_hexdigest(repr(rows).encode())}"


if __name__ == "__main__":
    for line in answers():
        print(line, flush=True)
