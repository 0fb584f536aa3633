"""The tokeniser as the server needs it, and the one read from a model folder in Hugging Face layout."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as RustTokenizer

from forebay_engine.errors import ModelError
from forebay_engine.sampling.defaults import SamplingDefaults, read_defaults
from forebay_engine.text.detokenize import ByteDetokenizer, Detokenizer, WindowDetokenizer
from forebay_engine.text.template import ChatTemplate, TemplateRefused

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one text a call: its thread pool would only cost


class Tokenizer(Protocol):
    vocab_size: int
    """Ids the tokeniser knows are below this; the model's own vocabulary may be padded beyond it."""

    eos_ids: tuple[int, ...]
    """Ids that end an answer unless the client says ignore_eos."""

    longest_token_bytes: int
    """No token stands for more UTF-8 bytes of input than this: bounds the tokens of a text from below."""

    sampling_defaults: SamplingDefaults
    """For what a request leaves open."""

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Ids of a text; special tokens written in the text become their ids. Safe to call from another thread."""

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, created: int, arguments: Mapping[str, Any]) -> str:
        """The prompt text of a conversation; `arguments` are further variables of the template.

        Raises TemplateRefused.
        """

    def detokenizer(self) -> Detokenizer:
        """A fresh one, for one answer; special tokens are not shown."""

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, special ones by their name; empty for an id without a token."""


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Text of a whole sequence, special tokens left out."""
    detokenizer = tokenizer.detokenizer()
    return "".join([*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()])


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes, character to byte (openai/gpt-2, encoder.py)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}; the model folder is incomplete or damaged") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def _optional_json(path: Path) -> dict[str, Any]:
    return _read_json(path) if path.exists() else {}


def _is_byte_level(decoder: object) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders", [])
        return bool(parts) and all(_is_byte_level(part) for part in parts)
    return decoder.get("type") == "ByteLevel"


def _special_tokens(config: Mapping[str, Any], fallback: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... by name: what a chat template may use."""
    tokens: dict[str, str] = {}
    for source in (fallback, config):
        for name, value in source.items():
            content = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(content, str):
                tokens[name] = content
    return tokens


def _template_source(folder: Path, config: Mapping[str, Any]) -> tuple[str, str] | None:
    """The template and where it stands; the file wins over the field, as in transformers."""
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text("utf-8"), str(file)
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read {file}: {error}") from error
    field = config.get("chat_template")
    origin = f"{folder / 'tokenizer_config.json'}: chat_template"
    if isinstance(field, list):
        named = {entry["name"]: entry["template"] for entry in field if isinstance(entry, dict)}
        field = named.get("default")
    return (field, origin) if isinstance(field, str) else None


def _as_ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool)]


class FolderTokenizer:
    """`Tokenizer` over tokenizer.json, tokenizer_config.json and the chat template beside them."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelError naming the file and the fault."""
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ModelError(f"{folder} has no tokenizer.json; --model-dir must be a folder in Hugging Face layout")
        raw = _read_json(path)
        try:
            self._tokenizer = RustTokenizer.from_str(json.dumps(raw))
        except Exception as error:  # the binding raises plain Exception
            raise ModelError(f"{path}: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = _optional_json(folder / "tokenizer_config.json")
        special = _special_tokens(config, _optional_json(folder / "special_tokens_map.json"))

        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        vocab: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        self._byte_level = _is_byte_level(raw.get("decoder"))
        self._pieces: dict[int, bytes] = {}
        self.longest_token_bytes = max(len(token.encode()) for token in vocab)
        self.eos_ids = self._find_eos(folder, special)
        self.sampling_defaults = read_defaults(folder)

        found = _template_source(folder, config)
        self._template = ChatTemplate(found[0], special, origin=found[1]) if found is not None else None

    def _find_eos(self, folder: Path, special: Mapping[str, str]) -> tuple[int, ...]:
        for name in ("generation_config.json", "config.json"):
            ids = _as_ids(_optional_json(folder / name).get("eos_token_id"))
            if ids:
                return tuple(ids)
        token_id = self._tokenizer.token_to_id(special["eos_token"]) if "eos_token" in special else None
        return () if token_id is None else (token_id,)

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        # The batch call lets go of the GIL and keeps no offsets; plain encode() does neither.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
        return ids

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, created: int, arguments: Mapping[str, Any]) -> str:
        if self._template is None:
            raise TemplateRefused("this model has no chat template; send the prompt to /v1/completions")
        return self._template.render(messages, created=created, arguments=arguments)

    def detokenizer(self) -> Detokenizer:
        return ByteDetokenizer(self._visible_bytes) if self._byte_level else WindowDetokenizer(self._decode)

    def token_bytes(self, token_id: int) -> bytes:
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._piece(token_id)
        return piece

    def _visible_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._special_ids else self.token_bytes(token_id)

    def _piece(self, token_id: int) -> bytes:
        token: str | None = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            # One character outside the alphabet and the token is taken as it is: tokenizers' ByteLevel decoder.
            values = [_BYTES.get(character) for character in token]
            return token.encode() if None in values else bytes(value for value in values if value is not None)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text
