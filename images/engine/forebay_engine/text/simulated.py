"""The tokeniser of a simulated worker that was given no model folder: one token a byte, and a plain chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from forebay_engine.sampling.defaults import SamplingDefaults
from forebay_engine.text.detokenize import ByteDetokenizer, Detokenizer
from forebay_engine.text.template import ChatTemplate

SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>")
"""Ids 256, 257, ... after the bytes."""

VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
END_ID = 257
TURN_END_ID = 259

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] or '' }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class SimulatedTokenizer:
    """text/tokenizer.py: Tokenizer."""

    vocab_size = VOCAB_SIZE
    eos_ids: tuple[int, ...] = (END_ID, TURN_END_ID)
    longest_token_bytes = max(len(token) for token in SPECIAL_TOKENS)
    sampling_defaults = SamplingDefaults()

    def __init__(self) -> None:
        self._ids = {token: 256 + i for i, token in enumerate(SPECIAL_TOKENS)}
        self._split = re.compile("(" + "|".join(re.escape(token) for token in SPECIAL_TOKENS) + ")")
        self._template = ChatTemplate(_TEMPLATE, {"bos_token": SPECIAL_TOKENS[0], "eos_token": SPECIAL_TOKENS[3]})

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        ids: list[int] = []
        for part in self._split.split(text):
            special = self._ids.get(part)
            if special is None:
                ids.extend(part.encode())
            else:
                ids.append(special)
        return ids

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, created: int, arguments: Mapping[str, Any]) -> str:
        return self._template.render(messages, created=created, arguments=arguments)

    def detokenizer(self) -> Detokenizer:
        return ByteDetokenizer(lambda token_id: bytes([token_id]) if token_id < 256 else b"")

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        special = token_id - 256
        return SPECIAL_TOKENS[special].encode() if special < len(SPECIAL_TOKENS) else b""
