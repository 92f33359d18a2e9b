"""Asks for an object of a pydantic class with the OpenAI SDK; the answer always fits the class."""

import os
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel


class Sum(BaseModel):
    left: Literal[1, 2, 3, 4, 5]
    sign: Literal["+", "-", "*"]
    right: Literal[1, 2, 3, 4, 5]


client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
answer = client.chat.completions.parse(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "What is 3 + 4?"}],
    response_format=Sum,
    max_tokens=100,
)
print(answer.choices[0].message.parsed)
