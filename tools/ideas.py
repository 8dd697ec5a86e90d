"""Count the product files that know an idea: `python tools/ideas.py [--list] [IDEA …]`.

A file knows an idea if the idea's expression matches a name in the file's syntax tree (a variable,
an attribute, an argument, a keyword, a function, a class, an import), or a text of it, such as the
name of a column, that is no docstring. The table in docs/dev/architecture.md is from here.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("offline_packing", "task_encoders", "launch")
#: Expressions for whole names and texts.
IDEAS = {
    "repeat, copies, weight": r"repeat(ed|s)?|cop(y_of|y_numbers)|num_copies|weights?|uses",
    "prefix trees": r"share_prefixes|parents|trees?|branches|Prefix\w*|prefix_\w+|trunks?",
    "slots of ranks": r"cp_sizes|refuse_slots|slots_of\w*|tokens_per_rank|picture_ranks|\w*Slots",
    "token packs": r"pretokenize|Tokenized\w+|Indexed(File|Pack|Layout)|nemo",
    "repair": r"\w*repair\w*|discard|Damage|set_apart|put_back|restore_receipt",
    "parts of conversations": r"split_turns|Conversation(Part)?|cut_for|Cutting|num_split",
    "skip, trained, index": r"skip(ped)?|trained(_by)?|from_index|of_index|outputs_skipped",
    "references": r"refers?|(read_)?media_roots|MEDIA_ROOTS|(with_)?[Ss]tored_?[Mm]edi(a|um)",
    "stamps": r"\w*stamps?|(?i:modification_time)|accept_mismatch|(refuses|accepts)_edits",
    "traits": r"Traits?|\w*_traits|traits_of|HOLDS_UNTRAINED|NEEDS_TRAITS",
}


def words_in(tree: ast.AST) -> Iterator[str]:
    """Yield all names in a syntax tree, and its texts but docstrings."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) in docstrings:
            continue
        for field in ("id", "attr", "arg", "name", "value"):
            word = getattr(node, field, None)
            if isinstance(word, str):
                yield word


def files_that_know(ideas: tuple[str, ...]) -> dict[str, list[str]]:
    """Return the files that know each idea: of IDEAS, or an expression."""
    files = sorted(file for part in PRODUCT for file in (ROOT / part).rglob("*.py"))
    words = {
        str(file.relative_to(ROOT)): {*words_in(ast.parse(file.read_text()))} for file in files
    }
    wanted = {idea: re.compile(IDEAS.get(idea, idea)) for idea in ideas or IDEAS}
    return {
        idea: [file for file, own in words.items() if any(map(expression.fullmatch, own))]
        for idea, expression in wanted.items()
    }


@click.command(help=__doc__)
@click.argument("ideas", nargs=-1)
@click.option("--list", "lists", is_flag=True, help="Name the files as well.")
def main(ideas: tuple[str, ...], lists: bool) -> None:
    print("| idea | files |\n|---|---|")
    for idea, files in files_that_know(ideas).items():
        print(f"| {idea} | {len(files)} |")
        if lists:
            print(*(f"    {file}" for file in files), sep="\n")


if __name__ == "__main__":
    main()
