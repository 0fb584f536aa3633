"""Small models made of a real one, for tests that need many tokens rather than sense."""

from __future__ import annotations

import json
import shutil
from pathlib import Path


def truncated(source: Path, target: Path, layers: int) -> Path:
    """The model in `source` with its first `layers` layers only: the same tokenizer and kernels in less time."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors" and file.name != "config.json" and file.is_file():
            shutil.copy(file, target / file.name)
    config = json.loads((source / "config.json").read_text())
    config["num_hidden_layers"] = layers
    (target / "config.json").write_text(json.dumps(config))
    kept = {}
    with safe_open(source / "model.safetensors", framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118 (safe_open is no dict)
            parts = name.split(".")
            if "layers" not in parts or int(parts[parts.index("layers") + 1]) < layers:
                kept[name] = weights.get_tensor(name)
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    return target
