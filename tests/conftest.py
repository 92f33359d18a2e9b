"""What holds for all tests."""

import os
import tempfile
from pathlib import Path

import certifi
import pytest

CERTIFICATE = "-----BEGIN CERTIFICATE-----"


def pytest_configure(config: pytest.Config) -> None:
    """Lets HTTP clients trust one authority: no test speaks TLS to the world, and each new client
    would parse the whole world's certificates, which takes longer than most tests."""
    _, first, *_ = Path(certifi.where()).read_text().split(CERTIFICATE)
    file = tempfile.NamedTemporaryFile("w", suffix=".pem")
    file.write(CERTIFICATE + first)
    file.flush()
    config.add_cleanup(file.close)
    os.environ["SSL_CERT_FILE"] = file.name
