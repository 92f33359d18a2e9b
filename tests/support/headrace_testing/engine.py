"""Builders of engine requests, schedulers and engines over the fake runner, with short defaults."""

from collections.abc import Iterable
from math import inf

from headrace_common.sampling.params import SamplingParams
from headrace_common.wire.images import ImageSpan
from headrace_engine.core.config import EngineConfig
from headrace_engine.core.images import Pixels, PromptImage
from headrace_engine.core.outputs import SequenceOutput
from headrace_engine.core.request import EngineRequest, Sequence
from headrace_engine.kv_cache.kv_cache_manager import KVCacheManager
from headrace_engine.scheduler.input_validation import Limits
from headrace_engine.scheduler.policies import Fcfs, Policy
from headrace_engine.scheduler.scheduler import Scheduler

from .fake_runner import FakeRunner

Choice = tuple[str, int]


def make_request(
    request_id: str,
    prompt: Iterable[int],
    *,
    params: SamplingParams | None = None,
    seed: int = 1,
    arrival: float = 0.0,
    cache_salt: bytes = b"",
    resume: tuple[tuple[int, ...], ...] = (),
    priority: int = 0,
    tenant: str = "default",
    tenant_weight: float = 1.0,
    deadline: float = inf,
) -> EngineRequest:
    """A request; without `params` it asks for four tokens, of which any are accepted."""
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        params=params or SamplingParams(max_tokens=4, ignore_eos=True),
        seed=seed,
        arrival=arrival,
        cache_salt=cache_salt,
        resume=resume,
        priority=priority,
        tenant=tenant,
        tenant_weight=tenant_weight,
        deadline=deadline,
    )


def computed(cache: KVCacheManager, length: int) -> Sequence:
    """A sequence with the tokens 1 to `length`, which was computed token by token."""
    prompt = tuple(range(1, length + 1))
    sequence = Sequence(make_request("r", prompt), 0, list(prompt))
    for end in prompt:
        cache.extend(sequence, end, [])
        sequence.num_computed_tokens = end
        cache.register(sequence, end - 1, end)
        cache.release_outside_window(sequence)
    return sequence


def make_config(
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    enable_prefix_caching: bool = True,
    watermark: float = 0.0,
) -> EngineConfig:
    return EngineConfig(
        model="fake",
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
        watermark=watermark,
    )


def limits_of(runner: FakeRunner) -> Limits:
    return Limits(
        num_blocks=runner.num_blocks,
        block_size=runner.block_size,
        max_model_len=runner.max_model_len,
        vocab_size=runner.vocab_size,
        eos_token_ids=runner.eos_token_ids,
        num_host_blocks=0 if runner.host_kv_cache is None else runner.host_kv_cache.num_blocks,
        bytes_per_block=0 if runner.host_kv_cache is None else runner.host_kv_cache.bytes_per_block,
        kv_groups=runner.kv_groups,
        adapters=runner.adapters,
        images=runner.image_limits,
    )


def prompt_image(name: str, start: int, length: int) -> PromptImage:
    """An image of a prompt, without what a tower would read."""
    span = ImageSpan(
        digest=name.encode().ljust(32), start=start, length=length, grid=(1, 2, 2 * length)
    )
    return PromptImage(span, Pixels({}), position=start, shift=0)


class Rig:
    """A scheduler with its fake runner, and the outputs so far."""

    def __init__(
        self, runner: FakeRunner, config: EngineConfig, policy: Policy | None = None
    ) -> None:
        self.runner = runner
        self.scheduler = Scheduler(
            config, limits_of(runner), policy or Fcfs(), runner.shared_kv_cache
        )
        self.outputs: list[SequenceOutput] = []

    def add(self, *requests: EngineRequest) -> None:
        for request in requests:
            self.outputs += self.scheduler.add(request)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            scheduler_output = self.scheduler.schedule()
            aborted_by_policy = self.scheduler.take_aborted_by_policy()
            self.outputs += aborted_by_policy
            if scheduler_output is None:
                assert aborted_by_policy, "there is nothing to do"
                return
            self.outputs += self.scheduler.update(
                scheduler_output, self.runner.execute(scheduler_output)
            )

    def finish(self) -> None:
        while self.scheduler.has_work:
            self.step()

    def shape(self) -> list[tuple[str, int, int]]:
        """The last step: id, start and length of each run."""
        return [
            (item.sequence.request.request_id, item.start, item.length)
            for item in self.runner.steps[-1].scheduled
        ]

    def tokens(self) -> dict[Choice, tuple[int, ...]]:
        found: dict[Choice, tuple[int, ...]] = {}
        for output in self.outputs:
            key = output.request_id, output.choice
            found[key] = found.get(key, ()) + output.token_ids
        return found

    def expected(self, *requests: EngineRequest) -> dict[Choice, tuple[int, ...]]:
        """The output of an undisturbed run, without the tokens that the request resumes from."""
        return {
            (request.request_id, choice): self.runner.expected(request, choice)[0][
                len(request.resume[choice]) if request.resume else 0 :
            ]
            for request in requests
            for choice in range(request.params.n)
        }


def make_rig(
    config: EngineConfig | None = None,
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 128,
    policy: Policy | None = None,
    num_host_blocks: int = 0,
    prompt_seconds: float = 0.0,
    block_seconds: float = 0.0,
) -> Rig:
    """Makes a Rig. For `prompt_seconds` and `block_seconds` see FakeRunner."""
    runner = FakeRunner(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        num_host_blocks=num_host_blocks,
        prompt_seconds=prompt_seconds,
        block_seconds=block_seconds,
    )
    return Rig(runner, config or make_config(), policy)
