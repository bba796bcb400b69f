"""`make test-distributed`: every test of several processes or replicas, including those that `make test` leaves out."""

import sys

from . import suites

if __name__ == "__main__":
    sys.exit(suites.main())
