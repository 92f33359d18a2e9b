"""Redis URLs: what they mean, how a wrong one is refused, and that no password is shown."""

from pathlib import Path

import pytest

from headrace_common.errors import SettingsError
from headrace_common.protocol.redis.client.endpoint import (
    Endpoint,
    Topology,
    masked,
    parse_endpoint,
)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h", Endpoint(addresses=(("h", 6379),))),
        (
            "redis://u:p%40%2F@h:1/2",
            Endpoint(addresses=(("h", 1),), options={"username": "u", "password": "p@/", "db": 2}),
        ),
        (
            "rediss://:p@[::1]:7/0?ssl_check_hostname=no",
            Endpoint(
                tls=True,
                addresses=(("::1", 7),),
                options={"password": "p", "db": 0, "ssl_check_hostname": False},
            ),
        ),
        (
            "redis+sentinel://u:p@a:1,b/main/3?sentinel_password=s",
            Endpoint(
                topology=Topology.SENTINEL,
                addresses=(("a", 1), ("b", 26379)),
                master="main",
                options={"username": "u", "password": "p", "db": 3},
                sentinel_options={"password": "s"},
            ),
        ),
        (
            "rediss+sentinel://a/main?ssl_cert_reqs=none",
            Endpoint(
                topology=Topology.SENTINEL,
                tls=True,
                addresses=(("a", 26379),),
                master="main",
                options={"ssl_cert_reqs": "none"},
                sentinel_options={"ssl_cert_reqs": "none"},
            ),
        ),
        (
            "rediss+cluster://a:1,b:2/",
            Endpoint(topology=Topology.CLUSTER, tls=True, addresses=(("a", 1), ("b", 2))),
        ),
        ("unix:///run/q.sock?db=1", Endpoint(options={"path": "/run/q.sock", "db": 1})),
    ],
)
def test_a_url_is_parsed(url: str, expected: Endpoint) -> None:
    assert parse_endpoint(url) == expected


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("localhost:6379", "the scheme must be redis"),
        ("redis+proxy://h", "the scheme must be redis"),
        ("http://h", "the scheme must be redis"),
        ("redis://", "each host must be NAME"),
        ("redis://h:port", "each host must be NAME"),
        ("redis://h:70000", "each host must be NAME"),
        ("redis://a,b", "several hosts need the scheme redis\\+sentinel"),
        ("redis://h/zero", "the database must be a number"),
        ("redis://h?db=-1", "db must be a number"),
        ("redis://h?socket_timeout=3", "no such parameter: socket_timeout; known are"),
        ("redis://h?ssl_ca_certs=/ca", "ssl_ca_certs needs TLS: use the scheme rediss"),
        ("rediss://h?ssl_ca_certs=/no/ca", "ssl_ca_certs=/no/ca is not there"),
        ("rediss://h?ssl_check_hostname=maybe", "ssl_check_hostname must be true or false"),
        ("rediss://h?ssl_cert_reqs=maybe", "ssl_cert_reqs must be required, optional or none"),
        ("redis+sentinel://h", "names its master"),
        ("redis+cluster://h/1", "a cluster has database 0 only"),
        ("redis://h?sentinel_password=p", "need the scheme redis\\+sentinel"),
        ("unix://host/path", "unix:///path"),
    ],
)
def test_a_wrong_url_is_refused_with_the_remedy(url: str, problem: str) -> None:
    with pytest.raises(SettingsError, match=f"redis url .*{problem}"):
        parse_endpoint(url)


def test_a_key_needs_its_certificate(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch()
    with pytest.raises(SettingsError, match="set ssl_certfile"):
        parse_endpoint(f"rediss://h?ssl_keyfile={key}")


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:hunter2@h:port/0",
        "redis://:hun/hunter2@h/0",
        "redis://:hun?hunter2@h/0",
        "redis://:hun#hunter2@h/0",
        "redis://:hun@hunter2@h/zero",
        "redis://:hun:hunter2@h/zero",
        "redis://[:hunter2@h/0",
        "redis+cluster://h/1?password=hunter2&db=1",
        "redis+sentinel://h?sentinel_password=hunter2",
        "rediss://h:x?ssl_password=hunter2",
    ],
)
def test_no_error_shows_a_password(url: str) -> None:
    with pytest.raises(SettingsError) as refused:
        parse_endpoint(url)
    assert "hunter2" not in str(refused.value)
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__


def test_a_masked_url_says_where_redis_is() -> None:
    url = "redis+sentinel://u:p@a:1,b:2/main/0?sentinel_password=s&client_name=c"
    assert masked(url) == (
        "redis+sentinel://u:***@a:1,b:2/main/0?sentinel_password=***&client_name=c"
    )
    assert masked("redis://h:6379/0") == "redis://h:6379/0"
