"""Where a model's files are: the bundled one, a directory, or a hub model's snapshot. Shared by all engines."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

BUNDLED_MODEL = "bundled"


def bundled_model_directory() -> Path:
    """Return where the small model that ships with the package lies."""
    return Path(str(files("cacheblend_rag") / "demo" / "model"))


def is_bundled(model: str | Path | None) -> bool:
    """Say whether ``model`` means the bundled model."""
    return model is None or str(model) == BUNDLED_MODEL


def model_directory(model: str | Path | None) -> Path:
    """Return the directory of a model: None or ``"bundled"``, a directory, or a hub name (downloaded if need be).

    Raises:
        OSError: There is no such directory, or it holds no model.
    """
    if is_bundled(model):
        return bundled_model_directory()
    name = str(model)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise OSError(f"{path} has no config.json.")
        return path
    if path.exists() or name.startswith((".", "/", "~")):
        raise OSError(f"{path} is not a directory.")
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]))
