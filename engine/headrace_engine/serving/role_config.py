"""An engine's part in disaggregated prefill."""

from dataclasses import dataclass

from headrace_common.protocol.kv_roles import KVRole


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleConfig:
    """An engine's role; `timeout` are the seconds for which it leaves a request to other roles.

    A consumer computes prompts of up to `max_local_prefill_length` tokens itself.
    """

    role: KVRole = KVRole.BOTH
    max_local_prefill_length: int = 0
    timeout: float = 2.0
