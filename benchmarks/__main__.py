"""`python -m benchmarks`: run the benchmarks and write the report, `RESULTS.md`, from their result files.

A quick run writes to a temporary folder, so that it never replaces the real results. `report` measures nothing and only
writes the report.
"""

import argparse
import tempfile
from pathlib import Path

from . import harness
from .report import SECTIONS, report

HERE = Path(__file__).resolve().parent
ALLOCATORS_OF = {section.benchmark: section.allocators for section in SECTIONS if section.allocators}


def main(arguments: list[str] | None = None) -> Path:
    """Run what the command line asks for and return the path of the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("benchmark", nargs="?", choices=("all", "report", *ALLOCATORS_OF), default="all")
    harness.add_options(parser)
    given = parser.parse_args(arguments)
    harness.check_device(given.device)
    folder = Path(tempfile.mkdtemp(prefix="benchmarks-")) if given.quick else HERE
    for benchmark in {"all": [*ALLOCATORS_OF], "report": []}.get(given.benchmark, [given.benchmark]):
        for allocator in ALLOCATORS_OF[benchmark] if given.device == "cpu" else ("default",):
            harness.progress(f"{benchmark}, allocator: {allocator}")
            harness.run_in_fresh_process(
                benchmark, folder / "results", allocator=allocator, quick=given.quick, device=given.device
            )
    path = folder / "RESULTS.md"
    path.write_text(report(harness.read_results(folder / "results")), encoding="utf-8")
    harness.progress(f"wrote {path}")
    return path


if __name__ == "__main__":
    print(main().read_text(encoding="utf-8"))
