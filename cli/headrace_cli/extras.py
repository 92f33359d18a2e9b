"""Names the extra that must be installed for a command."""

from importlib.util import find_spec

from .errors import UsageError


def need(extra: str, *packages: str) -> None:
    """Raises UsageError, which names `extra`, if one of these packages is missing."""
    if any(find_spec(package) is None for package in packages):
        raise UsageError("this command needs more packages", f"pip install 'headrace[{extra}]'")
