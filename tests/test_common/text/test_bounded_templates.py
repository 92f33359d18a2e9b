"""Templates whose operations are bounded by their input, and templates whose operations are not."""

import pytest

from headrace_common.text.chat_template import ChatTemplate
from headrace_testing.tokenizers import CHATML

BOUNDED = {
    "chatml": CHATML,
    "alternating roles": """{{ bos_token }}{% for message in messages %}
        {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
            {{ raise_exception('roles must alternate') }}
        {% endif %}
        {{ '[INST] ' + message['content'] | trim + ' [/INST]' }}{% endfor %}""",
    "tools and reasoning": """{%- if tools %}{{- "# Tools" }}
        {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}{%- endif %}
        {%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
        {%- for message in messages[::-1] %}
            {%- set index = (messages|length - 1) - loop.index0 %}
            {%- if ns.multi_step_tool and message.role == "user" and message.content is string
                and not(message.content.startswith('<tool_response>')) %}
                {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
            {%- endif %}
        {%- endfor %}
        {%- for message in messages %}
            {%- set content = message.content if message.content is string else '' %}
            {%- if '</think>' in content %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
            {%- for tool_call in message.tool_calls %}
                {{- tool_call.function.arguments | tojson(indent=2) }}
            {%- endfor %}
            {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' }}
        {%- endfor %}""",
    "a date": "{{ strftime_now('%d %b %Y') if date is not defined else date | default('x') }}",
    "items": "{% for name, value in messages[0].items() %}{{ name ~ value }}{% endfor %}",
}
UNBOUNDED = {
    "lists in lists": "{% set ns.a = [ns.a, ns.a] %}",
    "tuples in tuples": "{% set a = (a, a) %}",
    "maps": "{% set a = {'a': a} %}",
    "maps by a function": "{% set a = dict(a=a) %}",
    "namespaces in namespaces": "{% set a = namespace() %}{% set b = namespace(a=a) %}",
    "namespaces that hold each other": (
        "{% set a = namespace() %}{% set b = namespace() %}{% set a.b = b %}"
    ),
    "a namespace under two names": "{% set a = namespace() %}{% set b = a %}{% set b.c = b %}",
    "namespaces unpacked": "{% set a, b = namespace() %}",
    "arguments": "{% macro m() %}{% set ns.a = varargs %}{% endmacro %}",
    "a text that grows": "{% set ns.a = ns.a + ns.a %}",
    "a text that grows by ~": "{% set ns.a = ns.a ~ ns.a %}",
    "a product": "{{ 'x' * 99 }}",
    "a power": "{{ 9 ** 99 }}",
    "a width": "{{ '{:>300000000}'.format('a') }}",
    "a method under another name": "{% set f = 'x'.center %}{{ f(10) }}",
    "a method as an item": "{{ 'x'['center'](10) }}",
    "a format": "{{ '%300000000d' % 1 }}",
    "a date's width": "{{ strftime_now('%300000000d') }}",
    "a padding filter": "{{ 'x' | center(10) }}",
    "a replacing method": "{{ 'x'.replace('', content) }}",
    "a joining filter": "{{ messages | join(content) }}",
    "an indent": "{{ messages | tojson(indent=1000000) }}",
    "an indent that is given": "{{ messages | tojson(indent=width) }}",
    "ranges": "{% for i in range(99999) %}{% endfor %}",
    "captured output": "{% set a %}{{ a }}{{ a }}{% endset %}",
    "a recursive loop": "{% for m in messages recursive %}{{ loop(m) }}{% endfor %}",
    "very many variables": "{% set a = messages | list %}" * 101,
}


@pytest.mark.parametrize("source", BOUNDED.values(), ids=BOUNDED)
def test_common_chat_templates_are_bounded(source: str) -> None:
    assert ChatTemplate(source).bounded


@pytest.mark.parametrize("source", UNBOUNDED.values(), ids=UNBOUNDED)
def test_templates_that_can_multiply_their_input_are_unbounded(source: str) -> None:
    assert not ChatTemplate(source).bounded
