"""One answer as it grows: tokens in, text out. Pure, and a function of the request and the token ids alone.

That is what lets another worker go on with an answer: it replays the ids through a fresh `Answer`.
"""

from __future__ import annotations

from dataclasses import dataclass

from forebay_engine.server.plan import Plan
from forebay_engine.text.stops import StopWindow
from forebay_engine.text.tokenizer import Tokenizer
from forebay_wire.transfer import TokenLogprob


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token did to the answer."""

    token_id: int
    text: str
    """Text to show now: may include text held back before, and be empty while text is held back."""

    finish_reason: str | None
    """`stop` or `length` with the answer's last token."""

    logprob: TokenLogprob | None
    offset: int
    """Characters of the answer's text before this token."""


class Answer:
    def __init__(self, plan: Plan, choice: int, tokenizer: Tokenizer) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._window = StopWindow(plan.stops)
        self._stop_ids = plan.stop_ids
        self._min_tokens = plan.params.min_tokens
        self._max_tokens = plan.params_of(choice).max_tokens
        self._characters = 0
        self.tokens = 0
        """Completion tokens so far, the one that ended the answer included."""

        self.finish_reason: str | None = None

    def push(self, token_id: int, logprob: TokenLogprob | None, finish_reason: str | None) -> Piece:
        """Add a token. `finish_reason` is the core's; a stop string found here overrides it."""
        self.tokens += 1
        offset = self._characters
        # The token that ended the answer as a stop id isn't part of its text.
        ended_by_id = finish_reason == "stop" and token_id in self._stop_ids
        text = "" if ended_by_id else self._detokenizer.push(token_id)
        if finish_reason is not None:
            text += self._detokenizer.flush()
        self._characters += len(text)
        shown, found = self._window.push(text, armed=self.tokens > self._min_tokens)
        if found:
            finish_reason = "stop"
        elif finish_reason is not None:
            shown += self._window.flush()
        self.finish_reason = finish_reason
        return Piece(token_id, shown, finish_reason, logprob, offset)

    def replay(self, token_id: int, logprob: TokenLogprob | None) -> Piece:
        """Add a token that another worker produced; whether it ended the answer follows from the request."""
        finish_reason = None
        if token_id in self._stop_ids:
            finish_reason = "stop"  # stop ids are masked until min_tokens, so one that was sampled ended the answer
        elif self.tokens + 1 >= self._max_tokens:
            finish_reason = "length"
        return self.push(token_id, logprob, finish_reason)
