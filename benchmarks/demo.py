"""The project on a real model: `make demo` (under four minutes on two idle cores; nothing is downloaded here)."""

import sys
import time
from pathlib import Path

OUTPUT = Path(__file__).resolve().parents[1] / "output"


def main() -> None:
    began = time.perf_counter()
    _print_origins()
    from benchmarks import demo_classification, demo_language, demo_report

    ways = demo_language.run()
    print(demo_report.table(ways), end="\n\n")
    print(f"Picture: {demo_report.picture(ways, OUTPUT / 'demo.png')}")
    classified, rating = demo_classification.run()
    print(demo_classification.table(classified, rating), end="\n\n")
    print(f"Picture: {demo_report.confusions(classified, demo_classification.NAMES, OUTPUT / 'confusion.png')}")
    print(f"Done in {time.perf_counter() - began:.0f} s.")


def _print_origins() -> None:
    """A `metrics.py` beside a script shadows the package, so say which ones these are."""
    import lossfns
    import metrics
    import reducers

    for module in (lossfns, reducers, metrics):
        print(f"{module.__name__:9} from {module.__file__}")


if __name__ == "__main__":
    try:
        main()
    except ModuleNotFoundError as error:
        sys.exit(f"The package '{error.name}' is missing: run `make demo`, which installs what it needs.")
    except FileNotFoundError as error:
        sys.exit(f"A file is missing: {error}")
    except KeyboardInterrupt:
        sys.exit("Interrupted.")
