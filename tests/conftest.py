"""What holds for all tests."""

import os
import tempfile
from pathlib import Path

import certifi
import pytest

CERTIFICATE = "-----BEGIN CERTIFICATE-----"


if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores: torch's threads would wait for each other most of the time. Set here,
    # as rooms' conftest.py files import torch before any hook runs.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    _trust_one_authority(config)


def _trust_one_authority(config: pytest.Config) -> None:
    """No test speaks TLS to the world, and each new HTTP client would parse the whole world's
    certificates, which takes longer than most tests."""
    _, first, *_ = Path(certifi.where()).read_text().split(CERTIFICATE)
    file = tempfile.NamedTemporaryFile("w", suffix=".pem")
    file.write(CERTIFICATE + first)
    file.flush()
    config.add_cleanup(file.close)
    os.environ["SSL_CERT_FILE"] = file.name
