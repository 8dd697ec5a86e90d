"""Write the tables of options and reasons in docs/ from the models that declare them.

    python tools/reference_tables.py [--check]

A page holds `<!-- table: NAME -->`, the table, and `<!-- end -->`. The meaning of an option is the
`#:` comment above its field.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from launch.config import LaunchConfig
from offline_packing.config.packing import PackingConfig
from offline_packing.engines import ENGINES
from offline_packing.layouts import LAYOUTS
from offline_packing.planner.strategies import STRATEGIES, describe_options
from offline_packing.sources import SOURCES
from offline_packing.sources.options import SourceOptions
from task_encoders.families import FAMILIES
from task_encoders.families.base.family import ModelOptions
from task_encoders.samples import REASONS

#: Names that "a name in REGISTRY" stands for.
REGISTRIES: Final[Mapping[str, Collection[str]]] = {
    "ENGINES": ENGINES,
    "FAMILIES": FAMILIES,
    "LAYOUTS": LAYOUTS,
    "SOURCES": SOURCES,
    "STRATEGIES": STRATEGIES,
}
DOCS: Final = Path(__file__).parents[1] / "docs"
_MARKED: Final = re.compile(r"(<!-- table: ([\w.]+) -->\n).*?(<!-- end -->)", re.DOTALL)


@cache
def meanings(model: type[BaseModel]) -> Mapping[str, str]:
    """The `#:` comments of a model's fields, inherited ones included."""
    found: dict[str, str] = {}
    for one in reversed(model.__mro__):
        if not issubclass(one, BaseModel) or one is BaseModel:
            continue
        source = textwrap.dedent(inspect.getsource(one))
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                above, number = [], node.lineno - 2
                while lines[number].strip().startswith("#:"):
                    above.insert(0, lines[number].strip().removeprefix("#:").strip())
                    number -= 1
                if above:
                    found[node.target.id] = " ".join(above)
    return found


def default_of(field: FieldInfo) -> str:
    """A field's default, as YAML has it."""
    if field.default_factory is not None or field.default in (PydanticUndefined, None):
        return ""
    value = field.default
    if isinstance(value, BaseModel | bool):
        return str(value).lower() if isinstance(value, bool) else ""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple | dict | frozenset | str) and not value:
        return ""
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    if isinstance(value, dict):
        return "`{" + ", ".join(f"{name}: {one}" for name, one in value.items()) + "}`"
    return str(value) if isinstance(value, int) else f"`{value}`"


def choices_of(annotation: Any) -> list[str]:
    """The values that a field accepts, if they can be listed."""
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    return [value for one in get_args(annotation) for value in choices_of(one)]


def describe(model: type[BaseModel], name: str) -> str:
    """The meaning of a field, with the values that its comment does not name."""
    text = meanings(model).get(name, "")
    values = choices_of(model.model_fields[name].annotation)
    if values and not all(value in text for value in values):
        listed = ", ".join(f"`{value}`" for value in values)
        text = f"{text}: {listed}" if text else listed
    for registry, known in REGISTRIES.items():
        text = text.replace(f"a name in {registry}", ", ".join(f"`{one}`" for one in known))
    return text.replace("|", "\\|")


def rows_of(
    model: type[BaseModel], prefix: str, leave_out: frozenset[str] = frozenset()
) -> Iterator[tuple[str, str, str]]:
    """(path, default, meaning) of a section's fields, and of the sections in it."""
    for name, field in model.model_fields.items():
        if name in leave_out:
            continue
        inner = _section(field.annotation)
        if inner is None:
            yield f"{prefix}.{name}", default_of(field), describe(model, name)
        elif inner in (ModelOptions,):
            yield f"{prefix}.{name}", "", describe(model, name)
        else:
            yield from rows_of(inner, f"{prefix}.{name}")


def _section(annotation: Any) -> type[BaseModel] | None:
    candidates = [annotation, *get_args(annotation)]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def own_rows(
    common: type[BaseModel], variants: Mapping[str, type[BaseModel]], prefix: str
) -> Iterator[tuple[str, str, str]]:
    """Rows of what variants have besides the common options, with the names of those that do."""
    names = {name: None for model in variants.values() for name in model.model_fields}
    for name in [name for name in names if name not in common.model_fields]:
        having = {key: model for key, model in variants.items() if name in model.model_fields}
        by_default: dict[str, list[str]] = {}
        for key, model in having.items():
            by_default.setdefault(default_of(model.model_fields[name]), []).append(key)
        first, *others = by_default
        default = first + "".join(f"; {', '.join(by_default[o])}: {o}" for o in others)
        model = next(iter(having.values()))
        yield f"{prefix}.{name}", default, _owners(having, variants) + describe(model, name)


def _owners(having: Mapping[str, Any], variants: Mapping[str, Any]) -> str:
    lacking = [f"`{name}`" for name in variants if name not in having]
    if not lacking:
        return ""
    if len(lacking) < len(having):
        return f"not {', '.join(lacking)}: "
    return f"{', '.join(f'`{name}`' for name in having)}: "


def render(rows: Iterator[tuple[str, str, str]]) -> str:
    body = ""
    for path, default, meaning in rows:
        body += f"| `{path}`{f' ({default})' if default else ''} | {meaning} |\n"
    return f"| field (default) | |\n|---|---|\n{body}"


def reasons() -> str:
    meanings_of = {name: re.sub(r"<\w+>", r"`\g<0>`", text) for name, text in REASONS.items()}
    body = "".join(f"| `{name}` | {meaning} |\n" for name, meaning in meanings_of.items())
    return f"| reason | |\n|---|---|\n{body}"


def _strategies() -> str:
    rows = (
        f"| `{strategy}` | `{option}` | {default} | {meaning.replace('|', '/')} |\n"
        for strategy, option, default, meaning in describe_options()
    )
    return "| strategy | option | default | |\n|---|---|---|---|\n" + "".join(rows)


def _launch() -> str:
    sections = LaunchConfig.model_fields.items()
    models = {name: _section(field.annotation) for name, field in sections}
    rows = (rows_of(model, name) for name, model in models.items() if model is not None)
    return render(chain.from_iterable(rows))


def _sources() -> str:
    options = {name: source.Options for name, source in SOURCES.items()}
    rows = rows_of(SourceOptions, "source"), own_rows(SourceOptions, options, "source")
    return render(chain.from_iterable(rows))


def _models() -> str:
    """A table of the options that every family has, then one for the families of each module."""
    page = "Every family:\n\n" + render(rows_of(ModelOptions, "model"))
    modules: dict[str, dict[str, type[BaseModel]]] = {}
    for name, family in FAMILIES.items():
        modules.setdefault(family.Options.__module__, {})[name] = family.Options
    for options in modules.values():
        names = ", ".join(f"`{name}`" for name in options)
        page += f"\n{names}:\n\n{render(own_rows(ModelOptions, options, 'model'))}"
    return page


def _of(model: type[BaseModel], name: str) -> Callable[[], str]:
    section = _section(model.model_fields[name].annotation)
    assert section is not None, name
    return lambda: render(rows_of(section, name))


TABLES: Final[dict[str, Callable[[], str]]] = {
    "reasons": reasons,
    "source": _sources,
    "model": _models,
    **{name: _of(PackingConfig, name) for name in ("pack", "output", "engine", "report")},
    "strategies": _strategies,
    "launch": _launch,
}


def filled(page: str) -> str:
    """A page with its tables made anew."""
    return _MARKED.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], page)


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; fail if a table is stale.")
def main(check: bool) -> None:
    """Write the tables of all pages."""
    stale = []
    for path in sorted(DOCS.rglob("*.md")):
        page = path.read_text("utf-8")
        if (made := filled(page)) != page:
            stale.append(path.name)
            if not check:
                path.write_text(made, "utf-8")
    if check and stale:
        raise click.ClickException(f"{', '.join(stale)}: run tools/reference_tables.py")


if __name__ == "__main__":
    main()
