"""Makes jinja_features.json: templates, each with other features, and what Jinja2 renders with the
settings of Hugging Face's apply_chat_template(). Needs `pip install jinja2==3.1.6`.

    make_jinja_features.py > jinja_features.json
"""

import json
import sys

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

CHAT = [
    {"role": "system", "content": "Be  terse.\n"},
    {"role": "user", "content": " Hi\u3000"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello!"},
    {"role": "user", "content": "B\u00fcro 12?"},
]
VARIABLES = {"messages": CHAT, "add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>", "tools": None,
             "n": 7, "empty": "", "text": "a,b,,c", "yes": True, "words": [" a ", "b", "c"], "nested": {"k": {"j": [1, 2]}}}

EXPRESSIONS = """
1 + 2 * 3 - 4
(1 + 2) * 3
-n // 2
n % 4
-n % 4
n - -2
7 // 2 * 2
'a' ~ 1 ~ none ~ true
'a' + 'b' + text
n if yes else 0
'x' if not yes
n if n > 5 and n < 9 else 'no'
not yes or n == 7
not n is defined
n is not none
missing is defined
missing is undefined
missing
missing or 'default'
nested.k.j[1]
nested['k']['j'][-1]
nested.k.missing
nested.missing is defined
messages[0]['content']
messages[-1].role
messages[1:]|length
messages[:-1]|length
messages[1:3]|length
messages[10:]|length
messages[-100:2]|length
messages[3:1]|length
messages[::-1][0].content
messages[2::-1]|length
messages[:0:-1]|length
messages|length - 1
messages | first == messages[0]
words | last
words | join('-')
words | join
text.split(',')[1]
text.split(',') | length
text.split(',', 1)[1]
' a  b\\t\\nc '.split() | join('|')
messages[2].content.split('</think>')[-1].lstrip('\\n')
messages[2].content.split('<think>')[0] == ''
'</think>' in messages[2].content
'x' not in text
'b' in words
7 in [1, 7]
'k' in nested
text.startswith('a,') and text.endswith('c')
messages[1].content.strip()
messages[1].content | trim
'xxaxx'.strip('x')
'xxaxx'.lstrip('x') ~ '.' ~ 'xxaxx'.rstrip('x')
'\\u00e9ab\\u00e9'.strip('\\u00e9b')
'Ab' | upper ~ 'Ab'.lower()
text.replace(',', ';')
text | replace(',', '')
messages[3].content | length
text | length
empty | default('d')
empty | default('d', true)
missing | default('d')
missing | default
none | default('d') is none
[1, [2, 3]][1][0]
{'a': 1, 'b': {'c': 2}}.b.c
{'a': 1}.get('a') ~ {'a': 1}.get('z') ~ {'a': 1}.get('z', 5)
nested.items() | length
nested.keys() | list | first
{'a': 1}.values() | list | join
([1, 2] + [3]) | length
[] == [] and {} == {} and [1, 'a'] == [1, 'a']
[1] == [2] or {'a': 1} == {'a': 2}
1 == true and 0 == false and '' != none
'a' < 'b' and 2 <= 2 and 3 > 2 and 3 >= 3
'a' is string and n is string
n is number and n is integer and yes is boolean
yes is true and yes is false
messages is iterable and messages is sequence and nested is mapping
words is mapping
none is none
range(3) | list | length
range(2, 5) | list | last
range(0) | list | length
"double \\"quoted\\" \\x41 \\t."
'a' 
none
true
''
not (messages[1].content.startswith(' H') and messages[1].content.endswith('x'))
text | string | length
(n if n else 1) + (2 if empty else 3)
yes and n
no_such and n
strftime_now is defined
raise_exception is defined
loop is defined
1 in messages | list or 2
n|string + 'x'
"""

TEMPLATES = {
    "trim_blocks": "a\n{% if yes %}\nb\n{% endif %}\nc\n",
    "lstrip_blocks": "a\n   {% if yes %}  b\n\t {% endif %}  \nc {% if yes %}d{% endif %}\n",
    "output keeps its line": "a {{ n }}\n b\n",
    "minus": "a  \n {%- if yes -%} \n\n b \n {%- endif %} c {{- n -}}  d",
    "plus": "a\n  {%+ if yes %}\n b\n {% endif +%}\n c",
    "comment": "a {# {{ no }} #} b\n  {# x #}\nc{#- y -#}  d\n{#z#}e",
    "comment at the start": "{# x #}\n  a",
    "crlf": "a\r\n{% if yes %}\r\nb\r\n{% endif %}\r\n",
    "two newlines at the end": "a\n\n",
    "text with braces": "{ a } {a} % # {'x'}",
    "for": "{% for m in messages %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}"
           "{{ loop.revindex }} {{ m.role }};{% endfor %}",
    "for else": "{% for m in [] %}x{% else %}none{% endfor %}{% for m in missing %}x{% else %}undefined{% endfor %}",
    "for if": "{% for m in messages if m.role == 'user' %}{{ loop.index }}/{{ loop.length }} {{ m.content }}{% endfor %}",
    "for over a dict": "{% for k in {'a': 1, 'b': 2} %}{{ k }}{% endfor %}",
    "for with two names": "{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}={{ v }};{% endfor %}",
    "nested for": "{% for a in [1, 2] %}{% for b in words %}{{ a }}{{ b }}{{ loop.index }}{% endfor %}{{ loop.index }}{% endfor %}",
    "previtem": "{% for m in messages %}{% if loop.previtem is defined and loop.previtem.role == 'user' %}U{% endif %}"
                "{{ loop.nextitem.role if loop.nextitem is defined else '.' }}{% endfor %}",
    "set in a loop stays there": "{% set x = 1 %}{% for a in [1, 2] %}{{ x }}{% set x = 5 %}{{ x }}{% endfor %}{{ x }}",
    "set in an if goes on": "{% if yes %}{% set x = 3 %}{% endif %}{{ x }}",
    "namespace": "{% set ns = namespace(a=1, b='') %}{% for i in range(3) %}{% set ns.a = ns.a + i %}"
                 "{% set ns.b = ns.b ~ i %}{% endfor %}{{ ns.a }} {{ ns.b }}",
    "elif": "{% for i in range(4) %}{% if i == 0 %}a{% elif i == 1 %}b{% elif i == 2 %}c{% else %}d{% endif %}{% endfor %}",
    "if without else": "{% if empty %}a{% endif %}{% if words %}b{% endif %}{% if messages[9] is defined %}c{% endif %}",
    "tag over lines": "{% if yes\n   and n %}\na\n{%\nendif\n%}b",
    "escaped newline in a literal": "{{ 'a\\nb' }}{{ 'c\nd' }}",
    "chatml": "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>'"
              " + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "llama2-like": "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message ="
                   " messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}"
                   "{% endif %}{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0)"
                   " %}{{ raise_exception('roles must alternate') }}{% endif %}{% if loop.index0 == 0 and system_message !="
                   " false %}{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
                   "{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
                   "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
                   "{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
    "llama3-like": "{{- bos_token }}\n{%- if not date_string is defined %}\n    {%- set date_string = \"26 Jul 2024\" %}\n"
                   "{%- endif %}\n{%- if messages[0]['role'] == 'system' %}\n    {%- set system_message = "
                   "messages[0]['content']|trim %}\n    {%- set messages = messages[1:] %}\n{%- else %}\n    "
                   "{%- set system_message = \"\" %}\n{%- endif %}\n{{- \"<|start_header_id|>system<|end_header_id|>\\n\\n\" }}\n"
                   "{%- if tools is not none %}\n    {{- \"Environment: ipython\\n\" }}\n{%- endif %}\n"
                   "{{- \"Today Date: \" + date_string + \"\\n\\n\" }}\n{{- system_message }}\n{{- \"<|eot_id|>\" }}\n"
                   "{%- for message in messages %}\n    {%- if not (message.role == 'ipython' or message.role == 'tool' or "
                   "'tool_calls' in message) %}\n        {{- '<|start_header_id|>' + message['role'] + "
                   "'<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}\n    {%- elif 'tool_calls' in message %}\n"
                   "        {{- tool_call.arguments | tojson }}\n    {%- endif %}\n{%- endfor %}\n"
                   "{%- if add_generation_prompt %}\n    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n{%- endif %}\n",
    "qwen3-like": "{%- if tools %}\n    {{- tools | tojson }}\n{%- endif %}\n"
                  "{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}\n"
                  "{%- for message in messages[::-1] %}\n    {%- set index = (messages|length - 1) - loop.index0 %}\n"
                  "    {%- if ns.multi_step_tool and message.role == \"user\" and message.content is string and not("
                  "message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}\n"
                  "        {%- set ns.multi_step_tool = false %}\n        {%- set ns.last_query_index = index %}\n    {%- endif %}\n"
                  "{%- endfor %}\n{%- for message in messages %}\n    {%- if message.content is string %}\n"
                  "        {%- set content = message.content %}\n    {%- else %}\n        {%- set content = '' %}\n    {%- endif %}\n"
                  "    {%- if message.role == \"assistant\" %}\n        {%- set reasoning_content = '' %}\n"
                  "        {%- if message.reasoning_content is string %}\n            {%- set reasoning_content = "
                  "message.reasoning_content %}\n        {%- else %}\n            {%- if '</think>' in content %}\n"
                  "                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1]"
                  ".lstrip('\\n') %}\n                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}\n"
                  "            {%- endif %}\n        {%- endif %}\n        {%- if loop.index0 > ns.last_query_index and (loop.last or "
                  "(not loop.last and reasoning_content)) %}\n            {{- '<think>\\n' + reasoning_content.strip('\\n') }}\n"
                  "        {%- endif %}\n        {{- '<|im_start|>' + message.role + '\\n' + content }}\n    {%- else %}\n"
                  "        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}\n    {%- endif %}\n"
                  "{%- endfor %}\n",
}

ERRORS = {
    "undefined attribute": "{{ missing.x }}",
    "undefined subscript": "{{ missing['x'] }}",
    "undefined in a sum": "{{ 'a' + missing }}",
    "kinds in a sum": "{{ 'a' + 1 }}",
    "raise": "{{ raise_exception('no way') }}",
    "unclosed if": "{% if yes %}a",
    "unclosed output": "{{ n",
    "unclosed string": "{{ 'a }}",
    "unclosed comment": "{# a",
    "stray endif": "a{% endif %}",
    "else twice": "{% if yes %}{% else %}{% else %}{% endif %}",
    "no expression": "{{ }}",
    "two values": "{{ n n }}",
    "unknown filter": "{{ n | no_such_filter }}",
    "unknown test": "{{ n is no_such_test }}",
    "unknown tag": "{% no_such_tag %}",
    "missing bracket": "{{ words[0 }}",
    "loop over a number": "{% for i in n %}{% endfor %}",
    "set of an attribute of no namespace": "{% set nested.k = 1 %}",
    "division by zero": "{{ n // 0 }}",
    "unpacking": "{% for a, b in words %}{% endfor %}",
}


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                            extensions=["jinja2.ext.loopcontrols"])
environment.globals["raise_exception"] = raise_exception
environment.globals["strftime_now"] = lambda _: "now"

cases = []
templates = {expression: "{{ " + expression + " }}" for expression in EXPRESSIONS.strip().split("\n")} | TEMPLATES
for name, template in templates.items():
    cases.append({"name": name, "template": template,
                  "text": environment.from_string(template).render(**VARIABLES)})
for name, template in ERRORS.items():
    try:
        environment.from_string(template).render(**VARIABLES)
    except Exception:
        cases.append({"name": name, "template": template, "text": None})
    else:
        sys.exit(f"Jinja2 renders {name}")
json.dump({"variables": VARIABLES, "cases": cases}, sys.stdout, indent=1, ensure_ascii=True)
print()
