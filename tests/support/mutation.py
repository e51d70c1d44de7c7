"""Mutants of a source file: one operator, constant, condition or statement changed, by its syntax tree."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.Pow: ast.Mult,
}


@dataclass(frozen=True)
class Mutant:
    """A change of one place of a text."""

    line: int
    start: int
    end: int
    old: str
    new: str

    def apply(self, text: str) -> str:
        """Return the text with the change."""
        raw = text.encode()
        return (raw[: self.start] + self.new.encode() + raw[self.end :]).decode()


def mutants(text: str) -> list[Mutant]:
    """Return every mutant of a source text, in the order of their places."""
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node, new in _changes(ast.parse(text)):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        old = text.encode()[start:end].decode()
        mutant = Mutant(node.lineno, start, end, old, new)
        if old != new:
            found.append(mutant)
    return sorted(set(found), key=lambda mutant: (mutant.start, mutant.end, mutant.new))


def _changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield nodes and what may stand in their place; errors' texts, types, decorators and docstrings are left alone."""
    match node:
        case ast.Raise() | ast.JoinedStr() | ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant()):
            return
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            children: list[ast.AST] = list(node.body)
        case ast.AnnAssign():
            children = [] if node.value is None else [node.value]
        case _:
            children = list(ast.iter_child_nodes(node))
    yield from _operators(node)
    yield from _others(node)
    for child in children:
        yield from _changes(child)


def _operators(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
            yield node, _text(ast.Compare(node.left, [COMPARISONS[type(operator)]()], node.comparators))
        case ast.BinOp() if type(node.op) in ARITHMETIC:
            yield node, _text(ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right))
        case ast.BoolOp():
            other = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
            yield node, _text(ast.BoolOp(other, node.values))
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node, _text(node.operand)
        case ast.IfExp():
            yield node, _text(ast.IfExp(node.test, node.orelse, node.body))


def _others(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    match node:
        case ast.Expr(value=ast.Call()):
            yield node, "pass"
        case ast.Constant(value=bool(value)):
            yield node, str(not value)
        case ast.Constant(value=int(value)):
            yield node, str(value + 1)
        case ast.If() | ast.While():
            yield node.test, f"not {_text(node.test)}"
        case ast.Call(func=ast.Name(id="min" | "max" as name)):
            yield node.func, "max" if name == "min" else "min"


def _text(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"
