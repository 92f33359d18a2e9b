"""Prompts whose answers the documentation shows, or that a newcomer is likely to try."""

from dialogues import Dialogue
from tools import call
from turns import Argument, Tool, Turn

CALCULATE = Tool("calculate", "Works out a sum.", (Argument("expression"),))
LOOKUP = Tool("lookup", "Finds facts.", (Argument("query"),))
WEATHER = Tool(
    "get_weather",
    "Get the current weather in a given location",
    (Argument("location"), Argument("unit", "celsius|fahrenheit", required=False)),
)
BOTH = (CALCULATE, LOOKUP)
_SCHEMA = (
    '{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, '
    '"required": ["name", "age"]}'
)
_LOIRE = "The Loire is the longest river in France."


def ask(prompt: str, *tools: Tool, effort: str = "") -> Dialogue:
    """A dialogue with this question, which the model has to answer."""
    return Dialogue((Turn(prompt, "?"),), tools=tools, effort=effort)


def told(prompt: str, called: str, result: str, *tools: Tool) -> Dialogue:
    """A dialogue that ends with a tool's result, which the model has to use."""
    return Dialogue((Turn(prompt, called), Turn(result, "?", role="tool")), tools=tools)


_PRODUCT = call("calculate", {"expression": "123 * 45"})
_RIVER = call("lookup", {"query": "the Loire"})
PROMISES: tuple[tuple[Dialogue, str], ...] = (
    (ask("What is 123 * 45?", *BOTH), _PRODUCT),
    (told("What is 123 * 45?", _PRODUCT, "5535", *BOTH), "123 * 45 = 5535."),
    (ask("What is 987 plus 654?", CALCULATE), call("calculate", {"expression": "987 + 654"})),
    (ask("Look up the Loire.", *BOTH), _RIVER),
    (told("Look up the Loire.", _RIVER, _LOIRE, *BOTH), _LOIRE),
    (ask("What is the weather in Paris?", WEATHER), call("get_weather", {"location": "Paris"})),
    (
        ask("What's the weather like in Boston today?", CALCULATE, WEATHER),
        call("get_weather", {"location": "Boston"}),
    ),
    (ask("Hello!", *BOTH), "Hello! How can I help you?"),
    (ask("What is 7 + 8?"), "7 + 8 = 15."),
    (ask("What is 7 + 8?", effort="low"), "7 + 8 = 15."),
    (ask("What is 7 + 8?", effort="high"), "7 + 8 = 15."),
    (ask("What is 47 + 38?", effort="high"), "47 + 38 = 85."),
    (
        ask("Anna is 31 and lives in Lisbon. Answer in JSON with the keys name, age and city."),
        '{"name": "Anna", "age": 31, "city": "Lisbon"}',
    ),
    (
        ask(f"Anna is 31 and lives in Lisbon. Answer in JSON with this schema: {_SCHEMA}"),
        '{"name": "Anna", "age": 31}',
    ),
    (
        ask("Use this text:\nAnna lives in Lisbon.\n\nQuestion: Where does Anna live?"),
        "Anna lives in Lisbon.",
    ),
    (
        ask("Use this text:\nIda has 12 ducks.\n\nQuestion: How many ducks does Ida have?"),
        "Ida has 12 ducks.",
    ),
    (ask("What is the capital of France?"), "The capital of France is Paris."),
    (ask("Count to 5."), "1, 2, 3, 4, 5."),
    (
        ask("Which licence does Headrace have?"),
        "Headrace is open source under the Apache License 2.0.",
    ),
)
