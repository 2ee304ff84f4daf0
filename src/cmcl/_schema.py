"""Validation of settings and files by pydantic, with one style of error message."""

import difflib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
LONGEST = 80  # characters of a received value in a message
Settings = TypeVar("Settings")


class Schema(BaseModel):
    """The content of a JSON file. Unknown fields, NaN and infinity raise `ValueError`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def parse(cls, values: Any, *, source: object = "") -> Any:
        """The model of JSON values; `source`, such as a path, begins the message of an error."""
        with explained(cls.__name__, tuple(cls.model_fields), source=source):
            return cls.model_validate(values)


def explains_errors(settings: type[Settings]) -> type[Settings]:
    """A pydantic dataclass whose constructor raises the errors of `explained`."""
    construct, names = settings.__init__, [f.name for f in fields(settings)]  # type: ignore[arg-type]

    @wraps(construct)
    def explain(self: Settings, *args: Any, **values: Any) -> None:
        with explained(settings.__name__, names):
            construct(self, *args, **values)

    settings.__init__ = explain  # type: ignore[assignment, method-assign]
    return settings


@contextmanager
def explained(title: str, fields: Sequence[str] = (), *, source: object = "") -> Iterator[None]:
    """Turn pydantic's `ValidationError` into a `ValueError`: what is wrong, what was received."""
    try:
        yield
    except ValidationError as error:
        said = " ".join(_sentence(one, title, fields) for one in error.errors(include_url=False))
        raise ValueError(f"{source}: {said}" if source else said) from None


def _sentence(error: Any, title: str, fields: Sequence[str]) -> str:
    name = ".".join(map(str, error["loc"])) or title
    if error["type"] in UNKNOWN:
        close = difflib.get_close_matches(name, fields, n=1, cutoff=0.6)
        hint = f"Did you mean {close[0]!r}?" if close else f"Its fields are {', '.join(fields)}."
        return f"{title} has no field {name!r}. {hint}"
    if error["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return f"{title} must have a field {name!r}. Got none."
    if "error" in error.get("ctx", {}):  # a ValueError of our own validators, already a whole message
        return str(error["ctx"]["error"])
    got = f"Got {_short(error['input'])}."
    if error["msg"].startswith("Input should be "):
        return f"{name} must be {error['msg'].removeprefix('Input should be ')}. {got}"
    return f"{name} must be valid: {error['msg'][:1].lower()}{error['msg'][1:]}. {got}"


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, a deep nesting
        text = f"a {type(value).__name__}"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
