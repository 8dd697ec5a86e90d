"""Judge the tests: change one line of the product, run the tests that execute it, and see whether
one fails. It needs pytest-cov, and takes hours.

    OMP_NUM_THREADS=1 python -m pytest -n 2 --cov=offline_packing --cov=task_encoders --cov=launch \
        --cov-context=test --cov-report=
    python tools/mutate.py --coverage .coverage > mutants.txt

Compare two versions of the tests by running both commands in a checkout of each: the same product
and seed give the same mutants.
"""

import ast
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

ROOT: Final = Path(__file__).resolve().parents[1]
PRODUCT: Final = ("offline_packing", "task_encoders", "launch")
#: Operators as they are written, and what a mutant has in their place.
SWAPS: Final[Mapping[str, str]] = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "in": "not in",
    "not in": "in", "is": "is not", "is not": "is", "and": "or", "or": "and",
    "+": "-", "-": "+", "*": "+", "//": "*", "/": "*", "%": "*", "|": "&", "&": "|",
}  # fmt: skip
#: Tests of one mutant: more execute a line that everything needs, and one of these fails with it.
MAX_TESTS: Final = 60


@dataclass(frozen=True, order=True)
class Mutant:
    """A replacement within one line of a file."""

    file: str
    line: int
    begin: int
    end: int
    text: str

    def apply(self, source: str) -> str:
        """Return the file's text with the replacement."""
        lines = source.splitlines(keepends=True)
        line = lines[self.line - 1].encode()  # columns of `ast` count bytes
        changed = line[: self.begin] + self.text.encode() + line[self.end :]
        lines[self.line - 1] = changed.decode()
        return "".join(lines)


def mutants_of(file: str, source: str) -> Iterator[Mutant]:
    """Yield every mutant of a file whose change is on one line."""
    lines = [line.encode() for line in source.splitlines()]

    def between(left: ast.expr, right: ast.expr) -> Iterator[Mutant]:
        assert left.end_col_offset is not None
        if left.end_lineno != right.lineno:
            return
        gap = lines[right.lineno - 1][left.end_col_offset : right.col_offset].decode()
        operator = gap.strip(" ()")
        if new := SWAPS.get(operator):
            begin = left.end_col_offset + gap.index(operator)
            yield Mutant(file, right.lineno, begin, begin + len(operator), new)

    tree = ast.parse(source)
    annotations = {
        id(part)
        for node in ast.walk(tree)
        for field in ("annotation", "returns")
        if isinstance(given := getattr(node, field, None), ast.AST)
        for part in ast.walk(given)
    }
    for node in ast.walk(tree):
        if id(node) in annotations:
            continue
        if isinstance(node, ast.Compare):
            yield from between(node.left, node.comparators[0])
        elif isinstance(node, ast.BinOp):
            yield from between(node.left, node.right)
        elif isinstance(node, ast.BoolOp):
            yield from between(node.values[0], node.values[1])
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            assert node.end_col_offset is not None
            begin, end = node.col_offset, node.end_col_offset
            yield Mutant(file, node.lineno, begin, end, str(node.value + 1))
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            begin = node.col_offset
            yield Mutant(file, node.lineno, begin, begin + len("not "), "")
        elif isinstance(node, ast.If | ast.IfExp) and node.test.lineno == node.test.end_lineno:
            test = node.test.value if isinstance(node.test, ast.NamedExpr) else node.test
            yield Mutant(file, test.lineno, test.col_offset, test.col_offset, "not ")


def draw_mutants(count: int, seed: int) -> list[Mutant]:
    """Draw lines of the product, and one mutant of each."""
    by_line: dict[tuple[str, int], list[Mutant]] = {}
    for part in PRODUCT:
        for path in sorted((ROOT / part).rglob("*.py")):
            for mutant in mutants_of(str(path.relative_to(ROOT)), path.read_text()):
                by_line.setdefault((mutant.file, mutant.line), []).append(mutant)
    dice = random.Random(seed)
    return [dice.choice(sorted(by_line[line])) for line in dice.sample(sorted(by_line), count)]


def tests_of(mutant: Mutant, coverage: Path) -> list[str]:
    """Return the tests that execute a mutant's line, those of its own room first. Of lines that are
    compiled by numba, or are only executed on import or by other processes, none is known: the
    tests of the module's folder, and the laws."""
    from coverage.numbits import numbits_to_nums

    query = (
        "SELECT context.context, line_bits.numbits FROM line_bits JOIN file ON file.id = file_id "
        "JOIN context ON context.id = context_id WHERE file.path LIKE ?"
    )
    with closing(sqlite3.connect(coverage)) as database:
        rows = database.execute(query, (f"%/{mutant.file}",)).fetchall()
    found = {
        context.partition("|")[0]
        for context, bits in rows
        if context and mutant.line in numbits_to_nums(bits)
    }
    folder = str(Path("tests", mutant.file).parent)
    if not found:
        return [*([folder] if (ROOT / folder).is_dir() else []), "tests/laws"]
    own = sorted(test for test in found if test.startswith(folder))
    others: dict[str, list[str]] = {}  # by their files, of which each gives one in its turn
    for test in sorted(found.difference(own)):
        others.setdefault(test.partition("::")[0], []).append(test)
    turns = sorted((i, test) for tests in others.values() for i, test in enumerate(tests))
    return [*own[: MAX_TESTS * 2 // 3], *(test for _, test in turns)][:MAX_TESTS]


def failed_test(tree: Path, tests: list[str]) -> str | None:
    """Return the first test that fails in a tree; None if all pass."""
    with tempfile.TemporaryDirectory() as scratch:
        arguments = Path(scratch, "tests.txt")
        arguments.write_text("\n".join(tests))
        # numba's caches do not see that a kernel which another one calls has changed.
        environment = os.environ | {"NUMBA_CACHE_DIR": scratch, "PYTHONPATH": str(tree)}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider"]
        command += ["-m", "not exhaustive", "--no-header", f"--basetemp={scratch}/tmp"]
        try:
            run = subprocess.run(
                [*command, f"@{arguments}"],
                cwd=tree, env=environment, capture_output=True, text=True, timeout=1200,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return "(no end)"
    if run.returncode == 0:
        return None
    lines = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0].split()[1] if lines else f"(ended with {run.returncode})"


@click.command(help=__doc__)
@click.option("--coverage", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--count", default=60, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--first", default=0, help="mutants to skip, of a run that goes on")
def main(coverage: Path, count: int, seed: int, first: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch, "tree")
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tree)], check=True)
        killed = 0
        for number, mutant in enumerate(draw_mutants(count, seed)[first:], first):
            path = tree / mutant.file
            source = path.read_text()
            tests = tests_of(mutant, coverage)
            path.write_text(mutant.apply(source))
            failed = failed_test(tree, tests)
            path.write_text(source)
            killed += failed is not None
            line = mutant.apply(source).splitlines()[mutant.line - 1].strip()
            print(f"{number:3} {mutant.file}:{mutant.line} {line}", flush=True)
            print(f"    {failed or f'SURVIVED {len(tests)} tests'}", flush=True)
        print(f"{killed} of {count - first} mutants killed")


if __name__ == "__main__":
    main()
