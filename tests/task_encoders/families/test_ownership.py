"""A family's names and numbers stand in `families/` alone, and an option in few files."""

import re
from pathlib import Path

import pytest

from task_encoders.families import FAMILIES, ModelSettings

ROOT = Path(__file__).parents[3]

FILES = [
    path
    for package in ("task_encoders", "offline_packing", "launch")
    for path in sorted((ROOT / package).rglob("*.py"))
]
OUTSIDE = [path for path in FILES if path.parent.name != "families"]

NUMBERS = (
    *("56 * 56", "28 * 28", "32 * 32", "3136", "4014080", "4_014_080", "1280", "5120", "1176"),
    *("1536", "100352", "602112", "16777216", "16_777_216", "0.48145466", "0.26862954"),
)


@pytest.mark.parametrize("word", [*NUMBERS, *FAMILIES])
def test_no_number_or_name_of_a_family_elsewhere(word: str) -> None:
    pattern = re.compile(rf"(?<![\w.]){re.escape(word)}(?!\w)")
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in OUTSIDE
        for line in path.read_text("utf-8").splitlines()
        if pattern.search(line)
    ]
    assert len(OUTSIDE) > 100
    assert found == []


@pytest.mark.parametrize("option", ["resize", "video_end", "tower", "image_aspect"])
def test_a_new_option_touches_three_files(option: str) -> None:
    """Where it is declared, used, and taken up by families: one each."""
    assert option in ModelSettings.model_fields
    used = re.compile(rf"(options\.{option}\b|\b{option}: |\"{option}\")")
    touched = {path for path in FILES if used.search(path.read_text("utf-8"))}
    families = {path for path in touched if '"' + option + '": "' in path.read_text("utf-8")}
    assert ROOT / "task_encoders/families/options.py" in touched
    assert len(touched - families) <= 3, touched
