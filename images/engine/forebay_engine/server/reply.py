"""A request's answers taken together: turns the core's events into stream events, or into one body. Pure.

One token makes at most one chunk, however the core batched its events, so a stream's chunks are a function of the token
ids: prefill's delta followed by decode's stream is the stream of a single worker, at every cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forebay_engine.server.answer import Answer, Piece
from forebay_engine.server.plan import Plan
from forebay_engine.server.shapes import ChatChoice, EchoedPrompt, Shapes, TextChoice, Usage, usage
from forebay_engine.text.tokenizer import Tokenizer
from forebay_engine.types import TokenEvent
from forebay_wire.transfer import KVTransferParams, TokenLogprob

StreamEvent = tuple[list[int], bytes | None]
"""Token ids and the chunk that shows them (wire/stream.py); no chunk when nothing may be shown yet."""


@dataclass(slots=True)
class _Choice:
    answer: Answer
    started: bool = False
    echoed: EchoedPrompt | None = None
    pieces: list[Piece] = field(default_factory=list)
    """Kept for the body only."""


class Reply:
    def __init__(
        self,
        plan: Plan,
        shapes: Shapes,
        tokenizer: Tokenizer,
        *,
        cached_tokens: int | None = None,
        stream: bool | None = None,
    ) -> None:
        """`cached_tokens` is what another worker found; None: what our core says with the first event.

        `stream` False keeps the pieces for `body()`; None: as the request says.
        """
        self._plan = plan
        self._shapes = shapes
        self._tokenizer = tokenizer
        self._stream = plan.stream if stream is None else stream
        self._choices = [_Choice(Answer(plan, i, tokenizer)) for i in range(plan.choices)]
        self._cached = cached_tokens
        self._cached_by_prompt = [0] * len(plan.prompts)

    def replay(
        self, output_ids: list[int], logprobs: list[TokenLogprob] | None, *, delivered: bool
    ) -> list[StreamEvent]:
        """Take over an answer of one choice. `delivered`: the client's chunks cover these ids, so none are made again.

        Stops at the token that ended the answer; check `finished`.
        """
        if not output_ids:
            return []
        choice = self._choices[0]
        choice.echoed = self._echo(0, None)
        events: list[StreamEvent] = []
        for i, token_id in enumerate(output_ids):
            piece = choice.answer.replay(token_id, self._logprob(logprobs, i))
            events += self._take(0, choice, piece)
            if piece.finish_reason is not None:
                break
        return [] if delivered else events

    def feed(self, index: int, event: TokenEvent) -> list[StreamEvent]:
        """Add the core's event for choice `index`; ids after the token that ended the answer are dropped."""
        choice = self._choices[index]
        if event.cached_tokens is not None and index % self._plan.n == 0:
            self._cached_by_prompt[index // self._plan.n] = event.cached_tokens
        if not choice.started and choice.echoed is None:
            choice.echoed = self._echo(index, event.prompt_logprobs)
        events: list[StreamEvent] = []
        last = len(event.token_ids) - 1
        for i, token_id in enumerate(event.token_ids):
            finish_reason = event.finish_reason if i == last else None
            piece = choice.answer.push(token_id, self._logprob(event.logprobs, i), finish_reason)
            events += self._take(index, choice, piece)
            if piece.finish_reason is not None:
                break
        return events

    def _logprob(self, logprobs: list[TokenLogprob] | None, i: int) -> TokenLogprob | None:
        return logprobs[i] if logprobs is not None and self._plan.params.logprobs is not None else None

    def _echo(self, index: int, entries: list[TokenLogprob] | None) -> EchoedPrompt | None:
        if self._plan.echo_texts is None:
            return None
        prompt = index // self._plan.n
        return self._shapes.echoed_prompt(
            self._plan.echo_texts[prompt], self._plan.prompts[prompt], entries, self._tokenizer
        )

    def _take(self, index: int, choice: _Choice, piece: Piece) -> list[StreamEvent]:
        first, choice.started = not choice.started, True
        if not self._stream:
            choice.pieces.append(piece)
            return []
        chunk = None
        # With logprobs every token gets its chunk: its log-probability must not wait for text.
        if piece.text or piece.finish_reason is not None or piece.logprob is not None:
            base = choice.echoed.length if choice.echoed is not None else 0
            chunk = self._shapes.piece_chunk(index, piece, base)
        opening = self._opening(index, choice) if first else None
        if opening is None:
            return [([piece.token_id], chunk)]
        if chunk is None:
            return [([piece.token_id], opening)]
        return [([], opening), ([piece.token_id], chunk)]

    def _opening(self, index: int, choice: _Choice) -> bytes | None:
        """The chunk before an answer's first: its role, or the echoed prompt."""
        if self._plan.chat:
            return self._shapes.role_chunk(index)
        if choice.echoed is None:
            return None
        return self._shapes.echo_chunk(index, choice.echoed.text, choice.echoed.logprobs)

    def finished(self, index: int) -> bool:
        return self._choices[index].answer.finish_reason is not None

    @property
    def finish_reason(self) -> str | None:
        """Of the first choice."""
        return self._choices[0].answer.finish_reason

    @property
    def text(self) -> str:
        """Shown text of the first choice; only of a reply that keeps its pieces."""
        return "".join(piece.text for piece in self._choices[0].pieces)

    @property
    def all_finished(self) -> bool:
        return all(choice.answer.finish_reason is not None for choice in self._choices)

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached_by_prompt) if self._cached is None else self._cached

    @property
    def completion_tokens(self) -> int:
        return sum(choice.answer.tokens for choice in self._choices)

    def usage(self) -> Usage:
        return usage(self._plan.prompt_tokens, self.completion_tokens, self.cached_tokens)

    def closing(self) -> list[bytes]:
        """Chunks between the last token's and [DONE]."""
        return [self._shapes.usage_chunk(self.usage())] if self._plan.include_usage else []

    def body(self, params: KVTransferParams | None = None) -> bytes:
        """The whole answer as one JSON body; a choice that hasn't ended says `length`, as vLLM's prefill leg does."""
        choices: list[ChatChoice | TextChoice] = []
        for index, choice in enumerate(self._choices):
            text = "".join(piece.text for piece in choice.pieces)
            finish_reason = choice.answer.finish_reason or "length"
            choices.append(self._shapes.choice(index, text, choice.pieces, finish_reason, choice.echoed))
        return self._shapes.body(choices, self.usage(), params)
