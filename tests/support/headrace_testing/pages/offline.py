"""Writes docs/offline-api.md from the offline API's tables.

A test compares the page with the one made here.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from headrace_engine.core.config import EngineConfig
from headrace_engine.offline.arguments import (
    UNSUPPORTED_METHODS,
    VLLM_ARGUMENTS,
    Fixed,
    Ignored,
    Meaning,
    Renamed,
)
from headrace_engine.offline.engine_args import OfflineOptions, own_fields
from headrace_engine.offline.prompts import UNSUPPORTED_PROMPT
from headrace_engine.offline.sampling_params import UNSUPPORTED_SAMPLING

PAGE = Path(__file__).resolve().parents[4] / "docs" / "offline-api.md"
INTRODUCTION = """\
# The offline API

`headrace_engine` runs a model in the process of a script, without a queue or a server. Names are
vLLM's, so that scripts only change their imports; what is not there is refused by name. [vLLM's
own examples](vllm-examples.md) say what was run.

```python
from headrace_engine import LLM, SamplingParams

llm = LLM(model="headrace-demo")
params = SamplingParams(temperature=0.0, max_tokens=16, logprobs=1)
output = llm.generate("What is Headrace?", params)[0]
text = output.outputs[0].text
seconds = output.metrics.first_token_time - output.metrics.arrival_time
```

- **LLM**: `generate`, `chat` (with `tools`), `embed`, `encode`, `score`, `beam_search`,
  `get_tokenizer`, `get_default_sampling_params`, `get_metrics`, `reset_prefix_cache`,
  `start_profile`, `stop_profile`. `score` is the cosine of the embeddings of an embedding model.
- **LLMEngine**: `add_request` at any time, `step` returns what is new. **AsyncLLM** streams to
  coroutines; its engine runs in a thread. `EngineArgs` and `FlexibleArgumentParser` read their
  arguments from a command line.
- **SamplingParams** can be changed after their creation; each change is checked. `output_kind`
  is `CUMULATIVE`, `DELTA` or `FINAL_ONLY`. `logprobs` are at most 20.
- **Outputs** have vLLM's fields. `metrics` has `arrival_time`, `first_token_time`,
  `last_token_time`, `finished_time` (seconds since 1970) and `num_generation_tokens`.
  `CompletionOutput.finished` is a value, not a method.
- **get_tokenizer()** has `encode`, `decode`, `apply_chat_template`, `eos_token_id`,
  `convert_ids_to_tokens`, `convert_tokens_to_ids` and `all_special_tokens`. `decode` leaves
  special tokens out unless `skip_special_tokens=False`. Use transformers' `AutoTokenizer` for
  all else.
- `generate(tenant=...)`: tenants share no cached prompts, and the policy may treat them fairly.
  A prompt's `cache_salt` separates the cache further.
- **Images**, where [the model reads them](models.md#images): `{"prompt": ..., "multi_modal_data":
  {"image": image}}`, or a list of images. The prompt has the model's placeholder once for each.
  `chat` reads parts `image_url` (a `data:` URL) and `image_pil`. Nothing is fetched.
- **Videos as frames**, where [the model reads them](api.md#videos): `{"prompt": ...,
  "multi_modal_data": {"video": (frames, {"fps": 2})}}`, or a list of such pairs. Frames are a list
  of images or an array; without a pair one is a second. The prompt is a text, and has for each
  video what the chat template writes for one. `chat` reads parts `video_url` as the server does,
  with `media_io_kwargs={"video": {"fps": 2}}`.
- [Adapters](lora.md) and [structured outputs](structured-outputs.md) are as on the server.

`make generated` writes this page.
"""
VALUES = """\
`dtype` also takes `half` and `float`, `task` takes `embedding`, `load_format` takes `safetensors`.
`gpu_memory_utilization` is a share of what is free after the weights, not of all memory.
"""


def page() -> str:
    return "\n".join(
        [
            INTRODUCTION,
            "## Arguments of LLM and EngineArgs\n",
            f"The engine's: {_names(EngineConfig)}. Of the API: {_names(OfflineOptions)}.\n",
            "None means the default. Other arguments of vLLM:\n",
            "| argument | here |",
            "| --- | --- |",
            *(f"| `{name}` | {_said(each)} |" for name, each in VLLM_ARGUMENTS.items()),
            "",
            VALUES,
            "## Refused by name\n",
            *_table("method of LLM", UNSUPPORTED_METHODS),
            *_table("field of SamplingParams", UNSUPPORTED_SAMPLING),
            *_table("field of a prompt", UNSUPPORTED_PROMPT),
        ]
    )


def _names(kind: type[EngineConfig | OfflineOptions]) -> str:
    return ", ".join(f"`{one.name}`" for one in own_fields(kind))


def _said(meaning: Meaning) -> str:
    match meaning:
        case Renamed(to, values):
            named = {name: value for name, value in (values or {}).items() if name is not None}
            accepted_text = ", ".join(f"`{name}` is `{value}`" for name, value in named.items())
            return f"`{to}`" + (f": {accepted_text}" if accepted_text else "")
        case Ignored(why):
            return f"no effect: {why}"
        case Fixed(accepted, remedy):
            accepted_text = ", ".join(f"`{each!r}`" for each in accepted)
            return f"only {accepted_text}; else: {remedy}"


def _table(title: str, rows: Mapping[str, str]) -> Iterator[str]:
    yield f"| {title} | instead |"
    yield "| --- | --- |"
    yield from (f"| `{name}` | {remedy} |" for name, remedy in rows.items())
    yield ""


if __name__ == "__main__":
    PAGE.write_text(page())
