"""vLLM's published examples, with replacements for their imports, models and URLs.

The examples themselves are not part of this repository: VLLM_EXAMPLES names the folder `examples`
of vLLM's source distribution. Writes docs/vllm-examples.md.
"""

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parents[3] / "docs" / "vllm-examples.md"
VERSION = "0.11.0"
VARIABLE = "VLLM_EXAMPLES"
_IMPORT = re.compile(r"(?m)^from vllm(\.[\w.]+)? import")
_URL = re.compile(r"http://(localhost|127\.0\.0\.1):8000")
_TIMEOUT_S = 300

DEMO, LONG, EMBEDDER, ADAPTED, ADAPTER = "demo", "long", "embedder", "adapted", "adapter"
AGENT = "agent"
DRAFT = {"meta-llama/Llama-2-13b-chat-hf": DEMO, "ibm-ai-platform/llama-13b-accelerator": DEMO}
OPT = {"facebook/opt-125m": DEMO}


@dataclass(frozen=True, slots=True)
class Example:
    """An example by its `path`; `{name}` in `arguments` is the folder of a model.

    `models` maps the models in its text to their replacements. `other` are further replacements in
    its text. `shows` is a pattern of its output. `model` is the model that the server of a client
    example serves.
    """

    path: str
    shows: str
    arguments: tuple[str, ...] = ()
    models: Mapping[str, str] | None = None
    other: Mapping[str, str] | None = None
    note: str = ""
    model: str = DEMO


@dataclass(frozen=True, slots=True)
class Refused:
    """Examples that do not run, each with the reason."""

    paths: tuple[str, ...]
    why: str


OFFLINE = (
    Example("basic/basic.py", r"(?s)(Output: .*){4}", models=OPT),
    Example(
        "basic/generate.py",
        r"(?s)(Generated text: .*){4}",
        ("--model", "{demo}", "--max_tokens", "8", "--temperature", "0.5", "--top-k", "5"),
    ),
    Example(
        "basic/chat.py", r"(?s)(Generated text: .*){11}", ("--model", "{demo}", "--max-tokens", "8")
    ),
    Example("basic/embed.py", r"(?s)(Embeddings: \[.*){4}", ("--model", "{embedder}")),
    Example(
        "basic/score.py",
        r"(?s)(Score: -?[0-9.]+.*){2}",
        ("--model", "{embedder}"),
        note="with an embedding model: the score is the cosine of two embeddings",
    ),
    Example("pooling/embed_jina_embeddings_v3.py", "Embeddings", ("--model", "{embedder}")),
    Example(
        "pooling/embed_matryoshka_fy.py",
        r"(?s)(\(size=32\).*){6}",
        ("--model", "{embedder}", "--pooler-config", '{"matryoshka_dimensions": [32]}'),
        note="with a model that was not trained for it, hence `--pooler-config`",
    ),
    Example("llm_engine_example.py", r"(?s)(RequestOutput\(.*){3}", ("--model", "{demo}")),
    Example(
        "async_llm_streaming.py",
        r"(?s)(Generation complete.*){3}",
        models={"meta-llama/Llama-3.2-1B-Instruct": DEMO},
    ),
    Example(
        "automatic_prefix_caching.py",
        r"(?s)(Generation time: .*){2}",
        models={"lmsys/longchat-13b-16k": LONG},
    ),
    Example("prefix_caching.py", "Generated answers are the same: True", models=OPT),
    Example(
        "structured_outputs.py",
        r"(?s)Choice: (Positive|Negative)\n.*Regex: \w+.*JSON: .*Grammar: SELECT ",
        models={"Qwen/Qwen2.5-3B-Instruct": DEMO},
    ),
    Example("reproducibility.py", r"(?s)(Generated text: .*){4}\n\d+", models=OPT),
    Example("metrics.py", r"vllm:prefix_cache_queries \(counter\) = [1-9]", models=OPT),
    Example("simple_profiling.py", r"(?s)(Generated text: .*){4}", models=OPT),
    Example("context_extension.py", "Generated text: ", models={"Qwen/Qwen3-0.6B": DEMO}),
    Example(
        "multilora_inference.py",
        r"(?s)(RequestOutput\(.*){4}",
        models={"meta-llama/Llama-2-7b-hf": ADAPTED},
        other={'snapshot_download(repo_id="yard1/llama-2-7b-sql-lora-test")': '"{adapter}"'},
        note="the adapter is a folder",
    ),
    Example(
        "mlpspeculator.py",
        "(?s)Without speculation.*With speculation",
        models=DRAFT,
        note="with a draft model in place of the MLP speculator",
    ),
)
ONLINE = (
    Example("openai_completion_client.py", r"(?s)Completion\(.*top_logprobs=\["),
    Example("openai_completion_client.py", r"(?s)(Completion\(.*){3}", ("--stream",)),
    Example("openai_chat_completion_client.py", r"ChatCompletion\("),
    Example("openai_chat_completion_client.py", r"(?s)(ChatCompletionChunk\(.*){3}", ("--stream",)),
    Example(
        "openai_chat_completion_client_with_tools_required.py",
        r"ChatCompletionMessageFunctionToolCall\(",
    ),
    Example("openai_chat_completion_client_with_tools_xlam.py", "All tests completed", model=AGENT),
    Example(
        "openai_chat_completion_client_with_tools_xlam_streaming.py",
        "All tests completed",
        model=AGENT,
    ),
    Example(
        "openai_chat_completion_with_reasoning.py",
        r"reasoning_content for Round 2: \w",
        model=AGENT,
    ),
    Example(
        "openai_chat_completion_with_reasoning_streaming.py", r"reasoning_content:\w", model=AGENT
    ),
    Example("structured_outputs/structured_outputs.py", r"(?s)(Content: .*){5}", ("--reasoning",)),
    Example("structured_outputs/structured_outputs.py", r"(?s)(Content: .*){5}", ("--stream",)),
    Example("pooling/openai_embedding_client.py", r"(?s)(\[-?[0-9.]+, .*){2}", model=EMBEDDER),
    Example(
        "pooling/openai_embedding_matryoshka_fy.py",
        r"^\[(-?[0-9.e-]+, ){31}-?[0-9.e-]+\]$",
        model=EMBEDDER,
    ),
)
REFUSED = (
    Refused(
        (
            "offline_inference/logits_processor/custom.py",
            "offline_inference/logits_processor/custom_req.py",
            "offline_inference/logits_processor/custom_req_init.py",
        ),
        "`logits_processors`: use `logit_bias`, `allowed_token_ids`, `bad_words` or "
        "`structured_outputs`",
    ),
    Refused(
        (
            "offline_inference/basic/classify.py",
            "offline_inference/basic/reward.py",
            "offline_inference/pooling/ner.py",
            "offline_inference/pooling/qwen3_reranker.py",
            "offline_inference/pooling/convert_model_to_seq_cls.py",
        ),
        "models that classify or reward are not supported",
    ),
    Refused(
        (
            "offline_inference/prompt_embed_inference.py",
            "online_serving/prompt_embed_inference_with_openai_client.py",
        ),
        "`prompt_embeds`: send texts or token ids",
    ),
    Refused(
        ("offline_inference/chat_with_tools.py",),
        "`tokenizer_mode`, `config_format` and `load_format` mistral: use a checkpoint with "
        "tokenizer.json and config.json; the example also needs a model that calls tools",
    ),
    Refused(
        ("offline_inference/skip_loading_weights_in_engine_init.py",),
        "`collective_rpc`: make a new LLM",
    ),
    Refused(
        (
            "online_serving/pooling/openai_classification_client.py",
            "online_serving/pooling/openai_pooling_client.py",
            "online_serving/pooling/ner.py",
        ),
        "`/classify` and `/pooling` do not exist",
    ),
    Refused(
        ("online_serving/api_client.py",),
        "`/generate` is the route of vLLM's demonstration server: use `/v1/completions`",
    ),
)
NOT_TRIED = (
    Refused(
        (
            "online_serving/openai_cross_encoder_score.py",
            "online_serving/pooling/jinaai_rerank_client.py",
            "online_serving/pooling/cohere_rerank_client.py",
        ),
        "they need `/score` and `/rerank` with a cross-encoder",
    ),
    Refused(
        (
            "online_serving/openai_chat_completion_client_with_tools.py",
            "online_serving/openai_chat_completion_tool_calls_with_reasoning.py",
        ),
        "they end with an error unless the model decides to call a tool",
    ),
    Refused(
        (
            "offline_inference/spec_decode.py",
            "offline_inference/lora_with_quantization_inference.py",
            "offline_inference/save_sharded_state.py",
            "offline_inference/load_sharded_state.py",
            "offline_inference/batch_llm_inference.py",
        ),
        "they need vLLM's data sets, checkpoints of some gigabytes, or Ray",
    ),
    Refused(
        (
            "online_serving/retrieval_augmented_generation_with_langchain.py",
            "online_serving/retrieval_augmented_generation_with_llamaindex.py",
            "online_serving/gradio_webserver.py",
            "online_serving/gradio_openai_chatbot_webserver.py",
            "online_serving/streamlit_openai_chatbot_webserver.py",
            "online_serving/opentelemetry/dummy_client.py",
        ),
        "they need packages that Headrace's tests do not install",
    ),
)


def offline_text(text: str, example: Example, models: Mapping[str, str]) -> str:
    """An example with Headrace's import and other models."""
    text = _IMPORT.sub("from headrace_engine import", text)
    for old, name in (example.models or {}).items():
        assert old in text, f"{example.path} names {old} no more"
        text = text.replace(f'"{old}"', f'"{models[name]}"')
    for old, new in (example.other or {}).items():
        assert old in text, f"{example.path} has {old} no more"
        text = text.replace(old, new.format_map(models))
    return text


def online_text(text: str, url: str) -> str:
    """An example of a client with another URL."""
    return _URL.sub(url, text)


def run(text: str, example: Example, models: Mapping[str, str], folder: Path) -> str:
    """Runs an example in `folder`; returns what it printed. Raises AssertionError if it failed."""
    script = folder / Path(example.path).name
    script.write_text(text)
    # Arguments in JSON have braces too.
    arguments = [
        each if each.startswith('{"') else each.format_map(models) for each in example.arguments
    ]
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{example.path}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


INTRODUCTION = f"""\
# vLLM's examples

The examples of vLLM {VERSION} that need neither images nor a GPU, from the folder `examples` of
its source distribution. Each runs unchanged except for its import, model and URL: `from vllm...
import` becomes `from headrace_engine import`, models become small ones, and
`http://localhost:8000` becomes the server's address. `headrace-demo` is the bundled model; the
other models have random weights. [Arguments and methods](offline-api.md) that Headrace refuses
are listed by name.

    export VLLM_EXAMPLES=/path/to/vllm-{VERSION}/examples
    .venv/bin/python -m pytest -n 0 tests/test_e2e/test_vllm_examples.py

runs them and writes nothing; `PYTHONPATH=tests/support .venv/bin/python -m
headrace_testing.vllm_examples` writes this page.
"""
CLIENTS = """\
Against `headrace up`. The demo model reasons only if `reasoning_effort` says so, which these
examples do not. So examples with reasoning, and two with tools, run with another chat template
and with a reasoning parser that takes all text for reasoning (`agent`).
"""


def page() -> str:
    return "\n".join(
        [
            INTRODUCTION,
            "## Without a server, run\n",
            *_table("offline_inference", OFFLINE),
            "## Clients, run\n",
            CLIENTS,
            *_table("online_serving", ONLINE),
            "## Refused\n",
            *_reasons(REFUSED),
            "## Not run\n",
            *_reasons(NOT_TRIED),
        ]
    )


def _table(folder: str, examples: Sequence[Example]) -> Iterator[str]:
    yield "| example | arguments and models | result |"
    yield "| --- | --- | --- |"
    for each in examples:
        models = [f"`{old}`: {name}" for old, name in (each.models or {}).items()]
        arguments = [f"`{' '.join(each.arguments)}`"] if each.arguments else []
        server = [f"server: {each.model}"] if folder == "online_serving" else []
        given_options = "; ".join([*arguments, *models, *server])
        note = f", {each.note}" if each.note else ""
        yield f"| `{folder}/{each.path}` | {given_options} | runs{note} |"
    yield ""


def _reasons(refused: Sequence[Refused]) -> Iterator[str]:
    yield "| example | why |"
    yield "| --- | --- |"
    for each in refused:
        for path in each.paths:
            yield f"| `{path}` | {each.why} |"
    yield ""


if __name__ == "__main__":
    PAGE.write_text(page())
