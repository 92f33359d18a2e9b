"""Messages between processes and their encoding, compared with records of earlier releases.

`python -m headrace_testing.wire_messages FILE`, run with a release's own packages, records its
messages. A message of a new kind is added by name; a recorded one is never changed.
"""

import json
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace_common.errors import FailureCode
from headrace_common.protocol.base import EngineStatus, Outcome
from headrace_common.protocol.frames import (
    decode_control,
    decode_frame,
    decode_outcome,
    encode_control,
    encode_frame,
    encode_outcome,
)
from headrace_common.protocol.model_entry import decode_entry, encode_entry
from headrace_common.protocol.registry import RegisteredModel
from headrace_common.protocol.status import decode_status, encode_status
from headrace_common.protocol.store import StoredRequest, decode_stored, encode_stored
from headrace_common.sampling.params import SamplingParams
from headrace_common.sampling.pooling import PoolingParams
from headrace_common.structured.structured import StructuredOutputsParams
from headrace_common.wire.messages import (
    Cancel,
    ChoiceState,
    Control,
    Disown,
    Drain,
    Failed,
    Frame,
    GenerateRequest,
    Logprobs,
    Reroute,
    Resend,
    Resume,
    StopChoice,
    Sync,
    Takeover,
    Tokens,
    Watch,
    decode_request,
    encode_request,
)

ID = "0.5f1e"
LOGPROBS = (Logprobs(-0.5, 1, ((7, -0.5), (9, -1.25))),)
VECTOR = struct.pack("<2f", 0.5, -1.0)
STATE = ChoiceState(token_ids=(7, 9), finish_reason="stop", stop_token=9, logprobs=None)
SCORED = ChoiceState(token_ids=(7,), finish_reason=None, stop_token=None, logprobs=LOGPROBS)
REQUEST = GenerateRequest(
    request_id=ID,
    model="org/model",
    prompt_token_ids=(1, 2, 70000),
    sampling=SamplingParams(seed=42, max_tokens=5, prompt_logprobs=1),
    created_ms=1_700_000_000_000,
    deadline_ms=1_700_000_600_000,
)
FULL_REQUEST = GenerateRequest(
    request_id=ID,
    model="org/model",
    prompt_token_ids=(1,),
    sampling=SamplingParams(
        n=2,
        seed=42,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        logit_bias={7: -1.5},
        logprobs=3,
        stop_token_ids=(9,),
        structured_outputs=StructuredOutputsParams(regex="a+"),
        bad_words_token_ids=([3, 4],),
        best_of=4,
    ),
    created_ms=1_700_000_000_000,
    deadline_ms=1_700_000_600_000,
    tenant="team",
    cache_salt=b"\x00\xff",
    priority=-1,
    trace={"traceparent": "00-1-2-01"},
    keep_ms=1000,
    window_ms=2000,
    lora="sql",
)
EMBEDDING_REQUEST = GenerateRequest(
    request_id=ID,
    model="org/model",
    prompt_token_ids=(1,),
    sampling=SamplingParams(seed=1, max_tokens=1),
    created_ms=1,
    deadline_ms=2,
    pooling=PoolingParams(dimensions=2),
)
FRAME = Frame(
    "pod.1.abc",
    (
        Tokens(ID, 1, 0, 0, (7,)),
        Tokens(ID, 1, 1, 4, (7,), logprobs=LOGPROBS, finish_reason="length", cached_tokens=16),
        Tokens(ID, 1, 0, 0, (), finish_reason="stop", embedding=VECTOR),
        Takeover(request_id=ID, attempt=2, round=1),
        Sync(request_id=ID, attempt=2, choices=(STATE, SCORED), cached_tokens=3),
        Failed(request_id=ID, attempt=2, failure=FailureCode.DEADLINE, message="too late"),
    ),
)
CONTROLS: Mapping[str, Control] = {
    "cancel": Cancel(request_id=ID),
    "stop choice": StopChoice(request_id=ID, choice=1),
    "resume": Resume(request_id=ID, attempt=2, choices=(STATE, SCORED), round=1),
    "resend": Resend(request_id=ID, choice=0, index=5),
    "reroute": Reroute(request_id=ID, gateway_id="g.1.abc"),
    "disown": Disown(request_id=ID, attempt=2, superseded=True),
    "drain": Drain(),
    "watch": Watch(duration_ms=3000),
}
STATUS = EngineStatus(
    engine_id="pod.1.abc",
    model="org/model",
    max_model_len=4096,
    running=3,
    capacity=64,
    kv_utilization=0.25,
    tokens_per_second=100.5,
    last_step_age=0.0,
    draining=False,
    version="0.1.0",
    shards=2,
)
MODEL = RegisteredModel(
    name="org/model",
    digest="d" * 64,
    max_model_len=4096,
    created=1_700_000_000,
    owner="models/m",
    adapters=("sql",),
)
STORED = StoredRequest(
    request_id="5f1e",
    operation="chat",
    fingerprint=b"\x01\x02",
    created=1_700_000_000,
    expires_ms=1_700_000_600_000,
    requests=(REQUEST,),
    stop=("\n",),
    include_usage=True,
)
FAILED = Failed(request_id=ID, attempt=2, failure=FailureCode.LOST, message="lost")


@dataclass(frozen=True, slots=True)
class Message:
    """A message, and the functions that encode and decode it."""

    content: Any
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


REQUESTS = {
    "request": REQUEST,
    "request with everything": FULL_REQUEST,
    "request for an embedding": EMBEDDING_REQUEST,
    "request of a weighted tenant": replace(REQUEST, tenant_weight=2.5),
}
OUTCOMES = {
    "outcome": Outcome(choices=(STATE, SCORED), cached_tokens=3),
    "failed outcome": Outcome(choices=(STATE,), failed=FAILED),
}
MESSAGES: Mapping[str, Message] = {
    **{name: Message(one, encode_request, decode_request) for name, one in REQUESTS.items()},
    "frame": Message(FRAME, encode_frame, decode_frame),
    **{name: Message(one, encode_outcome, decode_outcome) for name, one in OUTCOMES.items()},
    "status": Message(STATUS, encode_status, decode_status),
    "model": Message(MODEL, encode_entry, decode_entry),
    "stored request": Message(STORED, encode_stored, decode_stored),
    **{name: Message(one, encode_control, decode_control) for name, one in CONTROLS.items()},
}


def record(path: Path) -> None:
    """Writes all messages as this release encodes them, in hexadecimal digits."""
    encoded = {name: one.encode(one.content).hex() for name, one in MESSAGES.items()}
    path.write_text(json.dumps(encoded, indent=1) + "\n")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
