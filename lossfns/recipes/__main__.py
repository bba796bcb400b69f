"""List, show or copy the recipes, or put functions of this project into one file of your own.

python -m lossfns.recipes list
python -m lossfns.recipes show early_stopping
python -m lossfns.recipes copy early_stopping mine.py
python -m lossfns.recipes vendor causal_lm_loss reducers.sample_sums > mine.py
"""

from __future__ import annotations

import argparse
import ast
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ._vendor import vendor

FOLDER = Path(__file__).parent


def recipes() -> dict[str, Path]:
    """Return the recipes by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("[!_]*.py"))}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command; errors go to stderr, without a traceback."""
    parser = argparse.ArgumentParser(
        prog="python -m lossfns.recipes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="names and what each shows")
    for name, text in (("show", "print a recipe"), ("copy", "write a recipe to a file")):
        command = commands.add_parser(name, help=text)
        command.add_argument("name", choices=recipes())
    command.add_argument("destination", nargs="?", type=Path, default=Path(), help="a file or a folder; here")
    command = commands.add_parser("vendor", help="print one file with these functions and all they need")
    command.add_argument("names", nargs="+", metavar="name")
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
        sys.stdout.write(vendor(options.names))


def _copy(recipe: Path, destination: Path) -> Path:
    """Copy a recipe to a new file; one that is there stays as it is."""
    target = destination / recipe.name if destination.is_dir() else destination
    if target.exists():
        raise FileExistsError(f"{target} is there already; name another file")
    return Path(shutil.copyfile(recipe, target))


if __name__ == "__main__":
    main()
