"""`_core.pyi` says what the compiled module has."""

import ast
import inspect
from pathlib import Path

import tracekit._core as core

STUB = ast.parse(Path(core.__file__).with_name("_core.pyi").read_text())


def public(nodes, kind):
    return {n.name: n for n in nodes if isinstance(n, kind) and not n.name.startswith("_")}


def parameters(node):
    """Names, and which have a default."""
    args = node.args
    names = [a.arg for a in args.posonlyargs + args.args + args.kwonlyargs]
    positional = [True] * len(args.defaults)
    positional = [False] * (len(args.args) - len(positional)) + positional
    return dict(zip(names, positional + [d is not None for d in args.kw_defaults], strict=True))


def compiled(function):
    signature = inspect.signature(function).parameters.values()
    return {p.name: p.default is not p.empty for p in signature}


def test_functions_and_their_parameters():
    functions = public(STUB.body, ast.FunctionDef)
    here = {n: f for n, f in vars(core).items() if inspect.isbuiltin(f) and not n.startswith("_")}
    assert {n: parameters(f) for n, f in functions.items()} == {n: compiled(f) for n, f in here.items()}


def test_classes_and_their_methods():
    classes = public(STUB.body, ast.ClassDef)
    here = {n: c for n, c in vars(core).items() if inspect.isclass(c)}
    assert set(classes) == set(here)
    for name, stub in classes.items():
        methods = public(stub.body, ast.FunctionDef)
        found = {n: m for n, m in vars(here[name]).items() if not n.startswith("_")}
        assert set(methods) == set(found), name
        for n, method in found.items():
            if callable(method):
                assert parameters(methods[n]) == compiled(method), f"{name}.{n}"
