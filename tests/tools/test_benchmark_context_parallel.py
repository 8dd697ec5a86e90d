"""The benchmark of slots runs on few samples, beside megatron-core's own scheduler."""

import re

from tests.helpers.tools import run_benchmark


def test_slots_wait_less_than_the_peers() -> None:
    options = ("--samples", "600", "--global-batch", "300")
    result = run_benchmark("benchmark_context_parallel", *options)
    assert result.exit_code == 0, result.output
    idle = [float(share) for share in re.findall(r"idle % ([\d.]+)", result.stdout)]
    assert len(idle) == 3
    assert idle[0] < 6 < 12 < min(idle[1:])
    assert result.stdout.count("set aside 0") == 3
