"""Points in the package's code at which a test may raise a signal's exception, run another thread, or drop a reference.

Python checks for signals after a call returns and when a function begins. The functions under test are therefore compiled with a
point after each call of a function, and one before each statement, which covers more than needed. An exception at a point comes out
of a called function, as in reality. A trace function could raise only at the beginning of lines, also where Python never checks.
"""

from __future__ import annotations

import ast
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import Any

#: Functions that finalizers call. Python reports an exception of a finalizer and ignores it.
FINALIZERS = {"forget", "alive"}
_NAME = "_a_point_of_a_test"
_now = threading.local()


def point(value: Any = None) -> Any:
    """A point. Returns its argument."""
    left = getattr(_now, "left", 0)
    if left:
        _now.left = left - 1
        if left == 1:
            _now.action()
    return value


class Interrupted(KeyboardInterrupt):
    """The exception that a signal handler raises."""


def interrupt() -> None:
    raise Interrupted


@contextmanager
def at(number: int, action: Callable[[], None]) -> Iterator[None]:
    """Calls ``action`` when this thread reaches point ``number`` in the block, counted from 1. 0 means never."""
    _now.left, _now.action = number, action
    try:
        yield
    finally:
        _now.left, _now.action = 0, None


@contextmanager
def marked(*modules: ModuleType) -> Iterator[None]:
    """Compiles points into the functions and methods of these modules for the duration of the block."""
    before: list[tuple[FunctionType, CodeType]] = []
    try:
        for module in modules:
            setattr(module, _NAME, point)
            codes = _codes(module)
            for path, function in _functions(module):
                if path in codes:
                    assert function.__code__.co_freevars == codes[path].co_freevars
                    before.append((function, function.__code__))
                    function.__code__ = codes[path]
        yield
    finally:
        for function, code in before:
            function.__code__ = code
        for module in modules:
            delattr(module, _NAME)


class _Marked(ast.NodeTransformer):
    def __init__(self) -> None:
        self.depth = 0

    def visit(self, node: ast.AST) -> Any:
        made = super().visit(node)
        if isinstance(node, ast.stmt) and self.depth:
            return [ast.Expr(_point()), made]
        return made

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if node.name not in FINALIZERS:
            self.depth += 1
            self.generic_visit(node)
            self.depth -= 1
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        return _point(node)


def _point(*given: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(_NAME, ast.Load()), list(given), [])


def _codes(module: ModuleType) -> dict[tuple[str, ...], CodeType]:
    """Code with points of each function and method, by name, or by class and name."""
    tree = ast.fix_missing_locations(_Marked().visit(ast.parse(inspect.getsource(module))))
    found: dict[tuple[str, ...], CodeType] = {}

    def look(code: CodeType, path: tuple[str, ...]) -> None:
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                found[(*path, inner.co_name)] = inner
                if not path:
                    look(inner, (inner.co_name,))

    look(compile(tree, module.__file__ or "", "exec", dont_inherit=True), ())
    return found


def _functions(module: ModuleType) -> Iterator[tuple[tuple[str, ...], FunctionType]]:
    for name, value in vars(module).items():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        members = vars(value).items() if isinstance(value, type) else [(None, value)]
        for inner, member in members:
            plain = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
            if isinstance(plain, FunctionType) and plain.__module__ == module.__name__:  # not replaced by a test
                yield (name,) if inner is None else (name, inner), plain
