"""Generates without a server: the engine as a library."""

from headrace_engine import LLM, SamplingParams

llm = LLM("headrace-demo")
chats = [[{"role": "user", "content": f"What is {number} + 2?"}] for number in range(4)]
for output in llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=32)):
    print(output.outputs[0].text)
