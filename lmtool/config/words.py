"""Plain words for the values that a field allows, and for the value that it got."""

from __future__ import annotations

import json
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from lmtool.config.base import Config
from lmtool.config.tables import Choice, names
from lmtool.system.secrets import masked

_KINDS = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
    bool: ("true or false", "true or false"),
    types.NoneType: ("null", "nulls"),
}


def quoted(value: object) -> str:
    """Returns a value as the user would write it, with its type if that is ambiguous: `"7" (text)`."""
    # Masked before it is truncated: half a secret would not be recognized.
    text = masked(json.dumps(value, ensure_ascii=False, default=str))
    text = text if len(text) <= 80 else text[:77] + "..."
    return f"{text} ({kind(value)})"


def kind(value: object) -> str:
    """Returns the type of a plain value in one or two words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true/false"
    if isinstance(value, int):
        return "whole number"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "text"
    if isinstance(value, list | tuple):
        return "list"
    return "section" if isinstance(value, dict) else type(value).__name__


def allowed_values(field: FieldInfo) -> str:
    """Returns what a field allows: `a number, above 0, or null`."""
    return _allowed_values(field.annotation, field.metadata)


def allowed_item(field: FieldInfo) -> str:
    """Returns what an item of a list may be; for other fields, what the field allows."""
    items = _items(field.annotation)
    return _allowed_values(items, []) if items is not None else allowed_values(field)


def _items(annotation: object) -> Any:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (tuple, list):
        return arguments[0]
    if origin in (Union, types.UnionType, Annotated):
        return next((items for argument in arguments if (items := _items(argument)) is not None), None)
    return None


def _allowed_values(annotation: object, metadata: list[Any]) -> str:
    for mark in metadata:
        if isinstance(mark, Choice):
            return f"a section whose {mark.key} is one of {', '.join(names(mark.group))}"
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _allowed_values(arguments[0], [*metadata, *arguments[1:]])
    if origin in (Union, types.UnionType):
        parts = [_allowed_values(argument, metadata) for argument in arguments if argument is not type(None)]
        if type(None) in arguments:
            parts.append("null")
        return "; or ".join(parts) if len(parts) > 2 else ", or ".join(parts)
    return _plain(annotation, origin, arguments) + bounds(metadata)


def _plain(annotation: Any, origin: Any, arguments: tuple[Any, ...]) -> str:
    if origin is Literal:
        return one_of(arguments)
    if origin is tuple:
        items = [argument for argument in arguments if argument is not Ellipsis]
        if not items:
            return "an empty list"
        plural = f"a list of {_plural(items[0])}"
        return plural if len(arguments) != len(items) else f"a list of {len(items)} values: {_plural(items[0])}"
    if origin is dict:
        return f"a section of {_plural(arguments[1])} by name"
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return f"a section of {', '.join(annotation.model_fields)}"
    return _KINDS.get(annotation, (annotation.__name__ if isinstance(annotation, type) else str(annotation), ""))[0]


def _plural(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return f"values out of {one_of(get_args(annotation))}"
    if get_origin(annotation) is Annotated:
        plain, *metadata = get_args(annotation)
        limits = bounds(metadata).removeprefix(", ")
        return f"{_plural(plain)}, each {limits}" if limits else _plural(plain)
    return _KINDS.get(annotation, ("", "values"))[1]


def one_of(options: Any) -> str:
    """Returns `a, b or c`."""
    texts = ["null" if option is None else str(option) or '""' for option in options]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


_LIMITS = {
    "ge": ", at least {}",
    "gt": ", above {}",
    "le": ", at most {}",
    "lt": ", below {}",
    "min_length": ", {} or longer",
    "max_length": ", {} at most",
    "pattern": " that matches {}",
    "multiple_of": ", a multiple of {}",
}
"""Text of a constraint by its attribute."""


def bounds(metadata: list[Any]) -> str:
    """Returns the bounds in the constraints of a field: `, at least 1, below 10`."""
    marks = [mark for item in metadata for mark in (item.metadata if isinstance(item, FieldInfo) else [item])]
    limits = ((form, getattr(mark, name, None)) for mark in marks for name, form in _LIMITS.items())
    return "".join(form.format(limit) for form, limit in limits if limit is not None)


def options(field: FieldInfo) -> tuple[str, ...]:
    """Returns the names that a field allows, also if it may be null or is a list of them; empty for other fields."""
    literals: list[str] = []

    def walk(annotation: object) -> None:
        if get_origin(annotation) is Literal:
            literals.extend(str(literal) for literal in get_args(annotation))
        elif annotation is bool:
            literals.extend(("true", "false"))
        else:
            for argument in get_args(annotation):
                walk(argument)

    walk(field.annotation)
    return tuple(literals)
