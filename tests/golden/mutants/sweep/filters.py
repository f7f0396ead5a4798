"""Which places of a source are left out, because a mutant there cannot mean anything or dies of itself.

| reason | what |
|---|---|
| annotation | annotations of arguments, results and variables, type aliases, `TypeVar`s |
| text | docstrings and other bare constants; numbers inside an f-string |
| declaration | imports, protocols, `TYPE_CHECKING`, `__all__`, `__slots__`, `@overload`, `*` of named arguments |
| message | what an error, a warning or the log says: arguments with a text in them, all of a log call |
| speed | `slots=`, `gc=`, `maxsize=`, and caches as decorators: memory and time only |
| identity | `==` to `is`, `!=` to `is not`: whether equal values are one object is the interpreter's business |

A mutant that does not compile, or compiles to the same program, is left out as well, when it is drawn.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

Position = tuple[int, int]
"""Line, from 1, and column in characters, from 0."""

LOG_CALLS = frozenset({"debug", "info", "warning", "error", "exception", "critical", "log", "warn"})
LOGGERS = frozenset({"logger", "log", "logging", "warnings"})
SPEED_KEYWORDS = frozenset({"slots", "gc", "maxsize"})
CACHES = frozenset({"cache", "lru_cache", "cached_property"})
IDENTITY = frozenset({"ReplaceComparisonOperator_Eq_Is", "ReplaceComparisonOperator_NotEq_IsNot"})
DECLARED = frozenset({"__all__", "__slots__"})


@dataclass(frozen=True)
class LeftOut:
    """A stretch of the source, end exclusive, that no mutant begins in. `operators`: only those of such a name."""

    start: Position
    end: Position
    reason: str
    operators: tuple[str, ...] = ("",)


def left_out(source: str) -> list[LeftOut]:
    """All places of a source that are left out. Raises SyntaxError."""
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    return finder.found


def reason_for(places: list[LeftOut], start: Position, operator: str) -> str | None:
    """Why a mutant of this operator (without its provider, NumberReplacer) at `start` is left out; None: it is not."""
    if operator in IDENTITY:
        return "identity"
    for place in places:
        if place.start <= start < place.end and operator.startswith(place.operators):
            return place.reason
    return None


class _Finder(ast.NodeVisitor):
    def __init__(self, source: str) -> None:
        self.lines = source.split("\n")
        self.found: list[LeftOut] = []

    def leave_out(self, node: ast.AST | None, reason: str, *operators: str) -> None:
        if node is not None:
            start = self._position(node.lineno, node.col_offset)  # type: ignore[attr-defined]
            end = self._position(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
            self.found.append(LeftOut(start, end, reason, operators or ("",)))

    def _position(self, line: int, offset: int) -> Position:
        """ast counts a column in UTF-8 bytes, parso in characters."""
        return line, len(self.lines[line - 1].encode()[:offset].decode())

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._function(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._decorators(node)
        self.leave_out(node.returns, "annotation")
        if node.args.kwonlyargs and node.args.vararg is None:
            first = node.args.kwonlyargs[0]
            before = [*node.args.posonlyargs, *node.args.args, *node.args.defaults]
            start = max(
                (self._position(one.end_lineno or 0, one.end_col_offset or 0) for one in before),
                default=self._position(node.lineno, node.col_offset),
            )
            self.found.append(LeftOut(start, self._position(first.lineno, first.col_offset), "declaration"))
        if any(_name(decorator) == "overload" for decorator in node.decorator_list):
            self.leave_out(node, "declaration")
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if any(_name(base) == "Protocol" for base in node.bases):
            self.leave_out(node, "declaration")
        self._decorators(node)
        self.generic_visit(node)

    def _decorators(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        for decorator in node.decorator_list:
            name = _name(decorator)
            reason = "speed" if name in CACHES else "declaration" if name == "overload" else None
            if reason is not None:
                self.leave_out(decorator, reason)
                # RemoveDecorator begins at the @, a character earlier.
                line, column = self._position(decorator.lineno, decorator.col_offset)
                self.found.append(LeftOut((line, column - 1), (line, column), reason))

    def visit_arg(self, node: ast.arg) -> None:
        self.leave_out(node.annotation, "annotation")

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.leave_out(node.annotation, "annotation")
        if _name(node.annotation) == "TypeAlias":
            self.leave_out(node, "annotation")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        names = {target.id for target in node.targets if isinstance(target, ast.Name)}
        if names & DECLARED:
            self.leave_out(node, "declaration")
        # A name in CamelCase is a type: Payload = bytes | memoryview.
        elif any(name[:1].isupper() and not name.isupper() for name in names) and _is_type(node.value):
            self.leave_out(node, "annotation")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            self.leave_out(node, "text")
        self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.leave_out(node, "declaration")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.leave_out(node, "declaration")

    def visit_If(self, node: ast.If) -> None:
        if _name(node.test) == "TYPE_CHECKING":
            self.leave_out(node, "declaration")
        self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self.leave_out(node, "text", "NumberReplacer")
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        if isinstance(node.exc, ast.Call):
            self._message(node.exc)
        self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        self.leave_out(node.msg, "message")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = _name(node)
        if name.endswith(("Error", "Warning")):
            self._message(node)
        elif name in LOG_CALLS and _owner(node) in LOGGERS:
            for argument in node.args:
                self.leave_out(argument, "message")
        for keyword in node.keywords:
            if keyword.arg in SPEED_KEYWORDS:
                self.leave_out(keyword, "speed")
        self.generic_visit(node)

    def _message(self, call: ast.Call) -> None:
        for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
            if any(_is_text(part) for part in ast.walk(argument)):
                self.leave_out(argument, "message")


def _name(node: ast.AST) -> str:
    """The last name of `a.b.c` or of a call of it."""
    if isinstance(node, ast.Call):
        return _name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _owner(call: ast.Call) -> str:
    return _name(call.func.value).lstrip("_") if isinstance(call.func, ast.Attribute) else ""


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_type(node: ast.AST) -> bool:
    """Whether an expression looks like a type: names, subscripts and | of them, or TypeVar(...)."""
    if isinstance(node, ast.Call):
        return _name(node) in ("TypeVar", "NewType")
    return any(isinstance(part, ast.Subscript | ast.BinOp) for part in ast.walk(node)) and all(_type_parts(node))


def _type_parts(node: ast.AST) -> Iterator[bool]:
    if isinstance(node, ast.BinOp):
        yield isinstance(node.op, ast.BitOr)
        yield from (*_type_parts(node.left), *_type_parts(node.right))
    elif isinstance(node, ast.Subscript):
        yield from _type_parts(node.value)
    else:
        yield isinstance(node, ast.Name | ast.Attribute) or (isinstance(node, ast.Constant) and node.value is None)
