"""litellm, as a proxy or an agent uses it: chat, stream, tools, structured output, embeddings."""

import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise it would ask the network for prices

import litellm

from .shared import CHAT, EMBEDDER, HELLO, MAX_TOKENS, SCHEMA, check_place


def main(url: str) -> None:
    where: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "none", "timeout": 60}
    request = {
        **where,
        "model": f"openai/{CHAT}",  # its hosted_vllm removes additionalProperties
        "messages": [{"role": "user", "content": HELLO}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    whole: Any = litellm.completion(**request)
    chunks: Any = litellm.completion(**request, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text and text == whole.choices[0].message.content

    tool = {"type": "function", "function": {"name": "travel", "parameters": SCHEMA}}
    long = request | {"max_tokens": 200}
    called: Any = litellm.completion(**long, tools=[tool], tool_choice="required")
    arguments = called.choices[0].message.tool_calls[0].function.arguments
    check_place(json.loads(arguments))

    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    placed: Any = litellm.completion(**long, response_format=form)
    check_place(json.loads(placed.choices[0].message.content))

    answer: Any = litellm.responses(
        **where,
        model=f"openai/{CHAT}",
        input=HELLO,
        max_output_tokens=MAX_TOKENS,
        temperature=0,
    )
    assert answer.output[-1].content[0].text == text

    vectors: Any = litellm.embedding(
        **where, model=f"hosted_vllm/{EMBEDDER}", input=["one", "two"], encoding_format="float"
    )
    assert len(vectors.data) == 2 and len(vectors.data[0]["embedding"]) == 64


if __name__ == "__main__":
    main(sys.argv[1])
