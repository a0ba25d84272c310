"""Every word that the code can count or answer as a `reason` or an `outcome`, found in its syntax trees."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

_WORDS: Final = frozenset(
    {"reason", "outcome", "outcomes", "unusable", "unusable_reason", "why", "_off", "failed", "failure"}
)
"""Names of variables, fields and parameters that hold such a word."""
_TYPES: Final = frozenset({"Reason", "Outcome", "QueueFull"})
_TABLES: Final = frozenset({"_STATUS", "_NO_SPACE"})
_COUNTERS: Final = frozenset({"cornplug_misses_total", "cornplug_saves_total"})
_PASSED_ON: Final = frozenset({"reason", "outcome", "e.reason", "answer.value"})
"""Expressions that hand on a word which was found where it was made."""
_ELSEWHERE: Final = frozenset({"planner", "testing"})
_SHAPE: Final = re.compile(r"[a-z]+(_[a-z]+)*")
_OTHERS: Final = {
    "with_reason": "why a setting is not shared, in tables of settings",
    "ClientRejected": "the store's handshake, which clients count as store_refused",
    "_log_shortage": "the text of a log line",
}
"""Functions whose argument of such a name is no label."""
_KINDS: Final = {
    "checkpoint": "the kind of a replica's `Failed`, which its service reports as replica",
    "secret": "the store's `ClientRejected`, which clients count as store_refused",
}
"""Words that share a class's name with a reason."""


class Reasons:
    """The words of one tree of sources, and the counted expressions that cannot be traced."""

    def __init__(self, root: Path) -> None:
        files = [f for f in sorted(root.rglob("*.py")) if _ELSEWHERE.isdisjoint(f.relative_to(root).parts)]
        trees = {f: ast.parse(f.read_text()) for f in files}
        self._places = dict(_places(trees.values()))
        self.words: dict[str, str] = {}
        self.untraced: list[str] = []
        for file, tree in trees.items():
            for node in ast.walk(tree):
                for word in self._of(node):
                    if _SHAPE.fullmatch(word) and word not in _KINDS:
                        self.words.setdefault(word, f"{file.relative_to(root.parent)}:{node.lineno}")
                self._trace(file, node)

    def _of(self, node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg in _WORDS:
                    yield from _strings(keyword.value)
                    if isinstance(keyword.value, ast.JoinedStr):
                        yield from self._joined(keyword.value)
            yield from self._arguments(node)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                yield from self._assigned(target, node)
        elif isinstance(node, ast.For) and _name(node.target) in _WORDS:
            yield from _strings(node.iter)
        elif isinstance(node, ast.FunctionDef) and (
            node.name.strip("_").startswith("why") or node.name.endswith("_reason")
        ):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Return) and inner.value is not None:
                    yield from _strings(inner.value)
        elif isinstance(node, ast.ClassDef) and node.name == "ReserveRefusal":
            for inner in node.body:
                if isinstance(inner, ast.Assign):
                    yield from _strings(inner.value)
        if isinstance(node, ast.AnnAssign) and _name(node.target) in _WORDS:
            yield from _strings(node.annotation)

    def _assigned(self, target: ast.expr, node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> Iterator[str]:
        assert node.value is not None
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            for one, value in zip(target.elts, node.value.elts, strict=True):
                if _name(one) in _WORDS:
                    yield from _strings(value)
        elif isinstance(target, ast.Subscript) and _name(target.value) in _WORDS:
            yield from _strings(target.slice)
        elif _name(target) in _WORDS | _TYPES:
            yield from _strings(node.value)
        elif _name(target) in _TABLES:
            keys = node.value.keys if isinstance(node.value, ast.Dict) else [node.value]
            yield from (word for key in keys if key is not None for word in _strings(key))

    def _arguments(self, call: ast.Call) -> Iterator[str]:
        name = _name(call.func)
        if name == "count" and call.args and set(_strings(call.args[0])) & _COUNTERS:
            yield from _strings(call.args[-1])
        for index in () if name in _OTHERS else self._places.get(name, ()):
            if index < len(call.args):
                yield from _strings(call.args[index])

    def _joined(self, text: ast.JoinedStr) -> Iterator[str]:
        # "store_" and an outcome of the store, whose words are those of `payload.Outcome`.
        (start, _) = text.values
        for word in ("present", "pending", "growing", "full", "too_large", "lost"):
            yield f"{ast.literal_eval(start)}{word}"

    def _trace(self, file: Path, node: ast.AST) -> None:
        if not (isinstance(node, ast.Call) and _name(node.func) == "count" and node.args):
            return
        if set(_strings(node.args[0])) & _COUNTERS and not list(_strings(node.args[-1])):
            said = ast.unparse(node.args[-1])
            if said not in _PASSED_ON:
                self.untraced.append(f"{file.name}:{node.lineno}: {said}")


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _strings(node: ast.expr) -> Iterator[str]:
    """String constants that an expression's value may be; not those of conditions, messages or keys."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from (*_strings(node.body), *_strings(node.orelse))
    elif isinstance(node, (ast.BoolOp, ast.Tuple, ast.Dict)):
        values = node.elts if isinstance(node, ast.Tuple) else node.values
        yield from (word for value in values for word in _strings(value))
    elif isinstance(node, ast.Subscript):
        yield from _strings(node.slice)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
        yield from (*_strings(node.func.value), *(word for a in node.args[1:] for word in _strings(a)))


def _places(trees: Iterable[ast.Module]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(function or class, positions of its arguments that are a reason), whatever module it is of."""
    found: dict[str, set[int]] = {"on_failure": {0}, "_on_killed": {0}}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                names = [a.arg for a in node.args.args if a.arg not in ("self", "cls")]
            elif isinstance(node, ast.ClassDef):
                names = [_name(s.target) for s in node.body if isinstance(s, ast.AnnAssign)]
            else:
                continue
            where = {i for i, name in enumerate(names) if name in _WORDS}
            if where:
                found.setdefault(node.name, set()).update(where)
    yield from ((name, tuple(sorted(where))) for name, where in found.items())
