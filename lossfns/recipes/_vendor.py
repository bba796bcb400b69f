"""Copy the three packages into a package of another project."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

PACKAGES = ("lossfns", "reducers", "metrics")
ROOT = Path(__file__).resolve().parents[2]  # the three packages lie next to each other, installed or in a checkout
NOTICE = """\
# SPDX-License-Identifier: Apache-2.0
# Copied from lossfns {version}; the imports between lossfns, reducers and metrics were made relative.
"""

# Absolute imports between the packages, in code and in the examples of docstrings. Error messages and prose keep the
# packages' names, because they name functions by the paths in the documentation.
_NAME = "|".join(PACKAGES)
IMPORT = re.compile(
    r"^(?P<indent>[ \t]*(?:>>> |\.\.\. )?)"
    rf"(?:from (?P<source>{_NAME})(?=(?:\.[\w.]+)? import )|import (?P<module>{_NAME})(?= as |$))",
    re.MULTILINE,
)


def vendor(destination: Path) -> None:
    """Write the three packages into the package folder `destination`, so that they work without this project.

    The recipes are left out: they are scripts to copy, and import an installed project.

    Args:
        destination: folder of a Python package. It is created, with an empty `__init__.py`, if it is missing.

    Raises:
        FileExistsError: `destination` holds one of the packages with other contents.
        ValueError: the name of `destination` cannot be imported.
    """
    name = destination.resolve().name
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"the destination's name must be a Python identifier so that it can be imported, got {name!r}")
    files = {path: _text(path) for package in PACKAGES for path in _paths(ROOT, package)}
    license_file = ROOT / "LICENSE"  # in a checkout; an installed project keeps it with its metadata
    if license_file.exists():
        text = license_file.read_text("utf-8")
    else:
        text = metadata.distribution("lossfns").read_text("licenses/LICENSE") or ""
    files |= {Path(package, "LICENSE"): text for package in PACKAGES}
    for package in PACKAGES:
        present = {path: (destination / path).read_text("utf-8") for path in _paths(destination, package)}
        expected = {path: text for path, text in files.items() if path.parts[0] == package}
        if present and present != expected:
            first = min(path for path in {*present, *expected} if present.get(path) != expected.get(path))
            raise FileExistsError(
                f"{destination / package} exists and {first} in it differs from this version of lossfns; "
                f"remove {destination / package}, or choose another destination"
            )
    for path, text in files.items():
        (destination / path).parent.mkdir(parents=True, exist_ok=True)
        (destination / path).write_text(text, encoding="utf-8", newline="\n")
    (destination / "__init__.py").touch()


def _paths(root: Path, package: str) -> Iterator[Path]:
    """Yield the paths relative to `root` of a package's modules, `py.typed` and LICENSE, without the recipes."""
    for path in sorted((root / package).rglob("*")):
        relative = path.relative_to(root)
        known = path.suffix == ".py" or path.name in {"py.typed", "LICENSE"}
        if known and relative.parts[:2] != ("lossfns", "recipes"):
            yield relative


def _text(path: Path) -> str:
    """Return the text of a vendored file.

    Imports between the packages become relative, so that the copy does not depend on the destination's name and may be
    moved or nested. A file `n` levels below the destination reaches it with `n` dots.
    """
    dots = "." * len(path.parts)

    def relative(match: re.Match[str]) -> str:
        target = f"from {dots}{match['source']}" if match["source"] else f"from {dots} import {match['module']}"
        return match["indent"] + target

    text = IMPORT.sub(relative, (ROOT / path).read_text("utf-8"))
    is_index = len(path.parts) == 2 and path.name == "__init__.py"
    return NOTICE.format(version=metadata.version("lossfns")) + text if is_index else text
