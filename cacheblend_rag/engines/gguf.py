"""Converts a GGUF file to a Hugging Face directory, once, and keeps the directory in the user's cache folder."""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import xxhash
from filelock import FileLock

from cacheblend_rag.errors import ModelError, first_line
from cacheblend_rag.homes import remembered_sum
from cacheblend_rag.printable import size

_log = logging.getLogger(__name__)
_SUMS = "cacheblend-sums.json"
# Part of a directory's name: a new number converts all models again.
_FORMAT = 1


def made_of_gguf(file: Path, cache: Path) -> Path:
    """Return the Hugging Face directory of a GGUF file: config, tokenizer, and weights in bf16.

    The first call converts the file, which takes about 20 s for 100 MB. Every later call checks the directory and
    converts the file again if the directory is damaged. Concurrent processes wait for the first one. The directory lies
    in ``cache`` and is named by the file's content. Two log lines, of level warning so that users see them, report the
    conversion, and the directory's path, its size and how to delete it.

    Raises:
        ModelError: Packages of the extra ``gguf`` are missing, the file is damaged, or transformers cannot read it.
        OSError: ``cache`` cannot be written to.
    """
    made = cache / f"{file.stem}-{_sum(file)[:16]}-{_FORMAT}"
    if not _is_whole(made):
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{made.name}.lock"):
            if not _is_whole(made):
                _make(file, made)
    return made


def _sum(file: Path) -> str:
    def read() -> str:
        with file.open("rb") as handle:
            return hashlib.file_digest(handle, xxhash.xxh3_128).hexdigest()

    return remembered_sum("contents", [file], read)


def _is_whole(made: Path) -> bool:
    try:
        sums = json.loads((made / _SUMS).read_text(encoding="utf-8"))
        return bool(sums) and all(_sum(made / name) == known for name, known in sums.items())
    except (OSError, ValueError, AttributeError):
        return False


def _make(file: Path, made: Path) -> None:
    _log.warning("Converting %s (%s) for transformers, once; this may take minutes.", file, size(file.stat().st_size))
    for left in made.parent.glob(f"{glob.escape(made.name)}.*/"):  # by a conversion that was killed: the lock is ours
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=made.parent, prefix=f"{made.name}.") as scratch:
        folder = Path(scratch) / "model"
        _convert(file, folder)
        sums = {each.name: _sum(each) for each in folder.iterdir()}
        (folder / _SUMS).write_text(json.dumps(sums, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(made, ignore_errors=True)
        folder.rename(made)
    nbytes = sum(each.stat().st_size for each in made.iterdir())
    _log.warning(
        "The converted model takes %s of disk, kept for the next use in %s. To free it, delete that folder; another use "
        "of the GGUF file makes it again.",
        size(nbytes), made,
    )  # fmt: skip


def _convert(file: Path, folder: Path) -> None:
    architecture, splitting = _described(file)
    import torch
    import transformers

    # Older versions always unpack the weights; newer versions would compute on packed weights.
    config = getattr(transformers, "GgufConfig", None)
    unpacked = {} if config is None else {"quantization_config": config(dequantize=True)}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.bfloat16, **unpacked
        )
    except Exception as error:
        raise ModelError(
            f"{file} cannot be used: transformers {transformers.__version__} does not read this GGUF of the architecture "
            f"{architecture!r} ({first_line(error)}). Give a Hugging Face directory, or a GGUF of another architecture."
        ) from error
    model.config.__dict__.pop("quantization_config", None)
    if (splitter := _splitter(splitting)) is not None:
        tokenizer.backend_tokenizer.pre_tokenizer = splitter
    tokenizer.model_max_length = model.config.get_text_config().max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _described(file: Path) -> tuple[str, str]:
    """Return the architecture that a GGUF file names, and the name of its tokenizer's pre-tokenizer ("" if unnamed)."""
    if find_spec("gguf") is None or find_spec("accelerate") is None:
        raise ModelError(
            f"{file} is a GGUF file; to read it, the packages gguf and accelerate are needed: pip install 'cacheblend-rag[gguf]'."
        )
    from gguf import GGUFReader

    try:
        fields = GGUFReader(file).fields
        architecture = str(fields["general.architecture"].contents())
    except Exception as error:  # numpy raises various errors for a truncated file
        raise ModelError(
            f"{file} is damaged, or no GGUF file ({first_line(error)}). Fetch it again, or install the package again that it "
            "came with."
        ) from error
    splitting = fields.get("tokenizer.ggml.pre")
    return architecture, "" if splitting is None else str(splitting.contents())


def _splitter(name: str) -> Any:
    """Return the pre-tokenizer ``name`` if transformers does not read it from a GGUF file, else None."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    # As in the tokenizer.json of SmolLM and SmolLM2. Without it, blanks before a digit are split as before a letter.
    return Sequence([Digits(True), ByteLevel(add_prefix_space=False)]) if name == "smollm" else None
