"""Chat templates in the styles models come with, written for tests, each with its own difficulty."""

from __future__ import annotations

from typing import Final

CHATML: Final = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Begins with BOS, strips content, lists tools as indented JSON.
HEADERS: Final = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\nToday: " + date_string + "\n" + system_message + "<|eot_id|>" }}
{%- if tools is not none %}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}{{ message.content | tojson }}{{- "<|eot_id|>" }}
    {%- elif 'tool_calls' in message %}
        {%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "parameters": ' }}
            {{- call.function.arguments | tojson }}{{- "}" }}
        {%- endfor %}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

# Loops over content parts, knows thinking, uses a namespace, loop controls and the generation tag.
PARTS: Final = """{%- set seen = namespace(users=0) %}
{%- for message in messages %}
    {%- if message.role == 'note' %}{%- continue %}{%- endif %}
    {%- if message.role == 'user' %}{%- set seen.users = seen.users + 1 %}{%- endif %}
[{{ message.role }}{% if message.name is defined %} {{ message.name }}{% endif %}]
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}{% if part.type == 'text' %}{{ part.text }};{% endif %}{% endfor %}
{%- endif %}
{% generation %}{{ '/' }}{% endgeneration %}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}
{%- if documents %}{% for document in documents %}<doc>{{ document.title }}</doc>{% endfor %}{% endif %}
{%- if add_generation_prompt %}[assistant] {{ seen.users }}{% endif %}
"""

# Refuses roles that do not take turns.
TURNS: Final = """{{ bos_token }}{% for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- if message['role'] == 'user' %}{{ ' [INST] ' + message['content'] + ' [/INST]' }}
{%- else %}{{ ' ' + message['content'] + eos_token }}{% endif %}
{%- endfor %}
"""

ALL: Final = {"chatml": CHATML, "headers": HEADERS, "parts": PARTS, "turns": TURNS}
