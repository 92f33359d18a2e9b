"""Asks through LiteLLM, as proxies and agents do (`pip install litellm`)."""

import os

import litellm

answer = litellm.completion(
    model=f"hosted_vllm/{os.environ.get('MODEL', 'headrace-demo')}",
    api_base=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
    messages=[{"role": "user", "content": "What is Headrace?"}],
)
print(answer.choices[0].message.content)
