"""Chat templates, rendered as Hugging Face's `apply_chat_template(..., add_generation_prompt=True)` does.

Same environment as transformers' chat_template_utils: immutable sandbox, trim_blocks, lstrip_blocks, loop controls,
`tojson` without HTML escaping, `raise_exception`, `{% generation %}` blocks. One difference, on purpose: the clock is
the answer's `created` in UTC, so that every worker that renders the same request gets the same tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from forebay_engine.errors import ModelError

RESERVED_NAMES = frozenset(
    (
        *("messages", "tools", "documents", "add_generation_prompt", "strftime_now", "raise_exception"),
        # What transformers' apply_chat_template takes under these names is no variable.
        *("chat_template", "conversation", "continue_final_message", "tokenize"),
    )
)
"""Names that a template finds set, beside its special tokens: no request may set them."""


class TemplateRefused(ValueError):
    """The template can't render these messages; the text is the template's own where it has one."""


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationBlocks(Extension):
    """`{% generation %}` marks assistant text for training masks; for serving its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str], *, origin: str = "chat template") -> None:
        """`special_tokens`: bos_token, eos_token, ... as the template names them. Raises ModelError on bad syntax."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"{origin}: line {error.lineno}: {error.message}; mend the template") from error

    def render(self, messages: Sequence[Mapping[str, Any]], *, created: int, arguments: Mapping[str, Any]) -> str:
        """The prompt text. `created`: Unix seconds, the template's "now". `arguments`: further variables of it.

        Raises TemplateRefused.
        """
        now = datetime.fromtimestamp(created, UTC)
        try:
            # One dict, no keywords: a variable may be called as a parameter of render() is.
            return self._template.render(
                {
                    **arguments,
                    **self._special_tokens,
                    "messages": [dict(message) for message in messages],
                    "tools": None,
                    "documents": None,
                    "add_generation_prompt": True,
                    "strftime_now": now.strftime,
                }
            )
        except jinja2.TemplateError as error:
            raise TemplateRefused(error.message or type(error).__name__) from error
        except Exception as error:
            # A template that assumes what these messages don't have fails in any of Python's ways: 1/0, a memory error.
            raise TemplateRefused(f"{type(error).__name__}: {error}") from error
