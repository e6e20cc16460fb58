"""TOML files and command-line overrides into a `Config`: later wins, lists replace, tables merge."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import importlib.resources
import tomllib
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tracekit.config import coerce, fields
from tracekit.config.schema import Config
from tracekit.errors import ConfigError

Overrides = Sequence[str] | Mapping[str, Any]


@dataclasses.dataclass(slots=True)
class Loaded:
    """A configuration and where each value that differs from its default came from.

    `sources` maps a dotted key to a file's path or to the flag that set it; sub-keys of a free-form table have
    entries of their own (`task.params.max_terms`).
    """

    config: Config
    sources: dict[str, str]


def load(paths: Iterable[str | Path] = (), overrides: Overrides = ()) -> Config:
    """Merge TOML files in order, then `overrides`, over the defaults.

    `overrides` are command-line words (`["--guidance.bits", "0"]`, snake or kebab case) or a mapping of dotted keys
    to values. Raises ConfigError, in one line, for a file that cannot be read, an unknown key (the nearest valid
    one is named) and a value of the wrong type. Cross-field rules are `tracekit.config.validate`'s.
    """
    return load_with_sources(paths, overrides).config


def load_with_sources(paths: Iterable[str | Path] = (), overrides: Overrides = ()) -> Loaded:
    """As `load`, with the source of each value that is not the default."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for path in paths:
        for key, value in _flatten(_read(Path(path)), ""):
            _set(values, sources, key, value, f"in {path}", str(path))
    pairs = overrides.items() if isinstance(overrides, Mapping) else _pair_up(overrides)
    for key, value in pairs:
        flag = f"--{key}"
        key = key.replace("-", "_")
        _set(values, sources, key, value, f"from {flag}", flag, text=not isinstance(overrides, Mapping))
    config = _build(Config, "", values)
    return Loaded(config, _non_default(config, sources))


def quickstart() -> Path:
    """The configuration that `tracekit train` runs when it is given none."""
    return Path(str(importlib.resources.files("tracekit.config").joinpath("quickstart.toml")))


def split_words(words: Sequence[str], flags: Iterable[str]) -> tuple[list[str], list[str], list[str]]:
    """Split a command line into (config files, override words, words among `flags`), in any order."""
    known, leaves = set(flags), fields.leaves(Config)
    paths, overrides, own = [], [], []
    rest = iter(words)
    for word in rest:
        if word in known:
            own.append(word)
        elif word.startswith("--"):
            overrides.append(word)
            leaf = leaves.get(word[2:].replace("-", "_"))
            if "=" not in word and not (leaf and leaf.type is bool):
                overrides.extend(value for value in [next(rest, None)] if value is not None)
        elif word in ("true", "false") and overrides and overrides[-1].startswith("--") and "=" not in overrides[-1]:
            overrides[-1] += f"={word}"  # the value of the switch before it
        elif word.startswith("-") and word != "-":
            raise ConfigError(f"unknown option {word}; keys are given as --section.key VALUE")
        else:
            paths.append(word)
    return paths, overrides, own


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no such configuration file: {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _pair_up(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    leaves = fields.leaves(Config)
    rest = iter(words)
    for word in rest:
        if not word.startswith("--") or word == "--":
            raise ConfigError(f"expected --section.key VALUE, found {word!r}")
        key, equals, value = word[2:].partition("=")
        if not equals:
            leaf = leaves.get(key.replace("-", "_"))
            if leaf and leaf.type is bool:
                value = "true"
            else:
                value = next(rest, None)
                if value is None or value.startswith("--"):
                    _require_known(key.replace("-", "_"), f"from --{key}")
                    raise ConfigError(f"--{key} needs a value")
        yield key, value


def _flatten(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Leaves of a TOML document. Tables that are values themselves (free-form keys) stay whole."""
    leaves = fields.leaves(Config)
    for key, value in table.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and path not in leaves:
            yield from _flatten(value, f"{path}.")
        else:
            yield path, value


def _set(values: dict, sources: dict, key: str, value: Any, where: str, source: str, *, text: bool = False) -> None:
    if _is_empty_table(key, value):
        return
    if parent := _free_form(key):
        table, inner = parent
        _merge_into(values, sources, table, _nest(inner, coerce.free_form(value) if text else value), source)
        return
    _require_known(key, where)
    leaf = fields.leaves(Config)[key]
    try:
        typed = coerce.from_text(value, leaf.type) if text else coerce.from_toml(value, leaf.type)
    except coerce.Mismatch as problem:
        raise ConfigError(f"{key} = {value!r} {where}: {problem}") from None
    if leaf.is_dict:
        _merge_into(values, sources, key, typed, source)
        return
    if key == "task.name" and typed != values.get(key, leaf.default):
        _forget(values, sources, "task.params", source)
    values[key], sources[key] = typed, source


def _forget(values: dict, sources: dict, table: str, source: str) -> None:
    """Drop what earlier files set in the free-form `table`: another task does not know the parameters of the last."""

    def layer(origin: str) -> str:
        return "flags" if origin.startswith("--") else origin

    foreign = [key for key in sources if key.startswith(f"{table}.") and layer(sources[key]) != layer(source)]
    for key in foreign:
        del sources[key]
        values[table].pop(key.removeprefix(f"{table}.").partition(".")[0], None)


def _is_empty_table(key: str, value: Any) -> bool:
    """A table header with nothing under it, which sets nothing."""
    return isinstance(value, Mapping) and not value and any(part.path == key for part in fields.sections(Config))


def _merge_into(values: dict, sources: dict, table: str, value: Mapping[str, Any], source: str) -> None:
    values[table] = _merge(values.get(table, fields.leaves(Config)[table].default), value)
    sources.update((f"{table}.{path}", source) for path in _paths(value))


def _free_form(key: str) -> tuple[str, str] | None:
    """(table, sub-key) where `key` lies in a free-form table, else None."""
    for path, leaf in fields.leaves(Config).items():
        if leaf.is_dict and key.startswith(f"{path}."):
            return path, key[len(path) + 1 :]
    return None


def _nest(path: str, value: Any) -> dict[str, Any]:
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merge(merged[key], value) if both else copy.deepcopy(value)
    return merged


def _paths(table: Mapping[str, Any]) -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from (f"{key}.{path}" for path in _paths(value))
        else:
            yield key


def _require_known(key: str, where: str) -> None:
    leaves = fields.leaves(Config)
    if key in leaves:
        return
    if any(section.path == key for section in fields.sections(Config)):
        raise ConfigError(f"{key} {where} is a table, not a value; its keys are {key}.*")
    raise ConfigError(f"unknown key {key} {where}; the nearest valid key is {nearest(key)}")


def nearest(key: str) -> str:
    """The valid key most like `key`. The last part counts most: people know a key's name better than its table."""

    def alike(left: str, right: str) -> float:
        return difflib.SequenceMatcher(None, left, right).ratio()

    def score(path: str) -> float:
        table, _, name = path.rpartition(".")
        given_table, _, given = key.rpartition(".")
        return max(alike(key, path), 0.75 * alike(given, name) + 0.25 * alike(given_table, table))

    return max(fields.leaves(Config), key=score)


def _build(cls: type, prefix: str, values: Mapping[str, Any]) -> Any:
    hints, arguments = typing.get_type_hints(cls), {}
    for spec in dataclasses.fields(cls):
        path = f"{prefix}{spec.name}"
        if dataclasses.is_dataclass(hints[spec.name]):
            arguments[spec.name] = _build(hints[spec.name], f"{path}.", values)
        elif path in values:
            arguments[spec.name] = values[path]
    return cls(**arguments)


def _non_default(config: Config, sources: Mapping[str, str]) -> dict[str, str]:
    kept = {}
    for key, source in sources.items():
        table, inner = _free_form(key) or (key, "")
        if _dig(fields.get(config, table), inner) != _dig(fields.leaves(Config)[table].default, inner):
            kept[key] = source
    return kept


def _dig(table: Any, path: str) -> Any:
    for part in filter(None, path.split(".")):
        if not isinstance(table, Mapping) or part not in table:
            return None
        table = table[part]
    return table
