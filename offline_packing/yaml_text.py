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
