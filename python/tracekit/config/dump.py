"""A configuration as TOML and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from tracekit.config import fields
from tracekit.config.schema import Config


def to_dict(config: Config) -> dict[str, Any]:
    """Nested plain values."""
    return dataclasses.asdict(config)


def to_flat(config: Config) -> dict[str, Any]:
    """Dotted key to value, free-form tables whole, in the order of the schema."""
    return {path: fields.get(config, path) for path in fields.leaves(Config)}


def to_json(config: Config, sources: Mapping[str, str] | None = None) -> str:
    """`resolved.json`: every value, and where each that is not the default came from."""
    return json.dumps({"config": to_dict(config), "sources": dict(sources or {})}, indent=2) + "\n"


def to_toml(config: Config, sources: Mapping[str, str] | None = None) -> str:
    """`config.toml`: every value, so that the file alone repeats the run. Sources follow as comments."""
    lines: list[str] = []
    for section in fields.sections(Config):
        if section.path:
            lines += ["", f"[{section.path}]"]
        for leaf in section.leaves:
            value = fields.get(config, leaf.path)
            if value is None:
                continue
            line = f"{leaf.path.rpartition('.')[2]} = {toml_value(value)}"
            origins = _origins(leaf, sources or {})
            lines.append(f"{line}  # {origins}" if origins else line)
    return "\n".join(lines) + "\n"


def _origins(leaf: fields.Leaf, sources: Mapping[str, str]) -> str:
    mine = {source for key, source in sources.items() if key == leaf.path or key.startswith(f"{leaf.path}.")}
    return ", ".join(sorted(" ".join(source.split()) for source in mine))


def toml_value(value: Any) -> str:
    """One value in TOML's own notation."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _toml_string(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_toml_key(key)} = {toml_value(item)}" for key, item in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    return _toml_string(str(value))  # dates and times, which only free-form tables can hold


def _toml_key(key: str) -> str:
    bare = key and all(letter.isascii() and (letter.isalnum() or letter in "-_") for letter in key)
    return key if bare else _toml_string(key)


def _toml_string(text: str) -> str:
    # JSON's escapes are TOML's too, apart from DEL, which TOML wants escaped, and surrogate pairs, which it forbids.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
