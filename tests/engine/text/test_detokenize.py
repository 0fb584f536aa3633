"""Detokenisers: one id at a time gives the text of all at once, and never half a character."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from forebay_engine.errors import ModelError
from forebay_engine.text.simulated import SPECIAL_TOKENS, SimulatedTokenizer
from forebay_engine.text.tokenizer import FolderTokenizer, decode

CORPUS = (
    8
    * [
        "the cat sat on the mat",
        "caf\u00e9 na\u00efve \u20ac5 \U0001f600\U0001f680 \u65e5\u672c\u8a9e",
        "x  y\n\n\tz",
    ]
    * 8
)


def save(tokenizer: Tokenizer, folder: Path, **config: object) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def byte_level_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("\u2192", special=False)])
    return save(tokenizer, tmp_path_factory.mktemp("bytes"), eos_token="<|end|>")


@pytest.fixture(scope="session")
def sentencepiece_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As Llama 2's: blanks as U+2581, bytes as <0x..> tokens, one leading blank stripped."""
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    for piece in ["\u2581", "\u2581the", "\u2581cat", "c", "a", "t", "s", "\u2581s", "at", "\u00e9", "n"]:
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return save(tokenizer, tmp_path_factory.mktemp("pieces"), eos_token={"content": "</s>"})


@pytest.fixture(scope="session")
def byte_level(byte_level_dir: Path) -> tuple[FolderTokenizer, Tokenizer]:
    return FolderTokenizer(byte_level_dir), Tokenizer.from_file(str(byte_level_dir / "tokenizer.json"))


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_dir: Path) -> tuple[FolderTokenizer, Tokenizer]:
    return FolderTokenizer(sentencepiece_dir), Tokenizer.from_file(str(sentencepiece_dir / "tokenizer.json"))


@given(data=st.data())
def test_random_ids_of_a_byte_level_tokenizer(
    byte_level: tuple[FolderTokenizer, Tokenizer], data: st.DataObject
) -> None:
    ours, theirs = byte_level
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size + 1), max_size=24))
    assert decode(ours, ids) == theirs.decode(ids, skip_special_tokens=True)


@given(text=st.text(max_size=40))
def test_text_survives_a_byte_level_tokenizer(byte_level: tuple[FolderTokenizer, Tokenizer], text: str) -> None:
    ours, _ = byte_level
    text = text.replace("<|end|>", "")
    assert decode(ours, ours.encode(text, add_special=False)) == text


@given(text=st.text(alphabet="the cas\u00e9n\u20ac\U0001f600", max_size=40))
def test_text_survives_a_sentencepiece_tokenizer(sentencepiece: tuple[FolderTokenizer, Tokenizer], text: str) -> None:
    ours, theirs = sentencepiece
    ids = ours.encode(text, add_special=False)
    assert decode(ours, ids) == theirs.decode(ids, skip_special_tokens=True)


@given(text=st.text(max_size=40), tail=st.binary(max_size=3))
def test_what_was_shown_is_never_half_a_character(text: str, tail: bytes) -> None:
    tokenizer = SimulatedTokenizer()
    detokenizer = tokenizer.detokenizer()
    shown = ""
    whole = text.encode()
    for byte in whole:
        shown += detokenizer.push(byte)
        assert text.startswith(shown)
    assert shown == text
    for byte in tail:
        shown += detokenizer.push(byte)
    assert shown + detokenizer.flush() == (whole + tail).decode("utf-8", "replace")


def test_special_tokens_are_ids_of_their_own_and_not_shown() -> None:
    tokenizer = SimulatedTokenizer()
    ids = tokenizer.encode("a<|im_end|>b", add_special=True)
    assert ids == [97, 259, 98]
    assert decode(tokenizer, ids) == "ab"
    assert [tokenizer.token_bytes(256 + i).decode() for i in range(len(SPECIAL_TOKENS))] == list(SPECIAL_TOKENS)


def test_special_and_added_tokens_of_a_folder(byte_level: tuple[FolderTokenizer, Tokenizer]) -> None:
    ours, theirs = byte_level
    end = theirs.token_to_id("<|end|>")
    assert ours.eos_ids == (end,)
    assert ours.token_bytes(end) == b"<|end|>"
    ids = ours.encode("a<think>b<|end|>", add_special=False)
    assert decode(ours, ids) == "a<think>b"
    assert ours.token_bytes(10**6) == b""


def test_generation_config_names_the_end_ids_first(byte_level_dir: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((byte_level_dir / name).read_bytes())
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    assert FolderTokenizer(tmp_path).eos_ids == (5,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert FolderTokenizer(tmp_path).eos_ids == (7, 8)


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({}, "no tokenizer.json"),
        ({"tokenizer.json": "{"}, "tokenizer.json"),
        ({"tokenizer.json": "[]"}, "JSON object"),
        ({"tokenizer.json": '{"model": {"type": "Nonsense"}}'}, "tokenizer.json"),
    ],
)
def test_a_bad_folder_is_named(tmp_path: Path, files: dict[str, str], named: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=named):
        FolderTokenizer(tmp_path)


def test_a_bad_template_is_named(byte_level_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((byte_level_dir / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ModelError, match=r"chat_template\.jinja: line 1"):
        FolderTokenizer(tmp_path)


@pytest.mark.model
def test_smollm2_random_ids(smollm2_dir: Path) -> None:
    import random

    ours = FolderTokenizer(smollm2_dir)
    theirs = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    rng = random.Random(7)
    for _ in range(2000):
        ids = [rng.randrange(ours.vocab_size if rng.random() < 0.9 else 20) for _ in range(rng.randrange(12))]
        assert decode(ours, ids) == theirs.decode(ids, skip_special_tokens=True)
