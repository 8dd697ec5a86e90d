"""Power and utilisation of a GPU over time, as nvidia-smi reports them."""

import subprocess
import time
from types import TracebackType
from typing import Self

INTERVAL_MS = 100


class GpuMonitor:
    """Samples while the block runs.

    Attributes:
        samples: (seconds since the start, watts, per cent of the time busy).
    """

    def __init__(self) -> None:
        self.samples: list[tuple[float, float, float]] = []

    def __enter__(self) -> Self:
        command = ["nvidia-smi", "--query-gpu=power.draw,utilization.gpu", "--id=0"]
        command += ["--format=csv,noheader,nounits", f"--loop-ms={INTERVAL_MS}"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._started = time.monotonic()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        elapsed = time.monotonic() - self._started
        self._process.terminate()
        output, _ = self._process.communicate()
        lines = [line.split(",") for line in output.splitlines() if line.count(",") == 1]
        for i, (power, busy) in enumerate(lines):
            self.samples.append((elapsed * i / len(lines), float(power), float(busy)))
