"""Names the extra of the package that a command needs and that is not installed."""

from importlib.util import find_spec

from .errors import UsageError


def need(extra: str, *packages: str) -> None:
    """Raises UsageError if one of these packages is missing; `extra` brings them."""
    if any(find_spec(package) is None for package in packages):
        raise UsageError("this command needs more packages", f"pip install 'headrace[{extra}]'")
