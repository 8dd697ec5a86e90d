"""A YAML file and overrides `a.b=value` to a validated pydantic model, with errors on one line."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from offline_packing.errors import ConfigError
from offline_packing.yaml_text import parse_yaml

ModelT = TypeVar("ModelT", bound=BaseModel)


def read_config(model: type[ModelT], path: str | Path, overrides: Sequence[str] = ()) -> ModelT:
    """Read a YAML file, apply the overrides (their values are YAML), validate.

    Raises:
        ConfigError: the file cannot be read or parsed, or a field is unknown or has a bad value.
    """
    name = f"config {str(path)!r}"
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} cannot be read: {error}") from error
    content = parse_yaml(text, name)
    if not isinstance(content, dict):
        raise ConfigError(f"{name} holds no mapping; see the examples in launch/")
    for override in overrides:
        _apply_override(content, override)
    try:
        return model.model_validate(content)
    except ValidationError as error:
        problems = "; ".join(_explain(model, dict(problem)) for problem in error.errors())
        raise ConfigError(f"{name}: {problems}") from error


def _apply_override(content: dict[str, Any], override: str) -> None:
    dotted, separator, text = override.partition("=")
    names = dotted.split(".")
    if not separator or not all(names):
        raise ConfigError(f"override {override!r} is not of the form a.b=value")
    target = content
    for depth, name in enumerate(names[:-1], start=1):
        if target.get(name) is None:
            target[name] = {}
        target = target[name]
        if not isinstance(target, dict):
            where = ".".join(names[:depth])
            raise ConfigError(f"override {override!r}: {where} is {target!r}, not a mapping")
    target[names[-1]] = parse_yaml(text, f"override {override!r}")


def _explain(model: type[BaseModel], problem: Mapping[str, Any]) -> str:
    """Field, value, what is valid."""
    location = [str(name) for name in problem["loc"]]
    field = ".".join(location)
    if problem["type"] == "extra_forbidden":
        valid = ", ".join(_model_at(model, location[:-1]).model_fields)
        return f"{field} is no known field; valid: {valid}"
    if problem["type"] == "missing":
        return f"{field} is missing; set it"
    if problem["type"] == "literal_error":
        return f"{field}={problem['input']!r} is not valid; choose {problem['ctx']['expected']}"
    message = problem["msg"].removeprefix("Value error, ")
    value = problem["input"]
    shown = f"={value!r}" if isinstance(value, str | int | float | None) else ""
    text = f"{message[:1].lower()}{message[1:]}"
    return f"{field}{shown}: {text}" if field else text


def _model_at(model: type[BaseModel], location: Sequence[str]) -> type[BaseModel]:
    for name in location:
        annotation = model.model_fields[name].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            break
        model = annotation
    return model
