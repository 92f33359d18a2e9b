"""Streams a message with the Anthropic SDK (`pip install anthropic`)."""

import os

import httpx
from anthropic import Anthropic

url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1").removesuffix("/v1")
key = os.environ.get("OPENAI_API_KEY", "none")
listed = httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"}).json()
client = Anthropic(base_url=url, api_key=key)
with client.messages.stream(
    model=listed["data"][0]["id"],
    max_tokens=60,
    messages=[{"role": "user", "content": "What is Headrace?"}],
) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
print()
