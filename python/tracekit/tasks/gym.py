"""One reasoning-gym data set, without importing the other hundred."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tracekit.errors import ConfigError

_PACKAGE = "reasoning_gym"
_classes: dict[str, tuple[type, type]] = {}


def dataset(name: str, params: Mapping[str, Any], *, seed: int, size: int) -> Any:
    """The data set `name` with `params`, `seed` and `size`. Raises ConfigError for a name or parameter it rejects."""
    if name not in _classes:
        _classes[name] = _find(name)
    cls, config_cls = _classes[name]
    allowed = [field.name for field in dataclasses.fields(config_cls) if field.name not in ("seed", "size")]
    for key in params:
        if key in ("seed", "size"):
            raise ConfigError(f"task.params.{key} is set by seed and task.train_size; leave it out of task.params")
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1, cutoff=0)
            raise ConfigError(f"unknown key task.params.{key} of {name}; the nearest valid key is {near[0]}")
    try:
        return cls(config_cls(**params, seed=seed, size=size))
    except (AssertionError, TypeError, ValueError) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"task.params = {dict(params)}: {name} rejects them: {text}") from None


def _find(name: str) -> tuple[type, type]:
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("task: the package reasoning-gym is not installed; pip install reasoning-gym")
    if _PACKAGE not in sys.modules:
        root = Path(spec.submodule_search_locations[0])
        found = [path for path in (*root.glob(f"*/{name}.py"), *root.glob(f"*/{name}/{name}.py")) if path.is_file()]
        if len(found) == 1:
            with contextlib.suppress(ImportError, AttributeError):
                return _import_alone(name, root, found[0])
    registry = importlib.import_module(_PACKAGE).factory.DATASETS
    if name not in registry:
        near = difflib.get_close_matches(name, registry, n=1, cutoff=0)
        raise ConfigError(f"task.name = {name!r} is no reasoning-gym data set; the nearest is {near[0]}")
    return registry[name]


def _import_alone(name: str, root: Path, path: Path) -> tuple[type, type]:
    """Import one module of the package (0.1 s) without the package's own `__init__`, which takes seconds.

    Empty packages stand in while that lasts and every trace is removed, so a later `import reasoning_gym` is whole.
    """
    parts = path.relative_to(root).with_suffix("").parts
    with _stand_ins(root, parts[:-1]):
        importlib.import_module(".".join((_PACKAGE, *parts)))
        factory = importlib.import_module(f"{_PACKAGE}.factory")
        if name not in factory.DATASETS:
            raise ImportError(f"{path} does not register {name}")
        return factory.DATASETS[name]


@contextlib.contextmanager
def _stand_ins(root: Path, folders: tuple[str, ...]) -> Iterator[None]:
    for depth in range(len(folders) + 1):
        package = types.ModuleType(".".join((_PACKAGE, *folders[:depth])))
        package.__path__ = [str(root.joinpath(*folders[:depth]))]
        sys.modules[package.__name__] = package
    try:
        yield
    finally:
        for module in [key for key in sys.modules if key == _PACKAGE or key.startswith(f"{_PACKAGE}.")]:
            del sys.modules[module]
