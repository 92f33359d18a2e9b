// A request as a command or program that a person can copy. The API key is never part of it, and
// the data of pictures, which are long, are replaced.

/** `origin` is where the API is, as http://127.0.0.1:8000. */
export function asCurl(origin, body) {
  const json = JSON.stringify(shortened(body), null, 2).replaceAll("'", "'\\''");
  return `curl -N ${origin}/v1/chat/completions \\
  -H 'Content-Type: application/json' \\
  -H "Authorization: Bearer $HEADRACE_API_KEY" \\
  -d '${json}'
`;
}

// Fields that the OpenAI SDK's create() has no parameter for.
const KNOWN = new Set([
  "model", "messages", "temperature", "top_p", "max_tokens", "seed", "n", "logprobs", "top_logprobs",
  "tools", "tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort", "stop",
  "frequency_penalty", "presence_penalty", "logit_bias", "user", "metadata",
]);

export function asPython(origin, body) {
  const { stream, stream_options, ...rest } = shortened(body);
  const fields = Object.entries(rest);
  const known = fields.filter(([name]) => KNOWN.has(name));
  const extra = Object.fromEntries(fields.filter(([name]) => !KNOWN.has(name)));
  const lines = known.map(([name, value]) => `    ${name}=${python(value, 1)},`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${python(extra, 1)},`);
  return `import os

from openai import OpenAI

client = OpenAI(base_url="${origin}/v1", api_key=os.environ.get("HEADRACE_API_KEY", "none"))
stream = client.chat.completions.create(
${lines.join("\n")}
    stream=True,
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
`;
}

/** The same body with `<picture 1 in base64>` in place of the data of the first picture. */
function shortened(body) {
  let number = 0;
  const short = (name, value) => {
    if (name !== "url" || typeof value !== "string" || !value.startsWith("data:")) return value;
    number += 1;
    return value.replace(/,.*/s, `,<picture ${number} in base64>`);
  };
  return JSON.parse(JSON.stringify(body, short));
}

/** A JSON value as a Python literal. */
function python(value, depth) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const items = Array.isArray(value)
    ? value.map((item) => python(item, depth + 1))
    : Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${python(item, depth + 1)}`);
  const line = open + items.join(", ") + close;
  if (line.length <= 70 && !line.includes("\n")) return line;
  const indent = "    ".repeat(depth + 1);
  return `${open}\n${items.map((item) => `${indent}${item},\n`).join("")}${"    ".repeat(depth)}${close}`;
}
