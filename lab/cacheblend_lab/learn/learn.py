"""Trains a writer from end to end: reads texts, lets the model answer, trains, and saves only an improved writer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any, Final

import torch
from transformers import DynamicCache

from cacheblend_lab.learn.adapter import load_writing_copy, save_writer, writing_copy
from cacheblend_lab.learn.blend import BatchBlender, Lesson
from cacheblend_lab.learn.corpus import LearnCorpus, LearnTexts, read_corpus, with_answers
from cacheblend_lab.learn.draws import Draws, DrawSettings
from cacheblend_lab.learn.products import hold_narrow
from cacheblend_lab.learn.training import LearnSettings, Say, Trained, Training
from cacheblend_lab.tuning.saving import check_free, put_in_place, unfinished
from cacheblend_rag import __version__
from cacheblend_rag.blending.rope import NotRotaryError
from cacheblend_rag.calibrate.measure import describe_machine
from cacheblend_rag.engines.models import end_tokens, why_not_blendable
from cacheblend_rag.engines.transformers.owner import LoadedModel, device_named, load_model
from cacheblend_rag.engines.writer import KVWriter
from cacheblend_rag.errors import ModelError
from cacheblend_rag.homes import from_home


@torch.no_grad()
def greedy(
    model: Any, prompts: Sequence[Sequence[int]], tokens: int, ends: frozenset[int], batch_tokens: int
) -> list[tuple[int, ...]]:
    """Return a causal LM's greedy answers of at most ``tokens`` tokens; an answer includes its end token, if generated.

    A batch has at most ``batch_tokens`` tokens of prompts and answers, padding included, but at least one prompt.
    """
    found: list[tuple[int, ...]] = [()] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]), reverse=True)
    at = 0
    while at < len(order):
        width = len(prompts[order[at]])
        numbers = order[at : at + max(1, batch_tokens // (width + tokens))]
        rows = [prompts[number] for number in numbers]
        ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=model.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
        # Override models' own generation settings: sampling, repetition penalties, caches limited to a window.
        out = model.generate(
            ids,
            attention_mask=mask,
            past_key_values=DynamicCache(),
            max_new_tokens=tokens,
            do_sample=False,
            repetition_penalty=1.0,
            temperature=None,
            top_p=None,
            top_k=None,
            eos_token_id=sorted(ends) or None,
            pad_token_id=0,
        )[:, width:].tolist()
        for number, answer in zip(numbers, out, strict=True):
            end = next((i + 1 for i, token in enumerate(answer) if token in ends), len(answer))
            found[number] = tuple(answer[:end])
        at += len(numbers)
    return found


_ANSWER_TOKENS: Final = 24
_CONTEXT: Final = 768
# By device: tokens of a prompt, tokens of a batch, questions to answer, requests to generate, batches of a check.
_SIZES: Final = {"cuda": (4096, 16384, 6000, 2500, 8), "cpu": (1536, 1536, 0, 200, 8)}


@dataclass(frozen=True)
class Sizes:
    """Holds the sizes of a training run; None takes the default of the device.

    Attributes:
        answers: Questions that the model answers itself before training; other questions keep their answers.
        requests: Questions to generate about documents.
        looked: Held-out batches of a check.
    """

    prompt_tokens: int | None = None
    batch_tokens: int | None = None
    answers: int | None = None
    requests: int | None = None
    looked: int | None = None

    def on(self, device: torch.device) -> tuple[int, int, int, int, int]:
        """Return all sizes in order, with the defaults of the device filled in."""
        usual = _SIZES["cuda" if device.type == "cuda" else "cpu"]
        given = self.prompt_tokens, self.batch_tokens, self.answers, self.requests, self.looked
        found = [own if own is not None else default for own, default in zip(given, usual, strict=True)]
        return found[0], found[1], found[2], found[3], found[4]


def learn(
    model: Any,
    output: Path,
    documents: Sequence[Path | str],
    questions: Sequence[Path | str] = (),
    settings: LearnSettings | None = None,
    sizes: Sizes | None = None,
    *,
    tokenizer: Any = None,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    start: Path | None = None,
    note: str = "",
    say: Say | None = None,
) -> tuple[Trained, Path | None]:
    """Train a writer for a model; the model does not change.

    Args:
        model: A directory, a hub name, a loaded model, or None for the bundled model.
        output: A new directory for the writer. A file beside the directory holds the state of an interrupted run.
        documents: Files and directories of documents.
        questions: Files of questions with their passages.
        settings: Settings of the training; None trains for half an hour.
        sizes: Sizes of prompts, batches and texts.
        tokenizer: Tokenizer of a loaded model.
        device: Torch's name of the device.
        dtype: Data type of the model's computation; None takes bf16 on a GPU, fp32 on a CPU.
        start: Directory of a writer of the model to continue from; None begins with a new LoRA that has no effect.
        note: Text about the documents for the writer's card, such as licences.
        say: Called with lines that report progress.

    Returns:
        The training's result, and the writer's directory, which is None if the writer is not better and was not saved.

    Raises:
        InputError: There is too little text, the output exists already, a setting is invalid, or ``start`` holds no
            writer.
        ModelError: The model cannot be loaded or blended.
    """
    settings, say = settings or LearnSettings(minutes=30), say or (lambda line: None)
    check_free(output := from_home(output))
    place = device_named(device)
    loaded = load_model(model, tokenizer, place, dtype or (torch.bfloat16 if place.type == "cuda" else None))
    if loaded.directory is not None:  # a model that the caller gave stays as it is
        hold_narrow(loaded.model)
    lesson, settings, origin = _lesson(loaded, start, settings)
    prompt_tokens, batch_tokens, answers, requests, looked = (sizes or Sizes()).on(place)
    window = int(getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None) or 1 << 20)
    draw = DrawSettings(min(prompt_tokens, window), batch_tokens, seed=settings.seed)
    corpus = read_corpus(loaded.tokenizer, documents, questions, settings.seed, requests, say)
    corpus = _answered(loaded, corpus, answers, batch_tokens, settings.seed, say)
    drawn = [Draws(corpus, draw, place, held_out) for held_out in (False, True)]
    state = output.with_name(f"{output.name}.training.pt")
    output.parent.mkdir(parents=True, exist_ok=True)
    trained = Training(lesson, drawn[0], drawn[1], settings, state, say, looked, origin).run()
    better = trained.best is not None and trained.share(trained.best) < 1
    if better:
        with unfinished(output) as directory:
            card = card_of(loaded, corpus, settings, draw, trained, place, note, start)
            save_writer(lesson.writing, directory, loaded.fingerprint, card)
            put_in_place(directory, output)
    state.unlink(missing_ok=True)
    return trained, output if better else None


def _blender(loaded: LoadedModel) -> BatchBlender:
    why = why_not_blendable(loaded.model.config.get_text_config())
    try:
        if why is None:
            return BatchBlender(loaded.model)
    except NotRotaryError as error:
        why = str(error)
    raise ModelError(f"{loaded.fingerprint.name} cannot be blended, so there is no writer for it: {why}.")


def _lesson(
    loaded: LoadedModel, start: Path | None, settings: LearnSettings
) -> tuple[Lesson, LearnSettings, dict[str, Any]]:
    """Return the lesson, the settings (with the rank of the writer in ``start``, if given), and the origin."""
    blender, origin = _blender(loaded), {"model": loaded.fingerprint.digest}
    if start is None:
        return Lesson(blender, writing_copy(loaded.model, settings.rank, settings.seed)), settings, origin
    origin["start"] = KVWriter.read(start, loaded.fingerprint, loaded.directory).name.digest
    writing = load_writing_copy(loaded.model, start)
    return Lesson(blender, writing), replace(settings, rank=writing.peft_config["default"].r), origin


def _answered(
    loaded: LoadedModel, corpus: LearnCorpus, most: int, batch_tokens: int, seed: int, say: Say
) -> LearnCorpus:
    """Let the model answer up to ``most`` training and ``most`` / 4 held-out questions from part of their passages."""
    ends = end_tokens(loaded.model.config, getattr(loaded.model, "generation_config", None), loaded.tokenizer)
    random = Random(seed)
    found = []
    if not most:
        return corpus
    for texts, share in ((corpus.train, 1.0), (corpus.held_out, 0.25)):
        numbers = random.sample(range(len(texts.asked)), min(len(texts.asked), round(most * share)))
        found.append(
            with_answers(texts, _answers(loaded.model, corpus, texts, numbers, ends, 8 * batch_tokens, random))
        )
        say(f"{len(numbers):,} questions answered by the model itself")
    return replace(corpus, train=found[0], held_out=found[1])


def _answers(
    model: Any,
    corpus: LearnCorpus,
    texts: LearnTexts,
    numbers: Sequence[int],
    ends: frozenset[int],
    batch_tokens: int,
    random: Random,
) -> dict[int, tuple[int, ...]]:
    prompts = []
    for number in numbers:
        asked = texts.asked[number]
        prompt = list(random.choice(corpus.headers))
        for passage in random.sample(asked.passages, len(asked.passages)):
            prompt += [*passage[: max(0, _CONTEXT - len(prompt))], *corpus.separator]
        prompts.append([*prompt[: -len(corpus.separator) or None], *asked.ids])
    return dict(zip(numbers, greedy(model, prompts, _ANSWER_TOKENS, ends, batch_tokens), strict=True))


def card_of(
    loaded: LoadedModel,
    corpus: LearnCorpus,
    settings: LearnSettings,
    draw: DrawSettings,
    trained: Trained,
    device: torch.device,
    note: str,
    start: Path | None,
) -> dict[str, Any]:
    """Return the card for `writer.json`: texts, settings and results of the training."""
    best = trained.best
    assert best is not None
    return {
        "model": Path(loaded.fingerprint.name).name,
        "texts": corpus.about,
        "licences": note,
        "held_out_kl": {
            f"{ratio:g}": {"before": before, "after": after}
            for ratio, before, after in zip(settings.ratios, trained.before, best.kl, strict=True)
        },
        "steps": best.step,
        "seconds": round(best.seconds, 1),
        "prompts": trained.prompts,
        "tokens": trained.tokens,
        "stopped": trained.stopped,
        "curve": [asdict(point) for point in trained.curve],
        "settings": {**asdict(settings), **asdict(draw)},
        "machine": describe_machine(device),
        "versions": {"cacheblend-rag": __version__, "peft": version("peft")},
        **({} if start is None else {"started_from": KVWriter.read(start).card}),
    }
