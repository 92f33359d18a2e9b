"""Small chat templates with tools and reasoning, in the manner of the well-known ones."""

CHATML_WITH_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\\nTools:' }}{% for tool in tools %}"
    "{{ '\\n' + tool | tojson }}{% endfor %}"
    "{{ '\\nWrite <tool_call>{}</tool_call><|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}"
    "{% endif %}{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{{ '<tool_call>' + call.function | tojson "
    "+ '</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{% if open_thinking %}{{ '<think>\\n' }}{% endif %}{% endif %}"
)
