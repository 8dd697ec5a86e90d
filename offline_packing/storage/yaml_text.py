"""YAML as people expect it to be read: `no` is text, `1e-5` is a number, a key stands once."""

import re
from typing import Any, Final

import yaml

from offline_packing.errors import ConfigError

_BOOL: Final = "tag:yaml.org,2002:bool"
_FLOAT: Final = "tag:yaml.org,2002:float"


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2's plain scalars; repeated keys are refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                line = node.start_mark.line + 1
                raise ConfigError(f"key {key!r} stands twice in the mapping at line {line}")
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
    """Parse a document. Raises ConfigError, with `name` for what it was."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ConfigError, ValueError, TypeError) as error:
        raise ConfigError(f"{name} is no valid YAML: {' '.join(str(error).split())}") from error


def apply_override(content: dict[str, Any], override: str) -> None:
    """Set one value in a document: `pack.seed=1`, or in a list `source.0.path=x`.

    Raises:
        ConfigError: the override is not of the form a.b=value, or leads through a plain value.
    """
    name, separator, text = override.partition("=")
    if not separator or not all(name.split(".")):
        raise ConfigError(f"override {override!r} is not of the form a.b=value")
    value = parse_yaml(text, f"override {override!r}")
    *parents, last = name.split(".")
    target: Any = content
    for depth, key in enumerate(parents):
        if isinstance(target, list):
            target = _item(target, key, override)
        else:
            if target.get(key) is None:
                target[key] = {}
            target = target[key]
        if not isinstance(target, dict | list):
            where = ".".join(parents[: depth + 1])
            raise ConfigError(f"override {override!r}: {where} is {target!r}, not a mapping")
    if isinstance(target, list):
        _item(target, last, override)
        target[int(last)] = value
    else:
        target[last] = value


def _item(items: list[Any], key: str, override: str) -> Any:
    if not key.isdecimal() or int(key) >= len(items):
        raise ConfigError(
            f"override {override!r}: {key!r} is no item of a list of {len(items)}; "
            "number the items from 0"
        )
    return items[int(key)]
