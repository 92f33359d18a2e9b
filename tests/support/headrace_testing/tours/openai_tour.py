"""The openai SDK: chat, stream, tools, structured output, responses, embeddings, batches."""

import json
import sys
import time
from typing import Any

from openai import OpenAI

from .shared import CHAT, EMBEDDER, HELLO, MAX_TOKENS, SCHEMA, check_place

MESSAGES: Any = [{"role": "user", "content": HELLO}]
ENDED = ("completed", "failed", "expired", "cancelled")


def chat(client: OpenAI) -> None:
    options: Any = {"model": CHAT, "messages": MESSAGES, "temperature": 0, "max_tokens": MAX_TOKENS}
    whole = client.chat.completions.create(**options)
    stream = client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text and text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def tools(client: OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "travel", "parameters": SCHEMA}}
    answer = client.chat.completions.create(
        model=CHAT,
        messages=MESSAGES,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
    )
    call: Any = next(iter(answer.choices[0].message.tool_calls or ()))
    assert answer.choices[0].finish_reason == "tool_calls", answer
    assert call.type == "function" and call.function.name == "travel"
    check_place(json.loads(call.function.arguments))


def structured_output(client: OpenAI) -> None:
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "place", "schema": SCHEMA, "strict": True},
    }
    answer = client.chat.completions.create(
        model=CHAT, messages=MESSAGES, response_format=form, max_tokens=200
    )
    check_place(json.loads(answer.choices[0].message.content or ""))


def responses(client: OpenAI) -> None:
    answer = client.responses.create(
        model=CHAT, input=HELLO, temperature=0, max_output_tokens=MAX_TOKENS
    )
    again = client.responses.retrieve(answer.id)
    with client.responses.stream(
        model=CHAT, input=HELLO, temperature=0, max_output_tokens=MAX_TOKENS
    ) as stream:
        streamed = stream.get_final_response()
    assert answer.output_text and again.output_text == answer.output_text
    assert streamed.output_text == answer.output_text
    client.responses.delete(answer.id)


def embeddings(client: OpenAI) -> None:
    answer = client.embeddings.create(model=EMBEDDER, input=["one", "two", "one"])
    first, second, third = [item.embedding for item in answer.data]
    assert all(abs(a - b) < 1e-4 for a, b in zip(first, third, strict=True))
    assert first != second and abs(sum(x * x for x in first) - 1) < 1e-3
    floats = client.embeddings.create(model=EMBEDDER, input="one", encoding_format="float")
    assert all(abs(a - b) < 1e-4 for a, b in zip(floats.data[0].embedding, first, strict=True))


def batches(client: OpenAI) -> None:
    bodies: dict[str, Any] = {
        "/v1/chat/completions": {"model": CHAT, "messages": MESSAGES, "max_tokens": 5},
        "/v1/embeddings": {"model": EMBEDDER, "input": "one"},
        "/v1/responses": {"model": CHAT, "input": HELLO, "max_output_tokens": 5},
    }
    for url, body in bodies.items():
        lines = [
            {"custom_id": str(i), "method": "POST", "url": url, "body": body} for i in range(3)
        ]
        content = "\n".join(map(json.dumps, lines)).encode()
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id,
            endpoint=url,  # type: ignore[arg-type]
            completion_window="24h",
        )
        while batch.status not in ENDED:
            time.sleep(0.05)
            batch = client.batches.retrieve(batch.id)
        assert batch.status == "completed" and batch.output_file_id, batch
        found = [
            json.loads(one)
            for one in client.files.content(batch.output_file_id).text.split("\n")
            if one
        ]
        assert {one["custom_id"] for one in found} == {"0", "1", "2"}
        assert all(one["response"]["status_code"] == 200 for one in found)


def main(url: str) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        assert {CHAT, EMBEDDER} <= {model.id for model in client.models.list()}
        for visit in (chat, tools, structured_output, responses, embeddings, batches):
            visit(client)


if __name__ == "__main__":
    main(sys.argv[1])
