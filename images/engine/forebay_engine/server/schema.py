"""The bodies of /v1/completions and /v1/chat/completions: shape, types and ranges. Unknown fields are refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta

from forebay_engine.server import template_arguments
from forebay_engine.text.stops import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
from forebay_wire.errors import ApiError, bad_json

MAX_N = 128
MAX_ALTERNATIVES = 20
"""logprobs and top_logprobs at most, as in vLLM."""

MAX_STOP_IDS = 64
MAX_PROMPTS = 128
_SHOWN_VALUE = 60
"""Characters of a refused value that its error repeats."""

StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class TextRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of both endpoints. null counts as not sent."""

    model: str
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """0 and -1: off."""

    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=MAX_STOP_IDS)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # These don't change the answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionRequest(TextRequest, kw_only=True):
    prompt: str | list[Any]
    """Text, token ids, or a list of either; `prompts()` tells them apart."""

    echo: bool | None = None
    best_of: int | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_ALTERNATIVES)] | None = None

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, all texts or all ids. Raises ApiError."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int) and not isinstance(self.prompt[0], bool):
            return [_convert({"prompt": self.prompt}, _Ids).prompt]
        if len(self.prompt) > MAX_PROMPTS:
            raise ApiError(
                400, f"prompt: {len(self.prompt)} prompts in one request, at most {MAX_PROMPTS}", param="prompt"
            )
        if self.prompt and isinstance(self.prompt[0], list):
            return _convert({"prompt": self.prompt}, _IdLists).prompt
        return _convert({"prompt": self.prompt}, _Texts).prompt


class _Texts(msgspec.Struct):
    prompt: Annotated[list[str], Meta(min_length=1)]


class _Ids(msgspec.Struct):
    prompt: list[Annotated[int, Meta(ge=0)]]


class _IdLists(msgspec.Struct):
    prompt: list[list[Annotated[int, Meta(ge=0)]]]


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None

    # Clients send back what they were given; these come as null from a text model.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None


class ChatRequest(TextRequest, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Wins over max_tokens, its older name."""

    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_ALTERNATIVES)] | None = None

    chat_template_kwargs: dict[str, Any] | None = None

    def template_arguments(self) -> dict[str, Any]:
        """Variables for the chat template. Raises ApiError."""
        return template_arguments.check(self.chat_template_kwargs or {})

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as a chat template takes them: content as one text, null fields left out. Raises ApiError."""
        return [_template_message(message, i) for i, message in enumerate(self.messages)]


def _template_message(message: Message, i: int) -> dict[str, Any]:
    rendered: dict[str, Any] = {"role": message.role}
    if message.content is None:
        if not message.tool_calls:
            raise ApiError(400, f"messages[{i}].content: missing; send a text", param=f"messages[{i}].content")
    elif isinstance(message.content, str):
        rendered["content"] = message.content
    else:
        rendered["content"] = "\n".join(_part_text(part, i, j) for j, part in enumerate(message.content))
    for name in ("name", "tool_call_id", "tool_calls"):
        value = getattr(message, name)
        if value is not None:
            rendered[name] = value
    return rendered


def _part_text(part: ContentPart, i: int, j: int) -> str:
    where = f"messages[{i}].content[{j}]"
    if part.type != "text":
        raise ApiError(400, f"{where}.type: {part.type!r} is not supported; only text is", param=f"{where}.type")
    if part.text is None:
        raise ApiError(400, f"{where}.text: missing", param=f"{where}.text")
    return part.text


_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None,),
    "function_call": (None,),
    "response_format": (None, {"type": "text"}),
    "logit_bias": (None, {}),
    "suffix": (None, ""),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "store": (None, False),
    "service_tier": (None, "auto", "default"),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
}
"""OpenAI fields that aren't supported, and the values under which they ask for nothing."""

_Body = TypeVar("_Body", bound=msgspec.Struct)


def parse_json(raw: bytes) -> dict[str, Any]:
    """The body as a JSON object. Raises ApiError 400: not JSON, invalid UTF-8, lone surrogates, NaN, too deep."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise bad_json(raw, error) from error
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, got {type(body).__name__}")
    return body


def parse_chat(body: Mapping[str, Any]) -> ChatRequest:
    return _convert(_supported(body), ChatRequest)


def parse_completion(body: Mapping[str, Any]) -> CompletionRequest:
    return _convert(_supported(body), CompletionRequest)


def _supported(body: Mapping[str, Any]) -> dict[str, Any]:
    kept = {}
    for name, value in body.items():
        if name not in _WITHOUT_EFFECT:
            kept[name] = value
        elif not any(type(value) is type(harmless) and value == harmless for harmless in _WITHOUT_EFFECT[name]):
            raise ApiError(400, f"{name}: not supported by this server; leave it out", param=name)
    return kept


_AT = re.compile(r" - at `\$\.?(.*)`$")
_ROLE = re.compile(r"messages\[\d+\]\.role")
_UNKNOWN = re.compile(r"unknown field `(.*)`")
_MISSING = re.compile(r"missing required field `(.*)`")


def _convert(body: Mapping[str, Any], kind: type[_Body]) -> _Body:
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise refusal(error, body) from error


def refusal(error: msgspec.ValidationError, body: Mapping[str, Any]) -> ApiError:
    """The 400 for a body that msgspec refused: names the field and repeats its value, cut short."""
    text = str(error)
    at = _AT.search(text)
    path = at.group(1) if at else ""
    reason = text[: at.start()] if at else text
    for pattern, message in ((_UNKNOWN, "not a known field; leave it out"), (_MISSING, "missing; it is required")):
        if found := pattern.search(reason):
            param = f"{path}.{found.group(1)}" if path else found.group(1)
            return ApiError(400, f"{param}: {message}", param=param)
    value = _value_at(body, path)
    got = "" if value is None or isinstance(value, (dict, list)) else f", got {_short(value)}"
    allowed = f"; use one of {', '.join(get_args(Role))}" if _ROLE.fullmatch(path) and isinstance(value, str) else ""
    return ApiError(400, f"{path or 'body'}: {reason}{got}{allowed}", param=path or None)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_VALUE else text[:_SHOWN_VALUE] + "..."


def _value_at(body: Any, path: str) -> Any:
    """The value at a path such as `messages[0].role`; None where the path can't be followed."""
    value = body
    for key, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        try:
            value = value[int(index)] if index else value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return value
