"""Samples as transformers itself encodes them, to compare ours with."""

import ast
import math
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version

VERSION = Version(metadata.version("transformers"))


def needs_transformers(version: str, differs: str) -> None:
    """Skip a test that compares with what an older transformers, which trains our packs all the
    same, makes otherwise."""
    if Version(version) > VERSION:
        pytest.skip(f"transformers {VERSION} < {version} {differs}")


def transformers_function(family: str, name: str, method_of: str | None = None) -> Any:
    """A function, or a method without its class, of a family's video processor. Without torchvision
    its module does not import, and that has no build that goes with PyTorch's for CPUs; the
    functions need only torch and numpy."""
    needs_transformers("5.10", "has other functions for videos")
    spec: Any = find_spec("transformers")
    folder = Path(spec.submodule_search_locations[0])
    path = folder / f"models/{family}/video_processing_{family}.py"
    tree: Any = ast.parse(path.read_text())
    if method_of is not None:
        tree = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == method_of)
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
    function.args.kwarg = None
    for argument in function.args.args:
        argument.annotation = None
    function.returns = None
    namespace: dict[str, Any] = {"torch": torch, "math": math, "np": np}
    exec(compile(ast.Module([function], []), str(path), "exec"), namespace)
    return namespace[name]
