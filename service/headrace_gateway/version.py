"""The version of Headrace."""

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    try:
        return version("headrace")
    except PackageNotFoundError:
        return "unknown"
