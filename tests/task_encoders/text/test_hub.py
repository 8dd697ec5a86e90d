"""A hub out of reach says so at once."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

NAME = "Qwen/Qwen2.5-VL-7B-Instruct"
#: Instead of sleeping, it counts; no clock tells a wait from a busy machine.
PROGRAM = f"""
import atexit, time
slept = []
time.sleep = slept.append
atexit.register(lambda: print("slept", sum(slept)))
from task_encoders import build_sample_encoder
build_sample_encoder("qwen2_5_vl", "{NAME}")
"""


@pytest.fixture
def dead_endpoint() -> Iterator[str]:
    """The address of a port at which nobody listens; it stays taken."""
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{port.getsockname()[1]}"


def build(home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Build an encoder of a checkpoint that is not there, in a process of its own."""
    own = {"HF_HOME": str(home), "NO_PROXY": "*", **environment}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def test_a_hub_out_of_reach_says_so_at_once(tmp_path: Path, dead_endpoint: str) -> None:
    done = build(tmp_path, HF_ENDPOINT=dead_endpoint, HF_HUB_OFFLINE="0")
    last = done.stderr.splitlines()[-1]
    assert f"'{NAME}' is not a folder here, and the hub {dead_endpoint} is out of reach" in last
    assert "Retrying" not in done.stderr
    assert float(done.stdout.split()[-1]) < 5  # transformers itself waits 40 s


def test_offline_nothing_is_asked(tmp_path: Path, dead_endpoint: str) -> None:
    done = build(tmp_path, HF_ENDPOINT=dead_endpoint, HF_HUB_OFFLINE="1")
    assert "is not a folder here, and not on the hub or out of reach" in done.stderr
