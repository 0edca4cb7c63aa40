"""Runs `cacheblend eval` once: samples, methods, answers, summary."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash

from cacheblend_lab.datasets import DataSet, load_data_set
from cacheblend_lab.evaluation.answers import AnswersFile, Progress, Row, answer_all
from cacheblend_lab.evaluation.methods import DEFAULT, SettingsMethod, make_methods
from cacheblend_lab.evaluation.prepare import Preparation, Preparer, header_text, set_header
from cacheblend_lab.evaluation.summary import find_worst, summarize
from cacheblend_lab.policies import rank_for
from cacheblend_lab.rows import Skipped
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.calibrate.measure import describe_machine
from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.errors import ModelError


@dataclass(frozen=True)
class EvalSettings:
    """Holds the settings of an evaluation.

    Attributes:
        dataset: Name or file; see :func:`~cacheblend_lab.datasets.load_data_set`.
        methods: See :func:`~cacheblend_lab.evaluation.methods.make_methods`.
        demo_chunks: Chunks of a demo context; None takes ``preparation.k``. From more chunks than ``preparation.k`` the
            nearest are retrieved.
    """

    dataset: str = "demo"
    data: Path | None = None
    methods: Sequence[str] = DEFAULT
    blend: BlendSettings = field(default_factory=BlendSettings)
    limit: int = 200
    seed: int = 0
    kinds: tuple[str, ...] | None = None
    preparation: Preparation = field(default_factory=Preparation)
    demo_chunks: int | None = None


@dataclass(frozen=True)
class EvalResult:
    """Holds the results of a run.

    Attributes:
        settings: All settings that the answers depend on, ``files`` with their hashes included, and the number of
            questions.
        worst_of: The method whose disagreements with full recompute are shown: the blend, or another method if the
            blend has no disagreements. None if every answer agrees, or full recompute is not among the methods.
    """

    settings: dict[str, Any]
    labels: dict[str, str]
    summary: dict[str, Any]
    worst_of: str | None
    worst: list[dict[str, Any]]
    skipped: list[Skipped]
    machine: dict[str, Any]
    rows: list[Row]
    answers_file: Path | None

    def as_json(self) -> dict[str, Any]:
        """Return everything but the answers, which are in their file."""
        return {
            "settings": self.settings,
            **self.summary,
            "labels": self.labels,
            "worst_of": self.worst_of,
            "worst": self.worst,
            "skipped": [asdict(row) for row in self.skipped],
            "machine": self.machine,
            "answers_file": None if self.answers_file is None else str(self.answers_file),
        }


def evaluate(
    engine: BlendEngine, settings: EvalSettings, out: Path | None = None, progress: Progress | None = None
) -> EvalResult:
    """Answer the data set by every method and summarise the answers.

    Args:
        engine: The model, on this machine; its parity gate must have passed. Its header is set to the data set's
            header; a vLLM engine must have been started with that header (:func:`header_of`).
        settings: Settings of the evaluation.
        out: Directory for the answers. The file's name contains data set and a hash of the settings, and a later run
            with the same settings resumes from the file. None holds the answers in memory.
        progress: Called with the number of samples done, their total, and the current sample.

    Raises:
        ModelError: The model is not blended, so that every method would be the same prefill; or the model runs
            elsewhere.
        InputError: The data set or a setting cannot be used.
    """
    if not engine.gate.passed:
        raise ModelError(f"This model is not blended, so there is nothing to compare: {engine.gate.reason}.")
    if engine.device is None or engine.dtype is None:
        raise ModelError("Only a model that runs here can be evaluated: what a server computes on is not known.")
    methods = make_methods(settings.methods, settings.blend, engine.profile, engine.num_layers)
    rank_for(engine, *(method.settings for method in methods if isinstance(method, SettingsMethod)))
    data = _load(settings, engine.tokenizer, settings.limit)
    set_header(engine, data.samples)
    settled = identify_run(engine, settings, data.files, data.samples[0].instruction)
    file = None
    if out is not None:
        digest = hashlib.sha256(json.dumps(settled, sort_keys=True).encode()).hexdigest()[:8]
        name = Path(settings.dataset).stem
        file = out / f"answers-{name}-{digest}.jsonl"
    with AnswersFile(file, settled) as answers:
        preparer = Preparer(engine, settings.preparation)
        answered = answer_all(engine, preparer, data.samples, methods, answers, progress)
    rows = answered.rows
    compared = sorted((m.name for m in methods if m.name != "full"), key=lambda name: name != "blend")
    worst_of, worst = find_worst(rows, compared)
    source = next(iter(data.files), settings.dataset)
    unasked = [Skipped(source, sample.where or sample.id, why) for sample, why in answered.skipped]
    return EvalResult(
        settings={**settled, "limit": settings.limit, "questions": len({row["id"] for row in rows})},
        labels={method.name: method.label for method in methods},
        summary=summarize(rows),
        worst_of=worst_of,
        worst=worst,
        skipped=[*data.skipped, *unasked],
        machine=describe_machine(engine.device),
        rows=rows,
        answers_file=file,
    )


def header_of(settings: EvalSettings, tokenizer: Any) -> str:
    """Return the header text that an engine must be started with for this evaluation; raises as :func:`evaluate` does."""
    return header_text(tokenizer, _load(settings, tokenizer, 1).samples)


def _load(settings: EvalSettings, tokenizer: Any, limit: int) -> DataSet:
    return load_data_set(
        settings.dataset,
        settings.data,
        limit,
        settings.seed,
        tokenizer,
        kinds=settings.kinds,
        chunks=settings.demo_chunks or settings.preparation.k,
        chunk_tokens=settings.preparation.chunk_tokens,
    )


def identify_run(
    engine: BlendEngine, settings: EvalSettings, files: Mapping[str, str], instruction: str | None
) -> dict[str, Any]:
    """Return, for JSON, all that answers depend on besides sample and method (a method's key holds its own settings)."""
    return {
        "model": engine.fingerprint.name,
        "fingerprint": engine.fingerprint.digest,
        "writer": None if engine.writer is None else engine.writer.digest,
        "tokenizer": _hash_tokenizer(engine.tokenizer),
        "engine": type(engine).__name__,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "device": str(engine.device),
        "threads": torch.get_num_threads(),
        "dataset": settings.dataset,
        "files": dict(files),
        "seed": settings.seed,
        "demo_chunks": settings.demo_chunks,
        "kinds": settings.kinds,
        "instruction": instruction,
        "profile": {
            "check_layers": list(engine.profile.check_layers),
            "widths": list(engine.profile.widths),
        },
        # The ratio "auto" depends on the profile, which no method's key contains.
        **({"text": str(engine.profile)} if settings.blend.ratio == "auto" else {}),
        **asdict(settings.preparation),
        "retriever": _hash_retriever(settings.preparation.query_encoder),
    }


def _hash_tokenizer(tokenizer: Any) -> str:
    """Return a hash of the tokenizer's rules and chat template, which the model's fingerprint does not cover."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())
    for state in ("truncation", "padding"):  # changed by use
        rules.pop(state, None)
    text = json.dumps([rules, getattr(tokenizer, "chat_template", None)], sort_keys=True)
    return f"xxh3_128:{xxhash.xxh3_128_hexdigest(text.encode())}"


def _hash_retriever(directory: str | None) -> str | None:
    """Return a hash of a retriever's files, because a later tuning may have replaced the files in the same directory."""
    if directory is None:
        return None
    state = xxhash.xxh3_128()
    for file in sorted(each for each in Path(directory).rglob("*") if each.is_file()):
        state.update(file.relative_to(directory).as_posix().encode())
        state.update(file.read_bytes())
    return f"xxh3_128:{state.hexdigest()}"
