"""Loses its connection in the middle of a stream and continues after the last event it has."""

import json
import os
import uuid
from collections.abc import Iterator

import httpx

BASE_URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
KEY = os.environ.get("OPENAI_API_KEY", "none")


def events(response: httpx.Response) -> Iterator[tuple[str, str]]:
    """The id and the text of each event."""
    event_id = ""
    for line in response.iter_lines():
        if line.startswith("id: "):
            event_id = line.removeprefix("id: ")
        elif line.startswith("data: ") and line != "data: [DONE]":
            yield event_id, json.loads(line.removeprefix("data: "))["choices"][0]["text"]


with httpx.Client(headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as client:
    model = client.get(f"{BASE_URL}/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": "Once upon", "max_tokens": 40, "stream": True}
    headers = {"Idempotency-Key": str(uuid.uuid4())}
    begin = ""
    with client.stream("POST", f"{BASE_URL}/completions", json=body, headers=headers) as stream:
        for event_id, text in events(stream):
            last, begin = event_id, begin + text
            if len(begin) > 20:
                break  # and the connection is gone
    print(f"{begin}|", end="", flush=True)
    request = last.partition(":")[0]
    with client.stream(
        "GET", f"{BASE_URL}/requests/{request}/events", headers={"Last-Event-ID": last}
    ) as stream:
        for _, text in events(stream):
            print(text, end="", flush=True)
print()
