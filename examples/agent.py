"""Lets the model call tools until it has an answer, with the OpenAI SDK (`pip install openai`)."""

import ast
import json
import operator
import os
import sys

from openai import OpenAI

SIGNS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
FACTS = {
    "loire": "The Loire is the longest river in France.",
    "headrace": "A headrace is the channel that leads water to a mill.",
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Works out a sum.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Finds facts.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string"}},
                "required": ["query"],
            },
        },
    },
]


def calculate(expression: str) -> str:
    """The value of numbers and the four signs; nothing else is evaluated."""

    def value(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.BinOp(left=left, op=sign, right=right):
                return SIGNS[type(sign)](value(left), value(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
        raise ValueError("only numbers and + - * /")

    return str(value(ast.parse(expression, mode="eval").body))


def lookup(query: str) -> str:
    found = [fact for word, fact in FACTS.items() if word in query.lower()]
    return found[0] if found else "no result"


def call(name: str, arguments: str) -> str:
    """What a tool answers; an error is told to the model, which may try again."""
    try:
        return {"calculate": calculate, "lookup": lookup}[name](**json.loads(arguments))
    except (ArithmeticError, KeyError, SyntaxError, TypeError, ValueError) as error:
        return f"error: {error}"


client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id
for question in sys.argv[1:] or ["What is 123 * 45?", "Look up the Loire."]:
    messages = [{"role": "user", "content": question}]
    for _ in range(5):
        answer = client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS, temperature=0
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        for wanted in message.tool_calls:
            result = call(wanted.function.name, wanted.function.arguments)
            print(f"{wanted.function.name}({wanted.function.arguments}) -> {result}")
            messages.append({"role": "tool", "tool_call_id": wanted.id, "content": result})
    print(f"{question} {message.content}")
