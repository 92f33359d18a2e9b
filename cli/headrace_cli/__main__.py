"""`python -m headrace_cli` is `headrace`."""

from .main import main

if __name__ == "__main__":
    main()
