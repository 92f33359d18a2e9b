"""Runs a file of requests as a batch, and prints the results in the order of the file."""

import json
import os
import time

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id
lines = [
    {
        "custom_id": f"sum-{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": model,
            "messages": [{"role": "user", "content": f"What is {number} + 1?"}],
            "temperature": 0,
        },
    }
    for number in range(8)
]
content = "\n".join(map(json.dumps, lines)).encode()
file = client.files.create(file=("sums.jsonl", content), purpose="batch")
batch = client.batches.create(
    input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
)
while batch.status not in ("completed", "failed", "expired", "cancelled"):
    time.sleep(0.2)
    batch = client.batches.retrieve(batch.id)
print(batch.status, batch.request_counts)
if batch.output_file_id is not None:
    results = map(json.loads, client.files.content(batch.output_file_id).text.splitlines())
    answers = {each["custom_id"]: each["response"]["body"]["choices"][0] for each in results}
    for line in lines:
        print(line["custom_id"], answers[line["custom_id"]]["message"]["content"])
