"""Chat templates: as Hugging Face renders them, but for the clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forebay_engine.text.template import ChatTemplate, TemplateRefused
from forebay_engine.text.tokenizer import FolderTokenizer

NOON = 1_800_000_000
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": 'Be <b>brief</b> & "kind".'},
    {"role": "user", "content": "caf\u00e9?\n\n  two"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "why"},
]
TEMPLATES = {
    "blocks are trimmed": (
        "{% for m in messages %}\n    {% if m.role == 'user' %}\nU:{{ m.content }}\n    {% endif %}\n{% endfor %}\n"
        "{%- if add_generation_prompt %}A:{% endif %}"
    ),
    "special tokens": "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}",
    "tojson keeps HTML and accents": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "undefined is empty": "{{ pad_token }}{{ nothing }}{% if tools %}tools{% endif %}{{ messages[0].name }}x",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "string methods": "{{ messages[1].content.strip().split('\\n') | join('|') }}{{ messages[0].content | trim }}",
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def render(source: str, messages: list[dict[str, Any]] | None = None, **arguments: Any) -> str:
    return ChatTemplate(source, SPECIAL).render(messages or MESSAGES, created=NOON, arguments=arguments)


@pytest.mark.model
@pytest.mark.parametrize("name", TEMPLATES)
def test_equals_transformers(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    theirs, _ = render_jinja_template([MESSAGES], chat_template=TEMPLATES[name], add_generation_prompt=True, **SPECIAL)
    assert render(TEMPLATES[name]) == theirs[0]


@pytest.mark.model
@pytest.mark.parametrize("messages", [MESSAGES, MESSAGES[1:2], MESSAGES[1:]], ids=["system", "one", "no system"])
def test_smollm2_equals_transformers_token_for_token(smollm2_dir: Path, messages: list[dict[str, Any]]) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm2_dir).apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    ours = FolderTokenizer(smollm2_dir)
    assert ours.encode(ours.render_chat(messages, created=NOON, arguments={}), add_special=False) == list(theirs)


def test_now_is_created_in_utc() -> None:
    assert render("{{ strftime_now('%d %b %Y %H:%M') }}") == "15 Jan 2027 08:00"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely"),
        ("{% for i in range(1000000) %}{% endfor %}", "Range too big"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ 10.0 ** 1000 }}", "OverflowError"),
        ("{{ 'x' * 9000000000000000000 }}", "MemoryError"),
        ("{{ '%c' % 1114112 }}", "OverflowError|ValueError"),
        ("{{ 'x'.encode('ascii').decode('nonsense') }}", "LookupError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ],
)
def test_refusals_say_why(source: str, says: str) -> None:
    with pytest.raises(TemplateRefused, match=says):
        render(source)


def test_arguments_are_the_templates_variables() -> None:
    source = "{% if enable_thinking is defined and not enable_thinking %}quick{% endif %}{{ bos_token }}"
    assert render(source) == "<s>"
    assert render(source, enable_thinking=False) == "quick<s>"
    assert render(source, unknown=1) == "<s>"


def test_arguments_cannot_replace_what_the_server_sets() -> None:
    assert render("{{ bos_token }}", bos_token="</s>") == "<s>"


@pytest.mark.model
def test_arguments_as_in_transformers() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = "{{ messages[0].content }}{{ style.tone | default('plain') }}{{ enable_thinking }}"
    sent: dict[str, Any] = {"style": {"tone": "dry"}, "enable_thinking": False}
    theirs, _ = render_jinja_template([MESSAGES], chat_template=source, add_generation_prompt=True, **sent)
    assert render(source, **sent) == theirs[0]


def test_messages_are_not_touched() -> None:
    before = [dict(message) for message in MESSAGES]
    render("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert before == MESSAGES


def test_a_variable_may_be_called_as_a_parameter_of_jinjas_own() -> None:
    template = ChatTemplate("{{ args }} {{ kwargs }} {{ context }}", SPECIAL)
    arguments = dict.fromkeys(("self", "args", "kwargs", "context"), "x")
    assert template.render(MESSAGES, created=NOON, arguments=arguments) == "x x x"
