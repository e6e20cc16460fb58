"""The schema as help, as a reference page and as a JSON schema.

`python -m tracekit.config.reference DOCS` writes config.md and config.schema.json into the folder DOCS.
"""

from __future__ import annotations

import json
import sys
import textwrap
import types
import typing
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from tracekit.config import fields
from tracekit.config.dump import toml_value
from tracekit.config.schema import Config
from tracekit.config.validate import BOUNDS, POSITIVE


def help_text(width: int = 100) -> str:
    """Every key with its type, default and text, grouped by table, wrapped to `width` columns."""
    blocks = []
    for section in fields.sections(Config):
        lines = [f"{section.path or 'run'}: {section.doc}"]
        for leaf in section.leaves:
            head = f"  --{_kebab(leaf)} {fields.type_name(leaf.type)} = {_default(leaf)}"
            lines += textwrap.wrap(leaf.doc, max(width, 60), initial_indent=f"{head}  ", subsequent_indent=" " * 8)
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def markdown() -> str:
    """The reference page."""
    out = [
        "# Configuration",
        "",
        "A run is configured by TOML files and flags: `tracekit train A.toml B.toml --guidance.bits 0`. Later files",
        "win over earlier ones and flags over files; lists replace, tables merge. Every key below is written",
        "`[section]` / `key = value` in a file and `--section.key value` on the command line, where `-` may stand for",
        "`_`. An unknown key is an error. `tracekit train --dry-run` prints the merged result with the source of each",
        "value, checks the rules that join several keys, and trains nothing.",
        "",
        "This page is generated from the schema (`make docs`); `config.schema.json` is the same for editors.",
    ]
    for section in fields.sections(Config):
        out += ["", f"## {f'[{section.path}]' if section.path else 'Top level'}", "", section.doc, ""]
        if section.leaves:
            out += ["| key | type | default | |", "|---|---|---|---|"]
        for leaf in section.leaves:
            kind, text = fields.type_name(leaf.type).replace("|", r"\|"), leaf.doc.replace("|", r"\|")
            out.append(f"| `{leaf.path}` | {kind} | `{_default(leaf)}` | {text}{_range(leaf.path)} |")
    return "\n".join(out) + "\n"


def json_schema() -> dict[str, Any]:
    """A JSON schema (draft 2020-12) of a configuration file."""
    root: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "tracekit configuration",
        "type": "object",
        "additionalProperties": False,
        "properties": {},
    }
    for section in fields.sections(Config):
        target = root
        for part in filter(None, section.path.split(".")):
            table = {"type": "object", "description": section.doc, "additionalProperties": False, "properties": {}}
            target = target["properties"].setdefault(part, table)
        for leaf in section.leaves:
            entry = {**_json_type(leaf.type), "description": leaf.doc, "default": leaf.default}
            least, most = BOUNDS.get(leaf.path, (None, None))
            limits = {"minimum": least, "maximum": most, "exclusiveMinimum": 0 if leaf.path in POSITIVE else None}
            entry |= {name: limit for name, limit in limits.items() if limit is not None}
            target["properties"][leaf.path.rpartition(".")[2]] = entry
    return root


def write(folder: Path) -> None:
    """Write both documents into `folder`."""
    (folder / "config.md").write_text(markdown())
    (folder / "config.schema.json").write_text(json.dumps(json_schema(), indent=1) + "\n")


def _kebab(leaf: fields.Leaf) -> str:
    return leaf.path.replace("_", "-")


def _default(leaf: fields.Leaf) -> str:
    return "none" if leaf.default is None else toml_value(leaf.default)


def _range(path: str) -> str:
    least, most = BOUNDS.get(path, (None, None))
    if path in POSITIVE:
        return " Greater than 0."
    if least is None:
        return ""
    return f" At least {least:g}." if most is None else f" {least:g} to {most:g}."


def _json_type(tp: Any) -> dict[str, Any]:
    origin = get_origin(tp)
    if origin is Literal:
        return {"enum": list(get_args(tp))}
    if origin is list:
        return {"type": "array", "items": _json_type(get_args(tp)[0])}
    if tp is dict or origin is dict:
        return {"type": "object"}
    if origin in (typing.Union, types.UnionType):
        return _json_type(next(arg for arg in get_args(tp) if arg is not type(None)))
    return {"type": {int: "integer", float: "number", str: "string", bool: "boolean"}[tp]}


if __name__ == "__main__":
    write(Path(sys.argv[1]))
