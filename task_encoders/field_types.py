"""Types of fields of pydantic models: numbers that are not booleans, names, paths; and the same
checks for the arguments of functions."""

import contextlib
import functools
import inspect
import operator
import os
import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Annotated, Any, Final, Literal, LiteralString, TypeVar, cast, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    PlainSerializer,
    TypeAdapter,
    ValidationError,
)
from pydantic.errors import PydanticSchemaGenerationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from task_encoders.storage.paths import check_url

CallableT = TypeVar("CallableT", bound=Callable[..., Any])
ModelT = TypeVar("ModelT", bound=BaseModel)
#: "user:password@" of a URL, or their like
KEYS_IN_URL: Final = re.compile(r"(?<=://)[^/@\s]*:[^/@\s]*(?=@)")
_MAX_INTEGER: Final = 2**63 - 1


def not_bool(value: Any) -> Any:
    """Refuse a boolean, which pydantic would read as 1 or 0; take the value of NumPy's scalars."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, bool):
        raise ValueError("a number is needed")
    return value


def invalid(
    section: str,
    name: str,
    value: Any,
    message: str,
    *,
    kind: LiteralString = "value_error",
    valid: str = "",
) -> ValidationError:
    """Return pydantic's error for a field of a section."""
    problem = PydanticCustomError(kind, "{message}", {"message": message, "valid": valid})
    details = InitErrorDetails(type=problem, loc=(name,), input=value)
    return ValidationError.from_exception_data(section, [details])


def one_of(registry: Collection[str]) -> AfterValidator:
    """Return a validator that accepts the names in a registry."""

    def check(name: str) -> str:
        if name not in registry:
            raise ValueError(f"not a known name; choose one of: {', '.join(registry)}")
        return name

    return AfterValidator(check)


def _expand_user(path: Any) -> Any:
    if isinstance(path, str) and path.encode(errors="ignore").decode() != path:
        raise ValueError(f"{path!r} is not UTF-8, as configurations and manifests are; rename it")
    if isinstance(path, str) and path.startswith("~"):
        expanded = os.path.expanduser(path)
        if expanded.startswith("~"):  # pyarrow would expand it, where others do not
            raise ValueError(f"{path!r} names no home folder; write the path out")
        return expanded
    return path


def _without_keys(path: str) -> str:
    if not path:
        raise ValueError("nothing is named; give a file, a folder or a URL")
    if KEYS_IN_URL.search(path):
        raise ValueError(
            "keys in a URL would be stored with the output; leave them out, and give them as the "
            "storage's package reads them, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    return path


def _one_or_several(value: Any) -> Any:
    paths = value if isinstance(value, list | tuple) else [value]
    if not paths or not all(isinstance(path, str) for path in paths):
        raise ValueError(f"{value!r} is not a path or a list of paths")
    checked = tuple(check_url(_without_keys(_expand_user(path))) for path in paths)
    return checked if len(checked) > 1 else checked[0]


def if_other_than(default: object) -> Any:
    """Declare a field that dumps lack at this default: `IF_ON` says why."""
    return Field(exclude_if=functools.partial(operator.eq, default))


def _pairs(values: Any) -> Any:
    return tuple(sorted(values.items())) if isinstance(values, Mapping) else values


#: Fields that dumps lack where they are off: manifests and fingerprints are those from before them.
IF_ON: Final = Field(exclude_if=operator.not_)
#: A mapping, kept as pairs so that it has a hash.
Values = Annotated[
    tuple[tuple[str, bool | int | float | str], ...], BeforeValidator(_pairs), PlainSerializer(dict)
]
LocalOrRemotePath = Annotated[
    str, BeforeValidator(_expand_user), AfterValidator(_without_keys), AfterValidator(check_url)
]
#: One, or a list of several.
LocalOrRemotePaths = Annotated[str | tuple[str, ...], BeforeValidator(_one_or_several)]
Count = Annotated[int, BeforeValidator(not_bool), Field(ge=1, le=_MAX_INTEGER)]
NonNegative = Annotated[int, BeforeValidator(not_bool), Field(ge=0, le=_MAX_INTEGER)]
Share = Annotated[float, BeforeValidator(not_bool), Field(ge=0, le=1)]
Number = Annotated[float, BeforeValidator(not_bool), Field(ge=0)]
Integer = Annotated[int, BeforeValidator(not_bool)]
#: Limits of a pack besides tokens, in `pack.budgets`: the index has a column num_NAME for each, and
#: `sample_encoder.sizes_of` gives them for a sample.
BudgetName = Literal["vision_patches", "images", "videos"]


def first_problem(error: ValidationError) -> str:
    """Return the first problem of a model's values in one line, after its place in them."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"][:6]))
    return ": ".join([*filter(None, [place]), first["msg"].removeprefix("Value error, ")])


def checked(function: CallableT) -> CallableT:
    """Check the arguments of each call by their annotations, strictly: "2" and true are not
    numbers. Arrays, and classes that pydantic does not know, are left to the function.

    The call raises ValueError: name, value, what is valid."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        for name, adapter in _adapters(function).items():
            if name in bound.arguments:
                bound.arguments[name] = _validated(name, bound.arguments[name], adapter)
        return function(*bound.args, **bound.kwargs)

    plain = get_type_hints(function)  # without what validates: for help, and editors
    shown = [p.replace(annotation=plain.get(p.name, Any)) for p in signature.parameters.values()]
    described: Any = call
    described.__signature__ = signature.replace(parameters=shown)
    return cast(CallableT, call)


def checked_model(model: type[ModelT], arguments: Mapping[str, Any]) -> ModelT:
    """Validate some arguments of a function as a model's fields, as `checked` does. Raises
    TypeError for a name that the model lacks."""
    unknown = arguments.keys() - model.model_fields.keys()
    if unknown:
        raise TypeError(f"{min(unknown)} is unknown; valid: {', '.join(model.model_fields)}")
    try:
        return model.model_validate(arguments, strict=True)
    except ValidationError as error:
        problems = error.errors()
    name = next(iter(problems[0]["loc"]), None)
    if name is None:  # of the fields together
        raise ValueError(problems[0]["msg"].removeprefix("Value error, "))
    own = [problem for problem in problems if problem["loc"][:1] == (name,)]
    raise _refusal(str(name), arguments[str(name)], own)


def check_fields(instance: Any) -> None:
    """Check the fields of a frozen dataclass, in its `__post_init__`."""
    cls: Any = type(instance)
    for name, adapter in _adapters(cls).items():
        object.__setattr__(instance, name, _validated(name, getattr(instance, name), adapter))


@functools.cache
def _adapters(annotated: Callable[..., Any]) -> dict[str, TypeAdapter[Any]]:
    """Return the validators of each argument or field."""
    found = {}
    for name, hint in get_type_hints(annotated, include_extras=True).items():
        if name != "return" and hint is not Any:
            with contextlib.suppress(PydanticSchemaGenerationError):
                found[name] = TypeAdapter(hint)
    return found


def _validated(name: str, value: Any, adapter: TypeAdapter[Any]) -> Any:
    try:
        return adapter.validate_python(value, strict=True)
    except ValidationError as error:
        raise _refusal(name, value, error.errors()) from None


def _refusal(name: str, value: Any, problems: Iterable[Any]) -> ValueError:
    """Return the error of a value that is not valid: its name, the value, what is valid."""
    wants = dict.fromkeys(problem["msg"].removeprefix("Value error, ") for problem in problems)
    text = " or ".join(wants).replace("Input should be", "it must be")
    text = text.replace(" or it must be", " or").replace("greater than or equal to", "at least")
    text = text.replace("less than or equal to", "at most")
    return ValueError(f"{name} is {reprlib.repr(value)}; {text}")
