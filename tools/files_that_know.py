"""Count the product files that know an idea: `python tools/files_that_know.py [NAME …]`.

A file knows a name that stands in its syntax tree: as a variable, an attribute, an argument, a
function or a class. Comments and texts do not count. The table in docs/dev/architecture.md is from
here.
"""

import ast
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("offline_packing", "task_encoders", "launch")
IDEAS = (
    "epochs",
    "uniform",
    "split_turns",
    "split_by",
    "pretokenize",
    "pad_multiple",
    "share_prefixes",
)


def names_in(tree: ast.AST) -> set[str]:
    """All names in a syntax tree."""
    found = set[str]()
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                found.add(value)
    return found


def files_that_know(names: tuple[str, ...]) -> dict[str, list[str]]:
    """The files that know each name, sorted."""
    files = sorted(file for part in PRODUCT for file in (ROOT / part).rglob("*.py"))
    known = {str(file.relative_to(ROOT)): names_in(ast.parse(file.read_text())) for file in files}
    return {name: [file for file, own in known.items() if name in own] for name in names}


@click.command()
@click.argument("names", nargs=-1)
@click.option("--list", "lists", is_flag=True, help="Name the files as well.")
def main(names: tuple[str, ...], lists: bool) -> None:
    """Print a Markdown table: the names, and how many files know each."""
    print("| name | files |\n|---|---|")
    for name, files in files_that_know(names or IDEAS).items():
        print(f"| `{name}` | {len(files)} |")
        if lists:
            print(*(f"    {file}" for file in files), sep="\n")


if __name__ == "__main__":
    main()
