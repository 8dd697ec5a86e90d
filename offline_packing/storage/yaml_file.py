"""YAML as people expect it (`no` is text, `1e-5` a number, no key twice), and configurations: YAML
files with overrides `a.b=value`, validated by pydantic. Errors are one line."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from offline_packing.errors import ConfigError
from task_encoders.field_types import KEYS_IN_URL

ModelT = TypeVar("ModelT", bound=BaseModel)

_BOOL: Final = "tag:yaml.org,2002:bool"
_FLOAT: Final = "tag:yaml.org,2002:float"

#: The most values that a document may have.
_MAX_NODES: Final = 1_000_000


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2's plain scalars; repeated keys are refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                line = node.start_mark.line + 1
                raise ConfigError(f"key {key!r} is twice in the mapping at line {line}")
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [rule for rule in rules if rule[0] not in (_BOOL, _FLOAT)]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile(r"^(?:true|True|false|False)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(r"^[-+]?(?:(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+)$"),
    list("-+.0123456789"),
)


def parse_yaml(text: str, name: str) -> Any:
    """Parse a document. Raises ConfigError, which calls it `name`."""
    try:
        if "*" in text and _size(yaml.compose(text, _Loader), {}) > _MAX_NODES:
            raise ConfigError(f"its aliases hold more than {_MAX_NODES:,} values")
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ConfigError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{name} is not valid YAML: {' '.join(str(error).split())}") from error


def _size(node: yaml.Node | None, sizes: dict[int, int]) -> int:
    """Count the nodes with each alias expanded: nested aliases can make billions."""
    if id(node) not in sizes:
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        inner = itertools.chain(*parts) if isinstance(node, yaml.MappingNode) else parts
        sizes[id(node)] = 1 + sum(_size(one, sizes) for one in inner)
    return sizes[id(node)]


def apply_override(content: dict[str, Any], override: str) -> None:
    """Set one value in a document: `pack.seed=1`, or `source.0.path=x` in a list; `a=` sets an
    empty text, as in a shell. Raises ConfigError if the override has not the form a.b=value, or
    goes through a plain value."""
    name, separator, text = override.partition("=")
    if not separator or not all(name.split(".")):
        raise ConfigError(f"override {override!r} is not of the form a.b=value")
    value = parse_yaml(text, f"override {override!r}") if text else ""
    *parents, last = name.split(".")
    target: Any = content
    for depth, part in enumerate(parents):
        key = _key(target, part, override)
        if isinstance(target, dict) and target.get(key) is None:
            target[key] = {}
        target = target[key]
        if not isinstance(target, dict | list):
            where = ".".join(parents[: depth + 1])
            raise ConfigError(f"override {override!r}: {where} is {target!r}, not a mapping")
    target[_key(target, last, override)] = value


def _key(target: dict[str, Any] | list[Any], part: str, override: str) -> Any:
    """Return one part of a dotted name as a key of a mapping, or as an index of a list."""
    if isinstance(target, dict):
        return part
    if not part.isdecimal() or int(part) >= len(target):
        raise ConfigError(f"override {override!r}: {part!r} is not in 0 to {len(target) - 1}")
    return int(part)


def read_config(model: type[ModelT], path: str | Path, overrides: Sequence[str] = ()) -> ModelT:
    """Read a YAML file, apply the overrides (their values are YAML), and validate. Raises
    ConfigError if the file cannot be read or parsed, or a field is unknown or has a bad value."""
    name = f"config {str(path)!r}"
    try:
        text = Path(path).read_text("utf-8")
    except FileNotFoundError as error:
        remedy = "write one as the README shows it, or give its path"
        if "=" in str(path):
            remedy = "the YAML file comes first, settings after it"
        raise ConfigError(f"{name} does not exist; {remedy}") from error
    except IsADirectoryError as error:
        found = sorted(str(file) for file in Path(path).glob("*.y*ml"))[:3]
        inside = f" such as {', '.join(found)}" if found else ", in which source.path names data"
        raise ConfigError(f"{name} is a folder; give a YAML file{inside}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} cannot be read: {error}") from error
    content = parse_yaml(text, name)
    if not isinstance(content, dict):
        raise ConfigError(f"{name} is not a mapping; see the examples in the README")
    for override in overrides:
        apply_override(content, override)
    return validate(model, content, name)


def validate(model: type[ModelT], content: Mapping[str, Any], name: str = "config") -> ModelT:
    """Validate a mapping. Raises ConfigError naming field, value and remedy."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        problems = "; ".join(_explain(model, dict(problem)) for problem in error.errors())
        raise ConfigError(f"{name}: {problems}") from error


#: Replacements of options and values that were removed, or that other packers have.
_INSTEAD: Final[Mapping[Any, str]] = {
    "pack.epochs": "plan further outputs with pack.strategy=mixed and other seeds",
    "greedy": "it is sequential",
    "merge_same_image": "join the records with tools/convert_questions.py",
    "raw_packing": "export finished packs with offline-packing export",
}


def _explain(model: type[BaseModel], problem: Mapping[str, Any]) -> str:
    """Describe one of pydantic's errors: field, value, and what is valid or replaces it."""
    location = [str(name) for name in problem["loc"]]
    kind, value = problem["type"], problem["input"]
    field = ".".join(location)
    if kind == "extra_forbidden":
        fields = ", ".join(_model_at(model, location[:-1]).model_fields)
        valid = problem.get("ctx", {}).get("valid", fields)  # a source's depend on its format
        text = f"{field} is not a known field; valid: {valid}"
    elif kind == "missing":
        text = f"{field} is missing; set it"
    elif kind == "literal_error":
        text = f"{field}={value!r} is not valid; choose {problem['ctx']['expected']}"
    elif kind in ("tuple_type", "list_type"):
        text = f"{field}={value!r} is not a list; write [first, second]"
    elif kind in ("dict_type", "model_type"):
        fields = ", ".join(_model_at(model, location).model_fields)
        valid = f" with fields among: {fields}" if kind == "model_type" else ""
        text = f"{field}={value!r} is not a mapping; write {{name: value}}{valid}"
    else:
        message = problem["msg"].removeprefix("Value error, ")
        text = f"{message[:1].lower()}{message[1:]}"
        masked = KEYS_IN_URL.sub("…", value) if isinstance(value, str) else value
        shown = f"={masked!r}" if isinstance(value, str | int | float | None) else ""
        text = f"{field}{shown}: {text}" if field else text
    names = (*location[-1:], field, str(value))
    return text + "".join(f"; {_INSTEAD[name]}" for name in names if name in _INSTEAD)


def explain_value_error(error: Exception) -> str:
    """Describe an error in one line; pydantic's own errors lose their URLs."""
    if isinstance(error, ValidationError):
        return "; ".join(
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()
        )
    return " ".join(str(error).split())


def _model_at(model: type[BaseModel], location: Sequence[str]) -> type[BaseModel]:
    """Return the model of a field: ['source', '0'] -> SourceOptions."""
    for name in location:
        if name in model.model_fields:
            model = next(_models_in(model.model_fields[name].annotation), model)
    return model


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)
