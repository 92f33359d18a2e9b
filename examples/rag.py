"""Answers from texts: finds the nearest one by its vector and shows it to the model.

Needs a second server, for vectors:

    headrace up --model headrace-demo-embeddings --port 8001 --data-dir .headrace-embeddings
"""

import os
import sys

from openai import OpenAI

TEXTS = [
    "Anna lives in Lisbon.",
    "The mill belongs to Felix.",
    "The shop in Rome opens at 9.",
    "Ida has 12 ducks.",
    "The red boat costs 40 euros.",
]
KEY = os.environ.get("OPENAI_API_KEY", "none")
chats = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key=KEY)
vectors = OpenAI(
    base_url=os.environ.get("EMBEDDINGS_BASE_URL", "http://127.0.0.1:8001/v1"), api_key=KEY
)
chat_model, embedder = (client.models.list().data[0].id for client in (chats, vectors))


def embed(texts: list[str]) -> list[list[float]]:
    found = vectors.embeddings.create(model=embedder, input=texts, encoding_format="float")
    return [item.embedding for item in found.data]


def nearest(question: str) -> str:
    """The text whose vector has the largest cosine with the question's; vectors have length 1."""
    (asked,) = embed([question])
    cosines = [sum(a * b for a, b in zip(asked, text, strict=True)) for text in places]
    return TEXTS[cosines.index(max(cosines))]


places = embed(TEXTS)
for question in sys.argv[1:] or ["Where does Anna live?", "How many ducks does Ida have?"]:
    text = nearest(question)
    answer = chats.chat.completions.create(
        model=chat_model,
        messages=[{"role": "user", "content": f"Use this text:\n{text}\n\nQuestion: {question}"}],
        temperature=0,
    )
    print(f"{question} [{text}] {answer.choices[0].message.content}")
