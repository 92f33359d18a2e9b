"""Images of requests over a real Valkey: one copy, its life, its seal, and who may write it."""

from dataclasses import replace

import pytest

from headrace_common.protocol.base import QueueLimits
from headrace_common.protocol.redis.users import model_rules, role_rules
from headrace_common.sealing.keyring import Keyring, new_key
from headrace_common.sealing.sealer import SealingError
from headrace_common.wire import keys
from headrace_common.wire.images import ImageData, ImageSpan, content_hash, image_digest
from headrace_common.wire.messages import GenerateRequest
from headrace_testing.backends import MODEL, OverRedis, make_request
from headrace_testing.redis_dump import dump

LIMITS = QueueLimits()
PICTURE = b"\x89PNG not secret enough" * 400
OTHER = b"\x89PNG another picture" * 400


def about(encoded: bytes, *, seconds: float = 600.0) -> GenerateRequest:
    data = ImageData(encoded, content_hash(encoded))
    image = ImageSpan(
        digest=image_digest(encoded, b""), start=0, length=1, grid=(1, 2, 2), data=data
    )
    return replace(make_request(seconds=seconds), images=(image,))


async def names(over_redis: OverRedis, prefix: str) -> list[bytes]:
    found: list[bytes] = await over_redis.client.command("KEYS", f"{prefix}:*")
    return found


async def test_requests_with_the_same_image_share_one_copy(over_redis: OverRedis) -> None:
    gateway = over_redis.gateway()
    await gateway.start()
    for _ in range(64):
        await gateway.admit(about(PICTURE), LIMITS)

    (name,) = await names(over_redis, "im")

    assert await over_redis.client.command("STRLEN", name) == len(PICTURE)


async def test_an_image_is_kept_for_its_request_with_the_latest_deadline(
    over_redis: OverRedis,
) -> None:
    gateway = over_redis.gateway()
    await gateway.start()
    long, short = about(PICTURE, seconds=3000), about(PICTURE, seconds=30)
    await gateway.admit(long, LIMITS)
    await gateway.admit(short, LIMITS)
    (name,) = await names(over_redis, "im")
    assert await over_redis.client.command("PTTL", name) > 2_000_000 + keys.GRACE_MS

    await gateway.drop_images(long)
    left = await over_redis.client.command("PTTL", name)
    assert keys.GRACE_MS - 60_000 < left <= keys.GRACE_MS + 30_000

    await gateway.drop_images(short)
    assert 0 < await over_redis.client.command("PTTL", name) <= keys.ENDED_TTL_MS


async def test_all_keys_of_images_expire(over_redis: OverRedis) -> None:
    gateway = over_redis.gateway()
    await gateway.start()
    await gateway.admit(about(PICTURE), LIMITS)

    for prefix in ("im", "ir", "it"):
        (name,) = await names(over_redis, prefix)
        assert await over_redis.client.command("PTTL", name) > 0


async def test_an_image_is_sealed(over_redis: OverRedis) -> None:
    over_redis.ring = Keyring([new_key()])
    gateway, engine = over_redis.gateway(), over_redis.engine()
    await gateway.start()
    await engine.start()
    request = about(PICTURE)
    await gateway.admit(request, LIMITS)

    found = await dump(over_redis.client)

    digest = request.images[0].digest
    for secret in (PICTURE[:40], digest, digest.hex().encode()):
        assert not [name for name, data in found.contents if secret in name.encode() + data]
    assert await engine.image(request, request.images[0].digest) == PICTURE


async def test_a_sealed_image_is_not_opened_in_the_place_of_another(over_redis: OverRedis) -> None:
    over_redis.ring = Keyring([new_key()])
    gateway, engine = over_redis.gateway(), over_redis.engine()
    await gateway.start()
    await engine.start()
    one, other = about(PICTURE), about(OTHER)
    await gateway.admit(one, LIMITS)
    (name,) = await names(over_redis, "im")
    await gateway.admit(other, LIMITS)
    (other_name,) = set(await names(over_redis, "im")) - {name}
    await over_redis.client.command("COPY", other_name, name, "REPLACE")

    with pytest.raises(SealingError):
        await engine.image(one, one.images[0].digest)


def test_engines_of_a_model_only_read_its_images() -> None:
    patterns = [rule for rule in model_rules(MODEL) if ":" in rule and "im:" in rule]

    assert patterns and all(rule.startswith("%R~im:{org/model-1.") for rule in patterns)
    assert "~im:*" in role_rules("gateway") and "~ir:*" not in role_rules("engine")
