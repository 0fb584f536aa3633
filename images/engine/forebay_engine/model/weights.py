"""Reading safetensors folders: one file, or shards with an index. Tensors are views of mapped files."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from forebay_engine.errors import ModelError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class WeightFiles:
    """A folder's tensors by name. The pages stay in the page cache, shared by every process that maps the files."""

    def __init__(self, folder: Path) -> None:
        """Opens every shard, so that a missing or truncated one is an error before anything is loaded."""
        self._folder = folder
        self._open: dict[str, Any] = {}
        if (folder / _INDEX).exists():
            self._shard_of = self._read_index(folder / _INDEX)
        elif (folder / _SINGLE).exists():
            self._shard_of = dict.fromkeys(self._shard(_SINGLE).keys(), _SINGLE)
        else:
            raise ModelError(
                f"{folder} has neither {_SINGLE} nor {_INDEX}: only safetensors weights are read, "
                "convert other formats first"
            )
        for shard in sorted(set(self._shard_of.values())):
            self._shard(shard)

    def _read_index(self, file: Path) -> dict[str, str]:
        try:
            weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
            shards = {str(name): str(shard) for name, shard in weight_map.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelError(f"reading weight_map from {file} failed: {type(error).__name__}: {error}") from error
        for shard in set(shards.values()):
            # A model's author must not choose which other files of this machine are opened.
            if shard in ("", "..") or shard != Path(shard).name or "\0" in shard:
                raise ModelError(f"{file} names the shard {shard[:200]!r}; it must be a file in the same folder")
        return shards

    def _shard(self, name: str) -> Any:
        if name not in self._open:
            file = self._folder / name
            if not file.is_file():
                raise ModelError(f"shard {file} is missing, {_INDEX} names it: fetch the model again")
            try:
                self._open[name] = safe_open(file, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"{file} ({file.stat().st_size} bytes) is truncated or damaged: {error}; fetch it again"
                ) from error
        return self._open[name]

    def __contains__(self, name: str) -> bool:
        return name in self._shard_of

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor as stored (read-only by convention: its pages are a file's). Raises ModelError when it is missing,
        has another shape, or is no float."""
        shard = self._shard_of.get(name)
        if shard is None:
            raise ModelError(f"{self._folder} has no tensor {name}, which its config.json calls for")
        try:
            tensor: torch.Tensor = self._shard(shard).get_tensor(name)
        except SafetensorError as error:
            raise ModelError(
                f"{self._folder / shard} lacks tensor {name}, {_INDEX} places it there: {error}"
            ) from error
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self._folder / shard}: {name} has shape {list(tensor.shape)}, config.json makes it {list(shape)}"
            )
        if tensor.dtype not in _FLOATS:
            raise ModelError(f"{self._folder / shard}: {name} is {tensor.dtype}; supported: float32, bfloat16, float16")
        return tensor

    def close(self) -> None:
        self._open.clear()

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self.close()
