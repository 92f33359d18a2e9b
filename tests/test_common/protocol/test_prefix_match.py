"""A prompt's match with what engines tell: exact along the prompt, and bounded."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256

import pytest

from headrace_common.protocol import prefix_match
from headrace_common.protocol.kv_events import BlockFilter
from headrace_common.protocol.prefix_match import PrefixMatch
from headrace_common.wire.block_hashes import (
    MAX_BITS,
    block_hash,
    block_position,
    prefix_seed,
)
from headrace_common.wire.images import ImageSpan
from headrace_common.wire.messages import GenerateRequest
from headrace_engine.core.images import Pixels, PromptImage
from headrace_engine.core.request import EngineRequest
from headrace_engine.core.request import Sequence as EngineSequence
from headrace_engine.kv_cache.kv_cache_manager import KVCacheManager
from headrace_testing.backends import make_request

SIZE = 16
PROMPT = tuple(range(1, 163))  # ten full blocks, and two tokens


def hashes_of(request: GenerateRequest, size: int = SIZE) -> list[bytes]:
    found, before = [], prefix_seed(request.cache_salt, request.adapter)
    for end in range(size, len(request.prompt_token_ids) + 1, size):
        before = block_hash(before, request.prompt_token_ids, request.images, end - size, end)
        found.append(before)
    return found


def filter_of(hashes: Sequence[bytes], size: int = SIZE) -> BlockFilter:
    known = BlockFilter(MAX_BITS, size)
    known.change([block_position(each, MAX_BITS) for each in hashes], ())
    return known


def match(request: GenerateRequest, filters: Mapping[str, BlockFilter]) -> dict[str, int]:
    found = PrefixMatch(request, filters)
    assert found.advance()
    assert set(found.tokens) == set(filters)
    return {engine: tokens for engine, tokens in found.tokens.items() if tokens}


def test_a_match_has_the_leading_blocks_of_each_engine() -> None:
    request = make_request(prompt=PROMPT)
    hashes = hashes_of(request)
    filters = {
        "all": filter_of(hashes),
        "some": filter_of(hashes[:7]),
        "none": filter_of([]),
        "without the first": filter_of(hashes[1:]),
        "with a gap": filter_of([*hashes[:3], *hashes[4:]]),
        "larger blocks": filter_of(hashes_of(request, 40)[:3], 40),
    }
    expected = {"all": 160, "some": 112, "with a gap": 48, "larger blocks": 120}
    assert match(request, filters) == expected
    whole = replace(request, prompt_token_ids=PROMPT[:160])
    assert match(whole, filters)["all"] == 144, "the last token is always computed"
    in_steps = PrefixMatch(request, filters)
    while not in_steps.advance(1):
        pass
    assert {name: tokens for name, tokens in in_steps.tokens.items() if tokens} == expected


@pytest.mark.parametrize(
    "other",
    [{"cache_salt": b"tenant"}, {"lora": "adapter"}, {"prompt_token_ids": (0, *PROMPT[1:])}],
)
def test_other_tenants_adapters_and_prompts_match_nothing(other: dict[str, object]) -> None:
    request = make_request(prompt=PROMPT)
    filters = {"e": filter_of(hashes_of(request))}
    assert match(replace(request, **other), filters) == {}  # type: ignore[arg-type]


def test_engines_and_gateways_compute_the_same_hashes() -> None:
    span = ImageSpan(digest=sha256(b"image").digest(), start=20, length=30, grid=(1, 4, 4))
    requests = [
        make_request(prompt=PROMPT),
        replace(make_request(prompt=PROMPT), cache_salt=b"salt", lora="adapter"),
        replace(make_request(prompt=PROMPT), images=(span,)),
    ]
    seen = set()
    for request in requests:
        images = tuple(PromptImage(each, Pixels({}), each.start, 0) for each in request.images)
        inner = EngineRequest(
            request_id="r",
            prompt_token_ids=request.prompt_token_ids,
            params=request.sampling,
            seed=1,
            cache_salt=request.cache_salt,
            lora=request.adapter,
            images=images,
        )
        kv = KVCacheManager(4, SIZE)
        sequence = EngineSequence(inner, 0, list(PROMPT))
        hashes = [kv.block_hash(sequence, index) for index in range(10)]
        assert match(request, {"e": filter_of(hashes)}) == {"e": 160}
        seen.add(hashes[-1])
    assert len(seen) == 3


def test_a_match_costs_a_bounded_number_of_hashes_and_lookups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = make_request(prompt=PROMPT)
    known = filter_of(hashes_of(request))
    monkeypatch.setattr(prefix_match, "MAX_BLOCKS", 4)
    assert match(request, {"a": known, "b": known}) == {"a": 64, "b": 64}
    monkeypatch.setattr(prefix_match, "MAX_BLOCKS", 100)
    monkeypatch.setattr(prefix_match, "MAX_LOOKUPS", 6)
    assert match(request, {"a": known, "b": known}) == {"a": 48, "b": 48}
