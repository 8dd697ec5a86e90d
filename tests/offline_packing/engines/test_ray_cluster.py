"""The tests of cases_of_ray_cluster.py, in a process of their own, with patience.

A driver that starts a cluster asks its raylet for the settings. If a busy machine keeps that from
answering for the 20 s of a gRPC connection (SIGSTOP shows it; no setting of Ray gives more), Ray
ends the driver's process, without an error to catch: a worker of pytest would die with it. The
cases then run again.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray>=2.55'")

CASES = Path(__file__).with_name("cases_of_ray_cluster.py")
ENDED_BY_RAY = "Failed to get the system config from raylet"


def test_ray_cluster() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    environment = {**os.environ, "RAY_raylet_start_wait_time_s": "600"}  # 30 by default
    for _ in range(5):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if ENDED_BY_RAY not in done.stdout + done.stderr:
            break
    assert done.returncode == 0, done.stdout + done.stderr
