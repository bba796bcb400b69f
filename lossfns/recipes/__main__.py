"""List, show or copy the recipes, or copy the packages into your own project.

python -m lossfns.recipes list
python -m lossfns.recipes show early_stopping
python -m lossfns.recipes copy early_stopping my_training.py
python -m lossfns.recipes vendor mylib/_vendor
"""

from __future__ import annotations

import argparse
import ast
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ._vendor import PACKAGES, vendor

FOLDER = Path(__file__).parent


def recipes() -> dict[str, Path]:
    """Return the path of each recipe by its name."""
    return {path.stem: path for path in sorted(FOLDER.glob("[!_]*.py"))}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command. Errors are printed to stderr without a traceback, with exit status 1."""
    parser = argparse.ArgumentParser(
        prog="python -m lossfns.recipes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="print the name and the purpose of each recipe")
    for name, text in (("show", "print a recipe"), ("copy", "write a recipe to a new file")):
        command = commands.add_parser(name, help=text)
        command.add_argument("name", choices=recipes())
    command.add_argument(
        "destination", nargs="?", type=Path, default=Path(), help="a new file, or a folder (default: the current one)"
    )
    command = commands.add_parser("vendor", help=f"copy {', '.join(PACKAGES)} into a package of your own project")
    command.add_argument("destination", type=Path, help="the package's folder; it is created if it is missing")
    options = parser.parse_args(argv)
    try:
        _run(options)
    except (OSError, ValueError) as error:
        parser.exit(1, f"{error}\n")


def _run(options: argparse.Namespace) -> None:
    if options.command == "list":
        for name, path in recipes().items():
            summary = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            print(f"{name:22} {summary.splitlines()[0]}")
    elif options.command == "show":
        sys.stdout.write(recipes()[options.name].read_text(encoding="utf-8"))
    elif options.command == "copy":
        print(f"wrote {_copy(recipes()[options.name], options.destination)}")
    else:
        vendor(options.destination)
        print(f"wrote {', '.join(PACKAGES)} to {options.destination}")


def _copy(recipe: Path, destination: Path) -> Path:
    """Copy a recipe to a file that does not exist yet, and return its path."""
    target = destination / recipe.name if destination.is_dir() else destination
    if target.exists():
        raise FileExistsError(f"{target} already exists; choose another file")
    return Path(shutil.copyfile(recipe, target))


if __name__ == "__main__":
    main()
