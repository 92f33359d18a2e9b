"""langchain-openai: chat, stream, tools, structured output, embeddings."""

import sys
from typing import Any

from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from .shared import CHAT, EMBEDDER, HELLO, MAX_TOKENS, SCHEMA, check_place


def main(url: str) -> None:
    where: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
    model = ChatOpenAI(model=CHAT, temperature=0, max_tokens=MAX_TOKENS, **where)
    whole = model.invoke(HELLO)
    text = "".join(str(chunk.content) for chunk in model.stream(HELLO))
    assert text and text == whole.content

    patient = ChatOpenAI(model=CHAT, max_tokens=200, **where)
    tool = {"type": "function", "function": {"name": "travel", "parameters": SCHEMA}}
    called = patient.bind_tools([tool], tool_choice="travel").invoke(HELLO)
    check_place(called.tool_calls[0]["args"])

    place = {"title": "place", **SCHEMA}
    placed = patient.with_structured_output(place, method="json_schema").invoke(HELLO)
    check_place(placed)

    responses = ChatOpenAI(
        model=CHAT, temperature=0, max_tokens=MAX_TOKENS, use_responses_api=True, **where
    )
    assert responses.invoke(HELLO).text == text

    embeddings = OpenAIEmbeddings(model=EMBEDDER, check_embedding_ctx_length=False, **where)
    vectors = embeddings.embed_documents(["one", "two"])
    assert len(vectors) == 2 and len(vectors[0]) == 64
    assert len(embeddings.embed_query("one")) == 64


if __name__ == "__main__":
    main(sys.argv[1])
