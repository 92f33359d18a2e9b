"""`helm test`: the API answers, lists its models, and chats with each that has a ready engine.

A release has no model until there is a ModelService; the test then passes and says so. Runs in the
gateway's image with nothing but the standard library. HEADRACE_URL is the API's address,
HEADRACE_API_KEY a key where the API asks for one; HEADRACE_OPERATOR_URL, if set, the operator's
health port. Exit status 0 is a pass.
"""

import json
import os
import sys
import urllib.error
import urllib.parse
import urllib.request

TIMEOUT_S = 60.0


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def call(url: str, body: object = None) -> dict[str, object]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("HEADRACE_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, data, headers)  # noqa: S310 - the chart's addresses
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:  # noqa: S310
        text = response.read().decode()
    answer = json.loads(text) if text.startswith("{") else {}
    return answer if isinstance(answer, dict) else {}


def needs_key(base: str) -> bool:
    """Whether the API requires a key and none is given: then only its health can be tested."""
    if os.environ.get("HEADRACE_API_KEY"):
        return False
    try:
        call(f"{base}/v1/models")
    except urllib.error.HTTPError as error:
        return error.code == 401
    return False


def served(base: str) -> list[str]:
    """Names of the models that the gateway knows.

    Raises ValueError if the answer is not a list of models.
    """
    models = call(f"{base}/v1/models").get("data")
    if not isinstance(models, list):
        raise ValueError("/v1/models is not a list of models")
    return [str(model["id"]) for model in models]


def ready(base: str, model: str) -> bool:
    """Whether an engine of the model is ready. A model that is scaled to zero is not woken."""
    query = urllib.parse.urlencode({"model": model})
    try:
        call(f"{base}/health/ready?{query}")
    except urllib.error.HTTPError as error:
        if error.code != 503:
            raise
        say(f"{model} is not asked: {error.read().decode()}")
        return False
    return True


def chat(base: str, model: str) -> None:
    """Asks for an answer. Raises ValueError if it has no token."""
    message = {"role": "user", "content": "Say hello."}
    body = {"model": model, "messages": [message], "max_tokens": 4}
    usage = call(f"{base}/v1/chat/completions", body).get("usage")
    if not isinstance(usage, dict) or not usage.get("completion_tokens"):
        raise ValueError(f"{model} answered without a token")
    say(f"{model} answered with {usage['completion_tokens']} tokens")


def ask_models(base: str) -> None:
    if needs_key(base):
        say("models are not asked: the API needs a key, see gateway.apiKeys.testKeySecret")
        return
    names = served(base)
    say(f"gateway lists {', '.join(names) or 'no model yet: apply a ModelService'}")
    for name in names:
        if ready(base, name):
            chat(base, name)


def main() -> int:
    base = os.environ["HEADRACE_URL"]
    try:
        call(f"{base}/health/live")
        ask_models(base)
        operator = os.environ.get("HEADRACE_OPERATOR_URL")
        if operator:
            call(operator)
            say("operator is live")
    except (OSError, ValueError) as error:
        say(f"failed: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
