"""A prompt, a model and a parser as one LangChain chain (`pip install langchain-openai`)."""

import os

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

model = ChatOpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=lambda: os.environ.get("OPENAI_API_KEY", "none"),
    model=os.environ.get("MODEL", "headrace-demo"),
    temperature=0,
)
chain = ChatPromptTemplate.from_messages([("user", "What is {thing}?")]) | model | StrOutputParser()
print(chain.batch([{"thing": "an engine"}, {"thing": "a gateway"}]))
