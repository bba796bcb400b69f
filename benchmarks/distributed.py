"""`make test-distributed`: every test of several processes or replicas, those that `make test` leaves out too."""

import sys
from dataclasses import asdict

from . import harness, proof


def main() -> int:
    """Runs the tests, writes their result file, and returns the status to exit with."""
    outcomes = proof.run_tests(sys.executable, "-m", "distributed", "tests")
    proof.write(
        "distributed",
        "make test-distributed",
        harness.versions("torch", "transformers", "accelerate", "peft"),
        [asdict(outcome) for outcome in outcomes],
    )
    return int(any(outcome.outcome == "failed" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
