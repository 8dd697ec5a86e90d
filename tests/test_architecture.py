"""Folders that a folder may import, places and imports of tests, and first words of docstrings.
Imports are read from the syntax tree, those in functions and under TYPE_CHECKING as well."""

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("offline_packing", "task_encoders", "launch")
#: Folders of offline_packing; each imports only those before it.
ORDER = (
    "storage engines sources planner index layouts config runs online measure plan write verify "
    "report export upkeep demo cli"
).split()
#: One verb and one artifact each: they meet in artifacts, and never import each other.
STAGES = {"measure", "plan", "write", "verify", "report", "export"}


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
}


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Parse a file into its nodes."""
    return [*ast.walk(ast.parse(path.read_text("utf-8")))]


def imported(path: Path) -> Iterator[str]:
    """Full names of all modules and names that a file imports, inside functions as well."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def imports_of_all() -> dict[str, set[str]]:
    """Imported modules of this project by module."""
    found = {}
    for name, path in MODULES.items():
        names = {*imported(path)}
        names |= {one.rpartition(".")[0] for one in names - MODULES.keys()}
        found[name] = (names & MODULES.keys()) - {name}
    return found


def room(name: str, package: str) -> str:
    """'offline_packing.sources.formats.jsonl' -> 'sources'; '' for another package's module."""
    own, _, rest = name.partition(".")
    return rest.partition(".")[0] if own == package else ""


def reachable(name: str, imports: Mapping[str, set[str]]) -> set[str]:
    """What a module or a folder imports, and what this imports, and so on."""
    found: set[str] = set()
    left = [name]
    while left:
        new = imports[left.pop()] - found
        found |= new
        left += new
    return found


def test_no_circles() -> None:
    imports = imports_of_all()
    assert len(imports) > 100
    assert "offline_packing.planner.plan_packs" in imports["offline_packing"]  # in a function
    assert [name for name in sorted(MODULES) if name in reachable(name, imports)] == []
    for package in PACKAGES:  # nor between its folders and the modules at its root
        rooms: defaultdict[str, set[str]] = defaultdict(set)
        for name, others in imports.items():
            own = room(name, package)
            rooms[own] |= {room(other, package) for other in others} - {own, ""}
        del rooms[""]
        assert len(rooms) > 5
        assert [own for own in sorted(rooms) if own in reachable(own, rooms)] == []


def test_folders_import_only_those_before() -> None:
    folders = {path.name for path in (ROOT / "offline_packing").iterdir() if path.is_dir()}
    assert folders - {"__pycache__"} <= set(ORDER)
    for name, imports in imports_of_all().items():
        own = room(name, "offline_packing")
        for other in sorted({room(one, "offline_packing") for one in imports} - {own}):
            if own in ORDER and other in ORDER:
                assert ORDER.index(other) < ORDER.index(own), f"{name} imports {other}"
                assert not {own, other} <= STAGES, f"{name} imports {other}"


def test_packages_import_in_one_direction() -> None:
    for name, imports in imports_of_all().items():
        packages = {other.partition(".")[0] for other in imports}
        if name.startswith("task_encoders"):
            assert packages <= {"task_encoders"}, name
        elif name.startswith("offline_packing"):
            # the demo trains, and says so when it runs
            assert packages <= {"task_encoders", "offline_packing"} or ".demo" in name, name


def test_models_do_not_know_each_other() -> None:
    """A reader of one never opens the other's files."""
    core = {name for name in MODULES if name.startswith("launch.model.megatron.")}
    others = {f"launch.model.{name}" for name in ("transformers_model", "segments")}
    shared = {name for name in MODULES if name.startswith("launch.model.")} - core - others
    for own, foreign in ((core, others), (others, core), (shared, core | others)):
        assert own
        for name in own:
            assert not imports_of_all()[name] & foreign, name


def test_tree() -> None:
    root = ROOT / "offline_packing"
    assert {path.name for path in root.glob("*.py")} == {"__init__.py", "__main__.py", "errors.py"}
    for folder in {path.parent for path in MODULES.values()}:
        assert (folder / "__init__.py").read_text().startswith('"""'), folder


TESTS = Path(__file__).parent
#: Folders of tests that stand for no folder of code: of laws, and of what needs a GPU or other
#: packages.
OTHERS = {"gpu", "laws", "peers"}


def test_tests_mirror_the_packages_and_import_no_other_test() -> None:
    """tests/offline_packing/index tests offline_packing/index. Code that several tests need is in
    tests/helpers, or in a module without tests."""
    paths = list(TESTS.rglob("*.py"))
    folders = {path.parent.relative_to(TESTS) for path in paths if path.match("test_*.py")}
    assert {str(one) for one in folders - {Path()} if not (ROOT / one).is_dir()} <= OTHERS
    found = {str(path): [*imported(path)] for path in paths}
    assert len(found) > 50
    is_test = re.compile(r"tests\.(.*\.)?test_").match
    assert {path: own for path, names in found.items() if (own := [*filter(is_test, names)])} == {}


def described_functions() -> Iterator[tuple[str, str]]:
    """(module and name, docstring) of functions and methods, but not of properties."""
    for module, path in MODULES.items():
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                is_property = any("property" in ast.unparse(one) for one in node.decorator_list)
                text = ast.get_docstring(node)
                if text and not is_property:
                    yield f"{module}.{node.name}", text


def test_docstrings_say_what_a_function_does() -> None:
    """They open with a verb of verbs.txt, in the imperative; it lists no other."""
    verbs = (ROOT / "tests/verbs.txt").read_text().split()
    first = {name: text.split()[0].strip(".,:;") for name, text in described_functions()}
    assert {name: word for name, word in first.items() if word not in verbs} == {}
    assert verbs == sorted(set(first.values()))
