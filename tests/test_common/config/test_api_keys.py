"""Stored keys: what a file may contain, how it is parsed, and that no key is ever shown."""

import base64
import json
from datetime import UTC, datetime, timedelta

import pytest
import yaml

from headrace_common.config.api_keys import (
    KEY_PREFIX,
    ApiKey,
    ApiKeysError,
    KeyLimits,
    hash_key,
    new_key,
    read_keys,
    secret_manifest,
    write_keys,
)

NOW = datetime(2027, 1, 2, 3, 4, 5, tzinfo=UTC)
HASH = hash_key("hr-something")


def entry(**fields: object) -> dict[str, object]:
    return {"id": "a", "hash": HASH, **fields}


def read(*entries: dict[str, object]) -> tuple[ApiKey, ...]:
    return read_keys(json.dumps({"keys": entries}).encode())


def test_written_keys_are_read_back() -> None:
    made = new_key(
        "alice",
        NOW,
        tenant="team-a",
        tenant_weight=2.5,
        models=("org/m", "b"),
        limits=KeyLimits(requests_per_minute=60, tokens_per_minute=10_000, concurrency=4),
        priority_ceiling=-5,
        expires=NOW + timedelta(days=30),
    )
    plain = new_key("bob", NOW)

    text = write_keys([made.entry, plain.entry])

    assert read_keys(text.encode()) == (made.entry, plain.entry)
    assert plain.entry.tenant == "default"
    assert plain.entry.models is None and plain.entry.limits.unlimited


def test_a_key_is_random_and_only_its_hash_and_prefix_are_kept() -> None:
    first, second = new_key("a", NOW), new_key("a", NOW)
    text = write_keys([first.entry])

    assert first.secret != second.secret
    assert len(first.secret) == len(KEY_PREFIX) + 43
    assert first.entry.hash == hash_key(first.secret)
    assert first.secret.startswith(first.entry.prefix) and len(first.entry.prefix) == 8
    for shown in (text, repr(first), repr(first.entry)):
        assert first.secret not in shown


def test_yaml_json_and_secrets_are_read() -> None:
    key = new_key("a", NOW).entry
    text = write_keys([key])
    encoded = base64.b64encode(text.encode()).decode()
    as_stored = {"kind": "Secret", "data": {"keys.yaml": encoded}}

    assert read_keys(text.encode()) == (key,)
    assert read_keys(json.dumps(yaml.safe_load(text)).encode()) == (key,)
    assert read_keys(secret_manifest("keys", [key], "ns").encode()) == (key,)
    assert read_keys(json.dumps(as_stored).encode()) == (key,)
    assert yaml.safe_load(secret_manifest("keys", [key], "ns"))["metadata"] == {
        "name": "keys",
        "namespace": "ns",
    }


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ([entry(id="")], "keys.0.id"),
        ([entry(id="-a")], "keys.0.id"),
        ([entry(id="a\nb")], "keys.0.id"),
        ([entry(id="a\n")], "keys.0.id"),
        ([entry(hash="sha256:zz")], "keys.0.hash"),
        ([entry(hash=HASH.upper())], "keys.0.hash"),
        ([entry(key="hr-plain")], "keys.0.key"),
        ([entry(tenant="a b")], "keys.0.tenant"),
        ([entry(models=[""])], "keys.0.models.0"),
        ([entry(limits={"requests_per_minute": 0})], "keys.0.limits.requests_per_minute"),
        ([entry(limits={"requests_per_second": 1})], "keys.0.limits.requests_per_second"),
        ([entry(expires="2027-01-01T00:00:00")], "keys.0.expires"),
        ([entry(), entry(hash=hash_key("x"))], "two keys have the same id: a"),
        ([entry(), entry(id="b")], "two keys have the same hash: a, b"),
        ([entry(tenant_weight=0)], "keys.0.tenant_weight"),
        (
            [entry(), entry(id="b", hash=hash_key("x"), tenant_weight=2)],
            "two keys of the tenant default have different tenant_weight: 1 and 2",
        ),
    ],
)
def test_a_wrong_entry_is_refused_by_its_field(
    entries: list[dict[str, object]], reason: str
) -> None:
    with pytest.raises(ApiKeysError, match=reason.replace(".", r"\.")) as caught:
        read(*entries)
    assert "hr-plain" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"keys",
        b"[]",
        b"{}",
        b"keys: {",
        b"keys: !!python/object/apply:os.system ['true']",
        b"\xff\xfe\x00",
        b"kind: Secret",
        b"kind: Secret\ndata: {keys.yaml: '*'}",
        b"[" * 100_000,
        b" " * (4 * 2**20 + 1),
    ],
)
def test_content_other_than_a_key_file_is_refused(content: bytes) -> None:
    with pytest.raises(ApiKeysError):
        read_keys(content)


def test_a_file_without_keys_refuses_every_client() -> None:
    assert read_keys(b"keys: []") == ()


def test_a_key_ends_when_it_expires() -> None:
    key = new_key("a", NOW, expires=NOW + timedelta(seconds=1)).entry

    assert not key.expired(NOW)
    assert key.expired(NOW + timedelta(seconds=1))


@pytest.mark.parametrize("name", ["", "A", "-a", "a_b", "a" * 254])
def test_a_secret_needs_a_name_that_kubernetes_accepts(name: str) -> None:
    with pytest.raises(ApiKeysError, match="not a valid name of a Secret"):
        secret_manifest(name, [])
