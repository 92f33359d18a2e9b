"""The errors that a user of the simulator can correct."""


class SimulationError(Exception):
    """An input cannot be used; the text names the file or option, the value and the remedy."""
