"""docs/mixtures.md: its files and commands, one after the other, on the demo's data."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from offline_packing.demo.generate import generate_demo_dataset
from task_encoders.packs.manifest import read_manifest
from tests.helpers.markdown import blocks

PAGE = Path(__file__).parents[1] / "docs/mixtures.md"


@pytest.mark.exhaustive
def test_the_page_runs(tmp_path: Path) -> None:
    generate_demo_dataset(tmp_path / "demo_output/data", num_samples=120, progress=False)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(PAGE.parents[1])}
    said = []
    for block in blocks(PAGE.read_text()):
        if block.language == "yaml":
            name, _, text = block.text.partition("\n")
            (tmp_path / name.removeprefix("# ")).write_text(text)
            continue
        command = [sys.executable, "-c"] if block.language == "python" else ["bash", "-ec"]
        done = subprocess.run(
            [*command, block.text],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr}"
        said.append(done.stdout + done.stderr)
    assert "mixture" in said[1]
    first, second = (read_manifest(tmp_path / "out" / name) for name in ("first", "second"))
    assert first is not None
    assert second is not None
    assert first.counts.set_aside["not_chosen"] > 0
    assert second.counts.set_aside["trained"] > 0
    rows = pq.read_table(tmp_path / "samples.parquet").to_pylist()
    assert {row["trained"] for row in rows} > {0, 1}
