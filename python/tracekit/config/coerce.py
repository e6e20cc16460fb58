"""Values from TOML and from the command line, checked against a field's type."""

from __future__ import annotations

import math
import tomllib
import types
import typing
from typing import Any, Literal, get_args, get_origin


class Mismatch(ValueError):
    """The value does not fit; the text says what would."""


def from_toml(value: Any, tp: Any) -> Any:
    """`value` as TOML gave it, as an instance of `tp`. Raises `Mismatch`."""
    origin = get_origin(tp)
    if origin is Literal:
        return _literal(value, tp)
    if origin is list:
        if not isinstance(value, list):
            raise Mismatch("expected a list")
        return [from_toml(item, get_args(tp)[0]) for item in value]
    if tp is dict or origin is dict:
        if not isinstance(value, dict):
            raise Mismatch("expected a table")
        return value
    if origin in (typing.Union, types.UnionType):
        return from_toml(value, _only(tp))
    if tp is float and type(value) in (int, float):
        if not math.isfinite(value):
            raise Mismatch("expected a finite number")
        return float(value)
    if tp is typing.Any or type(value) is tp:
        return value
    raise Mismatch(f"expected {_article(tp)}")


def from_text(text: str, tp: Any) -> Any:
    """A command-line word as an instance of `tp`. Lists are comma-separated or a TOML array. Raises `Mismatch`."""
    origin = get_origin(tp)
    if origin in (typing.Union, types.UnionType):
        return None if text.lower() == "none" else from_text(text, _only(tp))
    if origin is Literal:
        for allowed in get_args(tp):
            if text == str(allowed):
                return allowed
        return _literal(text, tp)
    if origin is list:
        if text.lstrip().startswith("["):
            return from_toml(_toml_value(text), tp)
        return [from_text(part.strip(), get_args(tp)[0]) for part in text.split(",") if part.strip()]
    if tp is dict or origin is dict:
        return from_toml(_toml_value(text), tp)
    if tp is bool:
        if text.lower() not in ("true", "false"):
            raise Mismatch("expected true or false")
        return text.lower() == "true"
    if tp in (int, float):
        try:
            return from_toml(tp(text), tp)
        except ValueError as error:
            raise error if isinstance(error, Mismatch) else Mismatch(f"expected {_article(tp)}") from None
    return text


def free_form(text: str) -> Any:
    """A command-line word under a free-form table: a TOML value where it is one, else the text itself."""
    try:
        return _toml_value(text)
    except Mismatch:
        return text


def _toml_value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        raise Mismatch("expected a TOML value") from None
    if len(parsed) != 1:
        raise Mismatch("expected one TOML value")
    return parsed["value"]


def _literal(value: Any, tp: Any) -> Any:
    for allowed in get_args(tp):
        if type(value) is type(allowed) and value == allowed:
            return allowed
    raise Mismatch("expected one of " + ", ".join(str(allowed) for allowed in get_args(tp)))


def _only(tp: Any) -> Any:
    """The one type of `T | None`; the schema has no other unions."""
    (inner,) = (arg for arg in get_args(tp) if arg is not type(None))
    return inner


def _article(tp: type) -> str:
    return {int: "an integer", float: "a number", str: "a string", bool: "true or false"}[tp]
