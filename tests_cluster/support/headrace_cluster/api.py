"""The API server without a new kubectl for each request, for what is asked several times a
second."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

TIMEOUT_S = 30.0


@contextmanager
def api_client() -> Iterator[httpx.Client]:
    """A client whose paths are those of the API, through `kubectl proxy`."""
    command = ["kubectl", "proxy", "--port=0"]
    proxy = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    try:
        assert proxy.stdout is not None
        address = proxy.stdout.readline().split()[-1]
        with httpx.Client(base_url=f"http://{address}", timeout=TIMEOUT_S) as client:
            yield client
    finally:
        proxy.terminate()
        proxy.communicate()
