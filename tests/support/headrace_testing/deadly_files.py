"""Makes a gateway die while it loads a registered model, without waiting for other gateways."""

import os
import signal
from typing import NoReturn


def install(_module: str) -> None:
    """The function that a Forge calls in each process that it prepares."""
    from headrace_gateway import __main__ as gateway
    from headrace_gateway.models import model_loads

    model_loads.LOAD_S = 0.0
    vars(gateway)["load_registered"] = _die


def _die(*_: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError
