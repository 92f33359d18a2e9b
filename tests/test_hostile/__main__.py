"""Runs attacks by hand: `python -m tests.test_hostile --seed 5` from the root of the repository.

Prints a line for each attack and the table of all; the exit code is 1 if one of them did harm.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

from headrace_testing.hostile.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
