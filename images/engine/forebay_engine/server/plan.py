"""From a parsed request to what the core is asked: prompts as token ids, sampling parameters, limits. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from forebay_engine.server.schema import ChatRequest, CompletionRequest, TextRequest
from forebay_engine.text.tokenizer import Tokenizer, decode
from forebay_engine.types import EngineRequest, SamplingParams
from forebay_wire.errors import ApiError

MAX_CHOICES = 256
"""Prompts times n: each is one request of the core."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a request is judged against."""

    model: str
    max_model_len: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Source:
    """One prompt before tokenising: text, or ids as the client sent them."""

    text: str | None
    ids: list[int] | None
    add_special: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """A validated request. Choice i answers prompt i // n."""

    chat: bool
    model: str
    prompts: list[list[int]]
    echo_texts: list[str] | None
    """Texts to repeat before the answers; None without echo."""

    n: int
    params: SamplingParams
    """Of every choice, but for `choice` and `max_tokens`: `params_of` gives those."""

    room: list[int]
    """max_tokens per prompt."""

    stops: tuple[str, ...]
    stop_ids: frozenset[int]
    stream: bool
    include_usage: bool

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def field(self) -> str:
        """The request field that holds the prompt."""
        return "messages" if self.chat else "prompt"

    def params_of(self, choice: int) -> SamplingParams:
        prompt, index = divmod(choice, self.n)
        return msgspec.structs.replace(self.params, choice=index, max_tokens=self.room[prompt])

    def engine_request(self, choice: int, engine_id: str) -> EngineRequest:
        """One choice as the core's request; `engine_id` is unique among the running ones."""
        return EngineRequest(
            request_id=engine_id, prompt_ids=self.prompts[choice // self.n], params=self.params_of(choice)
        )


def check_model(request: TextRequest, limits: ModelLimits) -> None:
    if request.model != limits.model:
        raise ApiError(
            404,
            f"model {request.model!r} does not exist here; this server has {limits.model!r}",
            param="model",
            code="model_not_found",
        )


def sources(request: ChatRequest | CompletionRequest, tokenizer: Tokenizer, created: int) -> list[Source]:
    """The prompts to tokenise. Raises ApiError, TemplateRefused."""
    if isinstance(request, ChatRequest):
        text = tokenizer.render_chat(
            request.template_messages(), created=created, arguments=request.template_arguments()
        )
        # The template writes the special tokens itself.
        return [Source(text, None, add_special=False)]
    return [
        Source(prompt, None, add_special=True) if isinstance(prompt, str) else Source(None, prompt, add_special=False)
        for prompt in request.prompts()
    ]


def check_text_length(source: Source, tokenizer: Tokenizer, limits: ModelLimits, field: str) -> None:
    """Refuse a text that can't fit whatever its tokens are, before time is spent on tokenising it."""
    if source.text is None:
        return
    size = len(source.text.encode())
    least = -(-size // tokenizer.longest_token_bytes)
    if least >= limits.max_model_len:
        raise _too_long(field, f"at least {least}", limits)


def _too_long(field: str, tokens: object, limits: ModelLimits) -> ApiError:
    return ApiError(
        400,
        f"{field}: {tokens} tokens leave no room for an answer, max_model_len is {limits.max_model_len} tokens; "
        "shorten the prompt",
        param=field,
        code="context_length_exceeded",
    )


def make_plan(
    request: ChatRequest | CompletionRequest,
    prompts: list[list[int]],
    texts: Sequence[str | None],
    tokenizer: Tokenizer,
    limits: ModelLimits,
    *,
    default_seed: int,
) -> Plan:
    """Validate the request against its prompts' tokens and the model. Raises ApiError.

    `texts` are the prompts as text, None where the client sent ids. `default_seed` is used when the client names none.
    """
    chat = isinstance(request, ChatRequest)
    field = "messages" if chat else "prompt"
    n = request.n or 1
    if len(prompts) * n > MAX_CHOICES:
        raise ApiError(400, f"n: {len(prompts)} prompts x n {n} answers, at most {MAX_CHOICES}", param="n")
    for prompt in prompts:
        _check_prompt(prompt, field, limits)
    max_tokens = request.max_tokens
    max_field = "max_tokens"
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        max_tokens, max_field = request.max_completion_tokens, "max_completion_tokens"
    room = [_max_tokens(len(prompt), max_tokens, max_field, limits) for prompt in prompts]
    min_tokens = request.min_tokens or 0
    if min_tokens > min(room):
        raise ApiError(
            400, f"min_tokens: {min_tokens} is more than max_tokens, {min(room)}; lower it", param="min_tokens"
        )
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options: only allowed when stream is true", param="stream_options")
    logprobs, echo = _logprobs(request), isinstance(request, CompletionRequest) and bool(request.echo)
    if isinstance(request, CompletionRequest) and request.best_of not in (None, n):
        raise ApiError(
            400,
            f"best_of: {request.best_of} is not supported, it may only equal n, which is {n}; leave it out",
            param="best_of",
        )
    stop_ids = _stop_ids(request, tokenizer, limits)
    defaults = tokenizer.sampling_defaults
    params = SamplingParams(
        temperature=_or(request.temperature, defaults.temperature),
        top_p=_or(request.top_p, defaults.top_p),
        top_k=defaults.top_k if request.top_k is None else max(request.top_k, 0),
        min_p=_or(request.min_p, defaults.min_p),
        seed=default_seed if request.seed is None else request.seed,
        max_tokens=min(room),
        min_tokens=min_tokens,
        stop_token_ids=stop_ids,
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
    )
    echo_texts = None
    if echo:
        echo_texts = [
            text if text is not None else decode(tokenizer, prompt) for text, prompt in zip(texts, prompts, strict=True)
        ]
    return Plan(
        chat=chat,
        model=limits.model,
        prompts=prompts,
        echo_texts=echo_texts,
        n=n,
        params=params,
        room=room,
        stops=(request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ()),
        stop_ids=frozenset(stop_ids),
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _check_prompt(prompt: list[int], field: str, limits: ModelLimits) -> None:
    if not prompt:
        raise ApiError(400, f"{field}: empty; send at least one token", param=field)
    if len(prompt) >= limits.max_model_len:
        raise _too_long(field, len(prompt), limits)
    highest = max(prompt)
    if highest >= limits.vocab_size:
        raise ApiError(400, f"{field}: token id {highest} is not below vocab_size {limits.vocab_size}", param=field)


def _max_tokens(prompt_tokens: int, asked: int | None, field: str, limits: ModelLimits) -> int:
    room = limits.max_model_len - prompt_tokens
    if asked is not None and asked > room:
        raise ApiError(
            400,
            f"{field}: {prompt_tokens} prompt tokens + {asked} = {prompt_tokens + asked} tokens, max_model_len is "
            f"{limits.max_model_len}; ask for at most {room} or shorten the prompt",
            param=field,
            code="context_length_exceeded",
        )
    return room if asked is None else asked


def _logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "top_logprobs: only allowed when logprobs is true", param="top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def _stop_ids(request: TextRequest, tokenizer: Tokenizer, limits: ModelLimits) -> tuple[int, ...]:
    asked = request.stop_token_ids or []
    if asked and max(asked) >= limits.vocab_size:
        raise ApiError(
            400,
            f"stop_token_ids: id {max(asked)} is not below vocab_size {limits.vocab_size}",
            param="stop_token_ids",
        )
    # A model's vocabulary may be smaller than its tokeniser's; ids it can't produce would only trip the sampler.
    eos = () if request.ignore_eos else [eos_id for eos_id in tokenizer.eos_ids if eos_id < limits.vocab_size]
    return tuple(sorted({*asked, *eos}))
