"""A family's name stands in `families/` alone, and an option in few files."""

import ast
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
SYNTAX = {path: ast.parse(path.read_text("utf-8")) for path in FILES}
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


#: What says which model and which checkpoint, and is no option of how samples are encoded.
IDENTITY = {"family", "processor"}
#: Who names an option but has no part in it: FFmpeg's option of that name; values for the demo.
APART = {
    ("max_pixels", "task_encoders/media/video_file.py"),
    ("max_pixels", "offline_packing/demo/run.py"),
}


def names_option(path: Path, option: str) -> bool:
    """Whether a module declares an option, takes it out of the options, or names it in a text."""
    for node in ast.walk(SYNTAX[path]):
        match node:
            case ast.ClassDef(name="ModelOptions" | "VisionSettings"):
                fields = (one.target for one in node.body if isinstance(one, ast.AnnAssign))
                found = any(isinstance(one, ast.Name) and one.id == option for one in fields)
            case ast.Attribute(value=ast.Name(id="options"), attr=name):
                found = name == option
            case ast.Attribute(value=ast.Attribute(attr="options"), attr=name):
                found = name == option
            case ast.Constant(value=text):
                found = text == option
            case _:
                found = False
        if found:
            return True
    return False


def gives_default(path: Path, option: str) -> bool:
    """Whether a module is that of a family that has the option."""
    values = [node for node in ast.walk(SYNTAX[path]) if isinstance(node, ast.Dict)]
    keys = {key.value for node in values for key in node.keys if isinstance(key, ast.Constant)}
    return path.parent.name == "families" and option in keys and path.name != "__init__.py"


@pytest.mark.parametrize("option", sorted(ModelSettings.model_fields.keys() - IDENTITY))
def test_a_new_option_touches_three_files(option: str) -> None:
    """Where it is declared, handed on and used; besides, a family that has it gives its default."""
    touched = {path for path in FILES if names_option(path, option)}
    assert ROOT / "task_encoders/families/options.py" in touched
    others = {path for path in touched if not gives_default(path, option)}
    others -= {ROOT / path for name, path in APART if name == option}
    assert len(others) <= 3, others
