"""Folders that a folder may import, places and imports of tests, and first words of docstrings.
Imports are read from the syntax tree, those in functions and under TYPE_CHECKING as well."""

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("offline_packing", "task_encoders", "launch")
#: Folders of offline_packing; each imports only those before it.
ORDER = (
    "storage engines sources planner index layouts config runs online measure plan write verify "
    "report export upkeep demo cli"
).split()
#: One verb and one artifact each: they meet in artifacts, and never import each other.
STAGES = {"measure", "plan", "write", "verify", "report", "export"}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {
    module_name(path): path for package in PACKAGES for path in (ROOT / package).rglob("*.py")
}


def imported_modules(name: str) -> set[str]:
    """The modules of this project that a module names in an import, wherever it stands."""
    tree = ast.parse(MODULES[name].read_text("utf-8"))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & MODULES.keys() or {str(node.module)}
    return (found & MODULES.keys()) - {name}


@functools.cache
def imports_of_all() -> dict[str, set[str]]:
    """Imported modules by module."""
    return {name: imported_modules(name) for name in MODULES}


def folder_of(name: str) -> str:
    """'offline_packing.sources.formats.jsonl' -> 'sources'; '' for what lies at the root."""
    parts = name.split(".")
    is_package = MODULES[name].name == "__init__.py"
    return parts[1] if len(parts) > (1 if is_package else 2) else ""


def packing_imports() -> Iterator[tuple[str, str, str, str]]:
    """(module, its folder, imported module, its folder) within offline_packing."""
    for name, imports in imports_of_all().items():
        if name.startswith("offline_packing."):
            for other in imports:
                if other.startswith("offline_packing."):
                    yield name, folder_of(name), other, folder_of(other)


def test_imports_are_found() -> None:
    assert len(MODULES) > 100
    imports = imports_of_all()
    assert "offline_packing.runs.run" in imports["offline_packing.runs.tasks"]
    assert "offline_packing.planner.plan_packs" in imports["offline_packing"]  # in a function


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
    assert [name for name in sorted(MODULES) if name in reachable(name, imports)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_circles_between_folders(package: str) -> None:
    """A module at the root of a package counts as a folder of its own."""

    def room(name: str) -> str:
        own, _, rest = name.partition(".")
        return rest.partition(".")[0] if own == package else ""

    imports: defaultdict[str, set[str]] = defaultdict(set)
    for name, others in imports_of_all().items():
        rooms = {room(other) for other in others} - {room(name), ""}
        if room(name):
            imports[room(name)] |= rooms
    assert len(imports) > 5
    assert [room for room in sorted(imports) if room in reachable(room, imports)] == []


def test_folders_import_only_those_before() -> None:
    folders = {path.name for path in (ROOT / "offline_packing").iterdir() if path.is_dir()}
    assert folders - {"__pycache__"} <= set(ORDER)
    wrong = [
        f"{name} imports {other}"
        for name, folder, other, other_folder in packing_imports()
        if folder and other_folder and ORDER.index(folder) < ORDER.index(other_folder)
    ]
    assert wrong == []


def test_stages_do_not_import_each_other() -> None:
    wrong = [
        f"{name} imports {other}"
        for name, folder, other, other_folder in packing_imports()
        if folder != other_folder and {folder, other_folder} <= STAGES
    ]
    assert wrong == []


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


def imported(path: Path) -> Iterator[str]:
    """Full names of all modules and names that a file imports, inside functions as well."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_test_imports_another() -> None:
    """Code that several tests need is in tests/helpers, or in a module without tests."""
    paths = list(TESTS.rglob("*.py"))
    assert len(paths) > 50
    found = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in paths
        for name in imported(path)
        if name.startswith("tests.") and ".test_" in name
    ]
    assert not found, found


def test_folders_mirror_the_packages() -> None:
    """tests/offline_packing/index tests offline_packing/index."""
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")} - {Path()}
    strays = {str(folder) for folder in folders if not (ROOT / folder).is_dir()}
    assert strays <= OTHERS, strays - OTHERS


def described_functions() -> Iterator[tuple[str, str]]:
    """(module and name, docstring) of functions and methods, but not of properties."""
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
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
