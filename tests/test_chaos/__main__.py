"""Runs faults by hand: `python -m tests.test_chaos --fault F1 --seed 5` from the root of the
repository.

Prints one line for each run; the exit code is 1 if a client got a wrong answer.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

from headrace_testing.chaos.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
