"""One self-contained file out of some functions of this project and all that they need."""

from __future__ import annotations

import ast
import builtins
import difflib
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from importlib import metadata

from ._sources import PACKAGES, Place, References, Statement, find, imported, read

LINE = 120


@dataclass(frozen=True)
class Needed:
    """What the wanted names come to.

    Attributes:
        edits: for each statement, the places in the source that stand for a name, and what it is.
        modules: for each module, those whose statements its own refer to.
        imports: what comes from elsewhere, by the name it is known under.
        aliased: places reached under another name than their own.
        dropped: lines of the source that import what now stands in the same file.
    """

    edits: dict[Statement, list[tuple[ast.expr, Place]]] = field(default_factory=dict)
    modules: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    imports: dict[str, Place] = field(default_factory=dict)
    aliased: set[Place] = field(default_factory=set)
    dropped: set[tuple[str, int]] = field(default_factory=set)


def vendor(names: Sequence[str]) -> str:
    """Return the text of a module that holds these functions and needs nothing of this project.

    Args:
        names: exports as "causal_lm_loss" or "reducers.sample_sums", or by module, as
            "lossfns.collators.mask_first_label".

    Returns:
        Python source: a licence line, sorted imports, and the statements needed, in an order in which they run. Names
        that mean different things in different modules are told apart by the module.

    Raises:
        ValueError: an unknown name, or two that cannot stand in one file.

    Example:
        >>> print(vendor(["cross_entropy"]).splitlines()[1])
        # python -m lossfns.recipes vendor cross_entropy
    """
    wanted = [_place(name) for name in names]
    needed = Needed()
    for place in wanted:
        _follow(read(place.module).statements[place.name], needed)
    flat = _flat_names(wanted, needed)
    modules = list(TopologicalSorter(needed.modules).static_order())
    statements = sorted(needed.edits, key=lambda one: (modules.index(one.module), one.node.lineno))
    texts = [_text(statement, needed, flat) for statement in statements]
    header = [
        f"# SPDX-License-Identifier: Apache-2.0, from lossfns {metadata.version('lossfns')}:",
        f"# python -m lossfns.recipes vendor {' '.join(names)}",
    ]
    body = [*header, *_import_lines(needed.imports), "", f"__all__ = {sorted(flat[place] for place in wanted)!r}"]
    return "\n".join(body).replace("'", '"') + "\n\n\n" + "\n\n\n".join(texts) + "\n"


def _place(name: str) -> Place:
    """Find an export by its name, with or without the package, or anything by its module."""
    module, _, last = name.rpartition(".")
    for package in [module] if module else PACKAGES:
        if package.partition(".")[0] in PACKAGES:
            found = find(package, last)
            if found and found.inside and found.name:
                return found
    known = [export for package in PACKAGES for export in read(package).imports]
    close = difflib.get_close_matches(last, known, n=3) or sorted(known)
    raise ValueError(f"there is no {name!r} in {', '.join(PACKAGES)}; did you mean {', '.join(close)}?")


def _follow(statement: Statement, needed: Needed) -> None:
    """Take up a statement and all that it refers to."""
    if statement in needed.edits:
        return
    references = References()
    references.visit(statement.node)
    edits = needed.edits[statement] = []
    needed.modules[statement.module] |= set()
    module, local = read(statement.module), dict[str, Place]()
    for node in references.local_imports:
        local.update(imported(node, module.package))
        needed.dropped.update((statement.module, line) for line in range(node.lineno, (node.end_lineno or 0) + 1))
    for name, attribute in references.found:
        place, span = _referred(statement.module, name, attribute, local)
        if place is None:
            continue
        if not place.inside:
            _add_import(name.id, place, needed.imports)
            continue
        edits.append((span, place))
        if name.id != place.name:
            needed.aliased.add(place)
        if place.module != statement.module and name.id not in local and name.id not in module.for_types:
            needed.modules[statement.module].add(place.module)
        _follow(read(place.module).statements[place.name], needed)


def _referred(
    module: str, node: ast.Name, attribute: ast.Attribute | None, local: Mapping[str, Place]
) -> tuple[Place | None, ast.expr]:
    """What a name stands for, and how far it reaches: `_keys.find` is one name if `_keys` is a module of ours."""
    place = find(local[node.id].module, local[node.id].name) if node.id in local else find(module, node.id)
    if place and place.inside and not place.name:
        if attribute is None:
            raise ValueError(f"{module}, line {node.lineno}: a module that is passed around can't be vendored")
        return find(place.module, attribute.attr), attribute
    if place is None and not hasattr(builtins, node.id):
        raise ValueError(f"{module}, line {node.lineno}: {node.id} is bound in a way that can't be followed")
    return place, node


def _add_import(name: str, place: Place, imports: dict[str, Place]) -> None:
    """Note an import; `import a.b as c` and `from a import b as c` are the same."""
    if place.name or name != place.module.partition(".")[0]:
        module, _, last = f"{place.module}.{place.name}".rstrip(".").rpartition(".")
        place = Place(module, last) if module else place
    if imports.setdefault(name, place) != place:
        raise ValueError(f"{name} is {place} in one module and {imports[name]} in another: vendor them apart")


def _flat_names(wanted: Iterable[Place], needed: Needed) -> dict[Place, str]:
    """One name for each definition: its own, or with its module where that is taken, or not what it is called by."""
    places = [Place(statement.module, name) for statement in needed.edits for name in statement.names]
    taken = Counter([place.name for place in places] + list(needed.imports) + dir(builtins))
    kept = {place: place.name for place in wanted}
    if len(set(kept.values())) < len(kept) or any(name in needed.imports for name in kept.values()):
        raise ValueError(f"of {', '.join(kept.values())} some share a name: vendor them apart")
    for place in places:
        if place not in kept:
            plain = taken[place.name] == 1 and place not in needed.aliased
            kept[place] = place.name if plain else f"{place.name}_of_{place.module.rpartition('.')[2].strip('_')}"
    if len(set(kept.values())) < len(kept):
        raise ValueError(f"{', '.join(map(str, wanted))} need modules of the same name: vendor them apart")
    return kept


def _text(statement: Statement, needed: Needed, flat: dict[Place, str]) -> str:
    """Return a statement's own lines, comments included, with every name as it is called here."""
    lines, first, node = list(read(statement.module).lines), statement.first_line - 1, statement.node
    spans = [
        (one.lineno, one.col_offset, one.end_lineno, one.end_col_offset, flat[place])
        for one, place in needed.edits[statement]
    ]
    for row, start, end_row, end, name in sorted(spans, reverse=True):
        assert row == end_row
        lines[row - 1] = lines[row - 1][:start] + name.encode() + lines[row - 1][end:]
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        pattern = rf"((?:def|class)\s+){node.name}\b".encode()
        name = flat[Place(statement.module, node.name)]
        lines[node.lineno - 1] = re.sub(pattern, rb"\g<1>" + name.encode(), lines[node.lineno - 1], count=1)
    while first and lines[first - 1].startswith(b"#"):
        first -= 1
    kept = [row for row in range(first, node.end_lineno or 0) if (statement.module, row + 1) not in needed.dropped]
    return b"\n".join(lines[row] for row in kept).decode()


def _import_lines(imports: dict[str, Place]) -> Iterator[str]:
    """Yield imports, the standard library's first, in the order that isort and ruff want."""
    yield "from __future__ import annotations"
    sections: dict[bool, dict[tuple[bool, str], list[str]]] = {True: {}, False: {}}
    for name, place in imports.items():
        lines = sections[place.module.partition(".")[0] in sys.stdlib_module_names]
        last = place.name or place.module
        lines.setdefault((bool(place.name), place.module), []).append(last if last == name else f"{last} as {name}")
    for section in filter(None, sections.values()):
        yield ""
        for (is_from, module), found in sorted(section.items()):
            names = sorted(found, key=_order)
            if not is_from:
                yield from (f"import {name}" for name in names)
            elif len(line := f"from {module} import {', '.join(names)}") <= LINE:
                yield line
            else:
                yield from (f"from {module} import (", *(f"    {name}," for name in names), ")")


def _order(name: str) -> tuple[int, str]:
    """Constants, classes, functions."""
    return 0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2, name
