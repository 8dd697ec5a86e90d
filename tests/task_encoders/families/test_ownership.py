"""A family's name stands in `families/` alone."""

import re
from pathlib import Path

import pytest

from task_encoders.families import FAMILIES

ROOT = Path(__file__).parents[3]

FILES = [
    path
    for package in ("task_encoders", "offline_packing", "launch")
    for path in sorted((ROOT / package).rglob("*.py"))
]
OUTSIDE = [path for path in FILES if path.parent.name != "families"]


@pytest.mark.parametrize("word", list(FAMILIES))
def test_no_name_of_a_family_elsewhere(word: str) -> None:
    pattern = re.compile(rf"(?<![\w.]){re.escape(word)}(?!\w)")
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in OUTSIDE
        for line in path.read_text("utf-8").splitlines()
        if pattern.search(line)
    ]
    assert len(OUTSIDE) > 100
    assert found == []
