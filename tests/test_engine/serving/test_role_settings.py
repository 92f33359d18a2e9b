"""Settings of an engine's role: what they need, and that none is the default."""

from typing import Any

import pytest
from pydantic import ValidationError

from headrace_common.protocol.kv_roles import KVRole
from headrace_engine.serving.settings import EngineSettings


def settings(**values: Any) -> EngineSettings:
    return EngineSettings(model="m", **values)


def test_an_engine_does_everything_unless_it_is_given_a_role() -> None:
    assert settings().roles.role is KVRole.BOTH
    assert settings().engine_config().kv_offloading_paced


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_a_role_needs_the_folder(role: str) -> None:
    with pytest.raises(ValidationError, match=f"kv_role {role} needs kv_offloading_folder"):
        settings(kv_role=role)


def test_a_producer_writes_at_once() -> None:
    folder = {"kv_offloading_folder": "kv", "swap_space": 1.0}
    for role, paced in ((KVRole.PRODUCER, False), (KVRole.CONSUMER, True)):
        found = settings(kv_role=role.value, max_local_prefill_length=7, **folder)
        assert found.roles.role is role
        assert found.roles.max_local_prefill_length == 7
        assert found.engine_config().kv_offloading_paced is paced
