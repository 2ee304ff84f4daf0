"""Values as JSON has them against the annotations of fields and options."""

from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", NoneType: "null"}


def is_a(value: Any, kind: Any) -> bool:
    """Whether a value is of an annotation's kind; true is no number, and a list will do for a tuple."""
    if isinstance(kind, UnionType):
        return any(is_a(value, one) for one in get_args(kind))
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    origin = get_origin(kind) or kind
    return isinstance(value, {tuple: tuple | list, Mapping: dict}.get(origin, origin))


def in_words(kind: Any) -> str:
    """What a value must be."""
    if isinstance(kind, UnionType):
        return " or ".join(dict.fromkeys(in_words(one) for one in get_args(kind)))
    return WORDS.get(kind) or ("a JSON list" if get_origin(kind) in (tuple, list) else "a JSON object")
