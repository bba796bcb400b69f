"""`python -m benchmarks`: run the benchmarks and write the report, `RESULTS.md`, from their result files.

A quick run goes to a folder of its own, so that its small sizes never stand in for the real ones.
"""

import argparse
import tempfile
from pathlib import Path

from . import evaluation, harness, hidden, losses, metrics, metrics_tasks

HERE = Path(__file__).resolve().parent
SECTIONS = {
    "losses": losses.report,
    "hidden": hidden.report,
    "evaluation": evaluation.report,
    "metrics": metrics.report,
    "metrics_tasks": metrics_tasks.report,
}
# Speed depends on the allocator; what an evaluation keeps does not.
ALLOCATORS_OF = {
    "losses": ("default", "kept"),
    "hidden": ("default", "kept"),
    "evaluation": ("default",),
    "metrics": ("default",),
    "metrics_tasks": ("default",),
}


def main(arguments: list[str] | None = None) -> Path:
    """Runs what the command line asks for and returns the path of the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("benchmark", nargs="?", choices=("all", *SECTIONS), default="all")
    parser.add_argument("--quick", action="store_true", help="sizes too small to show anything but that it runs")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given = parser.parse_args(arguments)
    harness.check_device(given.device)
    folder = Path(tempfile.mkdtemp(prefix="benchmarks-")) if given.quick else HERE
    for benchmark in SECTIONS if given.benchmark == "all" else (given.benchmark,):
        for allocator in ALLOCATORS_OF[benchmark] if given.device == "cpu" else ("default",):
            harness.progress(f"{benchmark}, allocator: {allocator}")
            harness.run_in_fresh_process(
                benchmark, folder / "results", allocator=allocator, quick=given.quick, device=given.device
            )
    report = folder / "RESULTS.md"
    report.write_text(harness.report(harness.read_results(folder / "results"), SECTIONS), encoding="utf-8")
    harness.progress(f"wrote {report}")
    return report


if __name__ == "__main__":
    print(main().read_text(encoding="utf-8"))
