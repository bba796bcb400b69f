"""The modules of this project as syntax trees: what each of their statements defines, and which names it refers to."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("lossfns", "reducers", "metrics")

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True)
class Place:
    """A name at the top of a module; without a name, the module itself."""

    module: str
    name: str = ""

    @property
    def inside(self) -> bool:
        """Whether this project defines it."""
        return self.module.partition(".")[0] in PACKAGES


@dataclass(frozen=True, eq=False)
class Statement:
    """A definition at the top of a module."""

    module: str
    node: ast.stmt
    names: tuple[str, ...]

    @property
    def first_line(self) -> int:
        """Where it begins, decorators included, counted from 1."""
        decorators: list[ast.expr] = getattr(self.node, "decorator_list", [])
        return min([self.node.lineno, *(decorator.lineno for decorator in decorators)])


@dataclass(frozen=True)
class Module:
    """What the top of one module defines and imports, by name; and which of the imports are for types only."""

    package: str
    lines: tuple[bytes, ...]
    statements: dict[str, Statement] = field(default_factory=dict)
    imports: dict[str, Place] = field(default_factory=dict)
    for_types: set[str] = field(default_factory=set)


@cache
def read(name: str) -> Module:
    """Parse a module of this project, without importing it."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise ValueError(f"there is no module {name}")
    package = name if spec.submodule_search_locations else name.rpartition(".")[0]
    return parse(name, Path(spec.origin).read_bytes(), package)


def parse(name: str, source: bytes, package: str) -> Module:
    """Return what a module defines and imports; relative imports are those of `package`."""
    module = Module(package, tuple(source.splitlines()))
    for node in ast.parse(source).body:
        for inner in node.body if isinstance(node, ast.If) else [node]:  # under TYPE_CHECKING
            if isinstance(inner, (ast.Import, ast.ImportFrom)):
                found = dict(imported(inner, package))
                module.imports.update(found)
                module.for_types.update(found if isinstance(node, ast.If) else ())
            elif not isinstance(inner, ast.Expr):
                names = tuple(bound(inner))
                module.statements.update(dict.fromkeys(names, Statement(name, inner, names)))
    return module


def imported(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[tuple[str, Place]]:
    """Yield each name that an import binds, and what it stands for."""
    for alias in node.names:
        name = alias.asname or alias.name
        if isinstance(node, ast.Import):
            yield name, Place(alias.name)
            continue
        parents = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
        module = ".".join([*parents, *filter(None, [node.module])])
        yield name, Place(f"{module}.{alias.name}") if _is_module(module, alias.name) else Place(module, alias.name)


def find(module: str, name: str) -> Place | None:
    """Return where a name of a module is defined, through re-exports; None for builtins."""
    parsed = read(module)
    if name in parsed.statements:
        return Place(module, name)
    place = parsed.imports.get(name)
    return find(place.module, place.name) if place and place.inside and place.name else place


class References(ast.NodeVisitor):
    """Collects the names that a statement takes from its module, with the attribute that is read of each, if one is.

    Imports of ours inside a function count as the module's, because one file has everything at its top.
    """

    def __init__(self) -> None:
        self.found: list[tuple[ast.Name, ast.Attribute | None]] = []
        self.local_imports: list[ast.ImportFrom] = []
        self._scopes: list[tuple[bool, set[str]]] = []  # whether it is a class's, and what is bound in it

    def visit_Name(self, node: ast.Name) -> None:
        self._note(node, None)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name):
            self._note(node.value, node)
        else:
            self.visit(node.value)

    def generic_visit(self, node: ast.AST) -> None:
        """Walk on, in a scope of its own where the node opens one."""
        if isinstance(node, ast.ImportFrom) and _is_ours(node):
            self.local_imports.append(node)
        if isinstance(node, (*_FUNCTIONS, *_COMPREHENSIONS, ast.ClassDef)):
            self._visit_scope(node)
        else:
            super().generic_visit(node)

    def _visit_scope(self, node: ast.AST) -> None:
        """What stands before the body (decorators, defaults, annotations, bases) belongs to the scope around."""
        body = [] if isinstance(node, _COMPREHENSIONS) else node.body  # type: ignore[attr-defined]
        body = body if isinstance(body, list) else [body]
        inner = [node] if isinstance(node, _COMPREHENSIONS) else body
        if inner is body:
            for child in ast.iter_child_nodes(node):
                if child not in body:
                    self.visit(child)
        around, is_class = self._scopes, isinstance(node, ast.ClassDef)
        self._scopes = [scope for scope in around if is_class or not scope[0]] + [(is_class, set(_names_in(node)))]
        for child in inner:
            super().generic_visit(child) if child is node else self.visit(child)
        self._scopes = around

    def _note(self, node: ast.Name, attribute: ast.Attribute | None) -> None:
        if not any(node.id in names for _, names in self._scopes):
            self.found.append((node, attribute))


def _is_ours(node: ast.Import | ast.ImportFrom) -> bool:
    return isinstance(node, ast.ImportFrom) and (node.level > 0 or Place(node.module or "").inside)


def _is_module(package: str, name: str) -> bool:
    """Whether `from package import name` gives a module of ours: as in `from . import _keys`."""
    if not Place(package).inside or (spec := find_spec(package)) is None or spec.submodule_search_locations is None:
        return False
    return name not in read(package).imports and find_spec(f"{package}.{name}") is not None


def _names_in(scope: ast.AST) -> Iterator[str]:
    """Yield what is bound in a function, class, lambda or comprehension."""
    arguments = getattr(scope, "args", None)
    if isinstance(arguments, ast.arguments):
        yield from (node.arg for node in ast.walk(arguments) if isinstance(node, ast.arg))
    if isinstance(scope, _COMPREHENSIONS):
        for generator in scope.generators:
            yield from bound(generator.target)
    elif not isinstance(scope, ast.Lambda):
        for statement in scope.body:  # type: ignore[attr-defined]
            yield from bound(statement)


def bound(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement binds in its own scope."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        if not _is_ours(node):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    elif not isinstance(node, (*_COMPREHENSIONS, ast.Lambda)):
        if isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            yield node.name
        for child in ast.iter_child_nodes(node):
            yield from bound(child)
