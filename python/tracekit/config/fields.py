"""The leaves of the configuration tree: path, type, default and the text under each field."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin


@dataclass(frozen=True, slots=True)
class Leaf:
    """One key. `path` is dotted (`guidance.bits`), `type` is the resolved annotation, `doc` the text under it."""

    path: str
    type: Any
    default: Any
    doc: str

    @property
    def is_dict(self) -> bool:
        """Whether the key holds free-form sub-keys (`task.params.max_terms`)."""
        return self.type is dict or get_origin(self.type) is dict


@dataclass(frozen=True, slots=True)
class Section:
    """One table. `path` is empty for the top level."""

    path: str
    doc: str
    leaves: tuple[Leaf, ...]


@cache
def sections(cls: type) -> tuple[Section, ...]:
    """The tables of a configuration dataclass, top level first, in the order of their fields."""
    return tuple(_walk(cls, ""))


@cache
def leaves(cls: type) -> dict[str, Leaf]:
    """Every key of a configuration dataclass by its dotted path."""
    return {leaf.path: leaf for section in sections(cls) for leaf in section.leaves}


def get(config: Any, path: str) -> Any:
    """Value of the dotted `path`."""
    for part in path.split("."):
        config = getattr(config, part)
    return config


def type_name(tp: Any) -> str:
    """A short name of a field's type, as help and reference print it."""
    origin = get_origin(tp)
    if origin is Literal:
        return "|".join(str(value) for value in get_args(tp))
    if origin is list:
        return f"list of {type_name(get_args(tp)[0])}"
    if tp is dict or origin is dict:
        return "table"
    if origin in (typing.Union, types.UnionType):
        return "|".join("none" if arg is type(None) else type_name(arg) for arg in get_args(tp))
    return {int: "int", float: "float", str: "str", bool: "bool"}.get(tp, str(tp))


def _walk(cls: type, prefix: str) -> Iterator[Section]:
    hints, docs = typing.get_type_hints(cls), _field_docs(cls)
    own, nested = [], []
    for spec in dataclasses.fields(cls):
        path = f"{prefix}{spec.name}"
        if dataclasses.is_dataclass(hints[spec.name]):
            nested.append((hints[spec.name], path))
        else:
            factory = spec.default_factory
            default = spec.default if factory is dataclasses.MISSING else factory()
            own.append(Leaf(path, hints[spec.name], default, docs.get(spec.name, "")))
    yield Section(prefix.rstrip("."), inspect.getdoc(cls) or "", tuple(own))
    for child, path in nested:
        yield from _walk(child, f"{path}.")


def _field_docs(cls: type) -> dict[str, str]:
    """The string literal that follows each annotated field in the class's source."""
    body = ast.parse(inspect.cleandoc("\n" + inspect.getsource(cls))).body[0].body
    docs = {}
    for field, after in zip(body, body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr)):
            continue
        if isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            docs[field.target.id] = " ".join(after.value.value.split())
    return docs
