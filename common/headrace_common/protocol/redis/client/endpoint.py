"""Parses the URL of Redis: one server, one behind Sentinels, or a cluster.

Errors show the URL without its passwords. Opens nothing; only checks that named files exist.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from ....errors import SettingsError

Address = tuple[str, int]

REDIS_PORT = 6379
SENTINEL_PORT = 26379
_SECRETS = "password", "ssl_password", "sentinel_password"
_SECRET_PARAMETER = re.compile(rf"([?&](?:{'|'.join(_SECRETS)})=)[^&]*")
_USER_INFO = re.compile(r"(://[^:@/]*):.*@", re.DOTALL)


class Topology(StrEnum):
    SINGLE = ""
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A parsed URL of Redis.

    `addresses` are those of the server, the Sentinels, or some nodes of the cluster; empty if
    `options` has the path of a socket. `options` are redis-py's options for connections to Redis,
    `sentinel_options` those for connections to Sentinels.
    """

    topology: Topology = Topology.SINGLE
    tls: bool = False
    addresses: tuple[Address, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    master: str = ""
    sentinel_options: Mapping[str, Any] = field(default_factory=dict)


def parse_endpoint(url: str) -> Endpoint:
    """Parses a URL. Raises SettingsError, which names the problem and the remedy."""
    try:
        parts = urlsplit(url)
        if parts.scheme == "unix":
            return _socket(parts)
        return _server(parts)
    except ValueError as error:
        # The cause may quote the URL, and with it a password.
        raise SettingsError(f"redis url {masked(url)}: {error}") from None


def masked(url: str) -> str:
    """The URL without its passwords, even if it is invalid otherwise."""
    return _SECRET_PARAMETER.sub(r"\1***", _USER_INFO.sub(r"\1:***@", url))


def _socket(parts: SplitResult) -> Endpoint:
    user_info, _, host = parts.netloc.rpartition("@")
    if host or not parts.path:
        raise ValueError("a socket's URL is unix:///path/of/socket")
    options = {"path": unquote(parts.path), **_credentials(user_info), **_parameters(parts, False)}
    return Endpoint(options=options)


def _server(parts: SplitResult) -> Endpoint:
    topology, tls = _scheme(parts.scheme)
    user_info, _, hosts = parts.netloc.rpartition("@")
    if "@" in parts.path or parts.fragment:
        raise ValueError("write '/', '?', '#' and '@' in a user or password as %2F, %3F, %23, %40")
    port = SENTINEL_PORT if topology is Topology.SENTINEL else REDIS_PORT
    addresses = tuple(_address(host, port) for host in hosts.split(","))
    if topology is Topology.SINGLE and len(addresses) > 1:
        raise ValueError("several hosts need the scheme redis+sentinel or redis+cluster")
    options = {**_credentials(user_info), **_parameters(parts, tls)}
    sentinel = _sentinel_options(topology, options)
    return Endpoint(
        topology=topology,
        tls=tls,
        addresses=addresses,
        master=_place(topology, parts.path, options),
        options=options,
        sentinel_options=sentinel,
    )


def _scheme(scheme: str) -> tuple[Topology, bool]:
    transport, plus, topology = scheme.partition("+")
    known = {"redis", "rediss"} if not plus or topology in ("sentinel", "cluster") else set()
    if transport not in known:
        raise ValueError(
            "the scheme must be redis, redis+sentinel, redis+cluster, each with rediss for TLS, or "
            "unix"
        )
    return Topology(topology), transport == "rediss"


def _address(text: str, default: int) -> Address:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if host is None:
        raise ValueError("each host must be NAME or NAME:PORT with a port from 1 to 65535")
    return unquote(host), default if port is None else port


def _credentials(user_info: str) -> dict[str, Any]:
    user, _, password = user_info.partition(":")
    found = {"username": unquote(user), "password": unquote(password)}
    return {name: value for name, value in found.items() if value}


def _place(topology: Topology, path: str, options: dict[str, Any]) -> str:
    """The master's name; sets the database in `options`."""
    path = unquote(path).strip("/")
    master = ""
    if topology is Topology.SENTINEL:
        master, _, path = path.partition("/")
        if not master:
            raise ValueError("a Sentinel's URL names its master: redis+sentinel://HOST/MASTER/0")
    if path:
        options.setdefault("db", _number(path, "the database"))
    if topology is Topology.CLUSTER and options.get("db", 0) != 0:
        raise ValueError("a cluster has database 0 only: leave the database out")
    return master


def _parameters(parts: SplitResult, tls: bool) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        read = _PARAMETERS.get(name)
        if read is None:
            shown = name if re.fullmatch(r"[a-z_]{1,32}", name) else "..."
            raise ValueError(f"no such parameter: {shown}; known are {', '.join(_PARAMETERS)}")
        if name.startswith("ssl_") and not tls:
            raise ValueError(f"{name} needs TLS: use the scheme rediss")
        options[name] = read(value, name)
    if "ssl_keyfile" in options and "ssl_certfile" not in options:
        raise ValueError("ssl_keyfile needs the certificate too: set ssl_certfile")
    return options


def _sentinel_options(topology: Topology, options: dict[str, Any]) -> dict[str, Any]:
    """Takes Sentinel's user and password out of `options`; TLS is the same for both."""
    own = {
        name: options.pop(f"sentinel_{name}")
        for name in ("username", "password")
        if f"sentinel_{name}" in options
    }
    if topology is not Topology.SENTINEL and not own:
        return {}
    if topology is not Topology.SENTINEL:
        raise ValueError("sentinel_username and sentinel_password need the scheme redis+sentinel")
    return {**{name: value for name, value in options.items() if name.startswith("ssl_")}, **own}


def _text(value: str, _name: str) -> str:
    return value


def _number(value: str, name: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise ValueError(f"{name} must be a number from 0 on")
    return int(value)


def _switch(value: str, name: str) -> bool:
    found = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if value.lower() not in found:
        raise ValueError(f"{name} must be true or false")
    return found[value.lower()]


def _file(value: str, name: str) -> str:
    if not Path(value).exists():
        raise ValueError(f"{name}={value} is not there: name a file that this process can read")
    return value


def _certificates(value: str, name: str) -> str:
    if value not in ("required", "optional", "none"):
        raise ValueError(f"{name} must be required, optional or none")
    return value


_PARAMETERS: Mapping[str, Callable[[str, str], Any]] = {
    "username": _text,
    "password": _text,
    "db": _number,
    "client_name": _text,
    "sentinel_username": _text,
    "sentinel_password": _text,
    "ssl_ca_certs": _file,
    "ssl_ca_path": _file,
    "ssl_certfile": _file,
    "ssl_keyfile": _file,
    "ssl_password": _text,
    "ssl_cert_reqs": _certificates,
    "ssl_check_hostname": _switch,
    "ssl_ciphers": _text,
}
