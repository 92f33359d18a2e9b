"""Checks which Prometheus a ModelService may name.

The operator queries it from its own place in the network, and could reach addresses there that the
authors of ModelServices cannot.
"""

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

from yarl import URL

from ..errors import InvalidSpec
from .model_service import ModelService

FIELD = "spec.scaling.prometheusUrl"

# Metadata services that are not at a link-local address: AWS, Alibaba, Azure.
_METADATA = frozenset(
    ip_address(text) for text in ("fd00:ec2::254", "100.100.100.200", "168.63.129.16")
)
_NAT64 = IPv6Network("64:ff9b::/96")


@dataclass(frozen=True, slots=True)
class PrometheusUrls:
    """The allowed URLs. `own` is the operator's Prometheus.

    With an empty `allowed` all URLs are allowed except the node's own addresses and metadata
    services.
    """

    own: str | None = None
    allowed: tuple[str, ...] = ()

    def check(self, service: ModelService) -> None:
        """Raises InvalidSpec if the operator must not query the URL that the ModelService names."""
        text = service.spec.scaling.prometheus_url
        if text is None or self.trusts(text):
            return
        if self.allowed:
            raise InvalidSpec(
                FIELD,
                f"{shown(text)} is not among the operator's prometheus_allowed_urls; name one of "
                "them, have it added, or leave the field out",
            )
        if is_local(_parsed(text).host or ""):
            raise InvalidSpec(
                FIELD,
                f"{shown(text)} is an address of the node or of a metadata service; name the "
                "Service of a Prometheus, or have it added to the operator's "
                "prometheus_allowed_urls",
            )

    def trusts(self, text: str) -> bool:
        """Whether the operator's settings name this URL, or one above it."""
        url = _parsed(text)
        named = (*self.allowed, *([] if self.own is None else [self.own]))
        return any(_is_below(url, URL(one)) for one in named)


def shown(text: str) -> str:
    """Scheme, host and port, without the possibly secret user, password and path."""
    return str(_parsed(text).origin())


def problem_of(text: str) -> str | None:
    """Why a query to this URL would not go to `/api/v1/query` below it, and what to write."""
    try:
        url = URL(text)
        url.origin()
    except ValueError:
        url = URL()
    if url.scheme not in ("http", "https"):
        return "not a URL of a Prometheus; use http://HOST:PORT or https://HOST:PORT"
    if "?" in text or "#" in text:
        return "a query or fragment is not allowed; leave it out"
    return None


def _parsed(text: str) -> URL:
    problem = problem_of(text)
    if problem is not None:
        raise InvalidSpec(FIELD, problem)
    return URL(text)


def _is_below(url: URL, named: URL) -> bool:
    if (url.scheme, url.host, url.port) != (named.scheme, named.host, named.port):
        return False
    return f"{url.path}/".startswith(f"{named.path.rstrip('/')}/")


def is_local(host: str) -> bool:
    """Whether an address belongs to the node itself or to a metadata service. Names do not."""
    try:
        address = _unwrapped(ip_address(host.partition("%")[0]))
    except ValueError:
        return False
    return (
        address.is_loopback
        or address.is_link_local
        or address.is_unspecified
        or address.is_multicast
        or address in _METADATA
    )


def _unwrapped(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """The IPv4 address inside an IPv6 one."""
    if isinstance(address, IPv4Address):
        return address
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address
