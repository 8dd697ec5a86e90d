"""Commands that messages and pages name for what is not installed: each of them works."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Not on a package index: only a clone has extras.
FROM_INDEX = re.compile(r"pip install [^\n`]*offline-packing\[")
EXTRA = re.compile(r"pip install [^\n`]*\.\[([a-z,]+)\]")


def texts() -> dict[str, str]:
    folders = ("offline_packing", "task_encoders", "launch", "examples", "docs", "tools")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    read = (path for path in (*found, *ROOT.glob("*.md")) if path.suffix in (".py", ".md", ".yaml"))
    # The halves of a string that goes over two lines belong together.
    return {str(path): re.sub(r'"\n\s+f?"', "", path.read_text("utf-8")) for path in read}


def extras() -> set[str]:
    """Names in setup.py."""
    calls = [
        n for n in ast.walk(ast.parse((ROOT / "setup.py").read_text())) if isinstance(n, ast.Call)
    ]
    (found,) = (k.value for call in calls for k in call.keywords if k.arg == "extras_require")
    assert isinstance(found, ast.Dict)
    return {str(ast.literal_eval(key)) for key in found.keys if key is not None}


def test_no_package_is_taken_for_published() -> None:
    assert [name for name, text in texts().items() if FROM_INDEX.search(text)] == []


def test_extras_that_are_named_exist() -> None:
    named = {
        extra
        for text in texts().values()
        for names in EXTRA.findall(text)
        for extra in names.split(",")
    }
    assert {"train", "video", "ray"} <= named <= extras()


def test_optional_packages_have_an_extra() -> None:
    assert {"logging", "trainer", "video", "ray", "remote"} <= extras()
