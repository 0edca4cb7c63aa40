"""Trains the bundled model's tokenizer (BPE in which a word has equal tokens at every place), and draws prompt skeletons.

A word at a text's start, after a line break and after a space gets the same leading marker, so texts can be tokenised
separately and their ids concatenated. Every line break is a token of its own. Text outside the vocabulary falls back to
bytes. Skeletons are the texts around chunks and questions in training: the native prompt's, and those of other
frameworks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any, Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from cacheblend_lab.fiction import words
from cacheblend_lab.fiction.entities import NameMaker
from cacheblend_lab.fiction.world import sample_context

NATIVE_INSTRUCTION: Final = "Answer from the notes."


@dataclass(frozen=True)
class Skeleton:
    """Holds the text pieces of one prompt; each piece is tokenised separately.

    Attributes:
        opening: Text before the first chunk.
        label: Text in front of every chunk, with the slot `{n}`.
        separator: Text between two chunks.
        closing: Text between the last chunk and the first question.
        question: Text of a question, with the slot `{q}`, up to the answer.
        between: Text between an answer's `<eos>` and the next question.
    """

    opening: str = NATIVE_INSTRUCTION + "\n\n"
    label: str = ""
    separator: str = "\n\n"
    closing: str = "\n\n"
    question: str = "Question: {q}\nAnswer:"
    between: str = "\n\n"


NATIVE: Final = Skeleton()

_INSTRUCTIONS: Final = (
    "",
    "Answer the question from the documents below.",
    "Answer the question.",
    "Use the notes below to answer the question at the end.",
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer with a few words from the given text.",
    "Read the documents and answer shortly.",
    "Use only the following pieces of context to answer the question.",
    "Here are some notes.",
    "Documents:",
    "Context:",
    "Reply with the answer only.",
)
_LABELS: Final = ("[{n}] ", "Document {n}:\n", "Note {n}: ", "[Document {n}]\n", "Source {n}\n\n", "- ")
_QUESTIONS: Final = (
    "Question: {q}\nAnswer:",
    "{q}\nAnswer:",
    "Query: {q}\nAnswer:",
    "Question: {q}\n\nAnswer:",
    "Q: {q}\nAnswer:",
    "Question: {q} Answer:",
    "Query: {q}\nAnswer: ",
    "User question: {q}\nAnswer:",
)
_RULE: Final = "---------------------"
_CONTEXT_OPENING: Final = f"Context information is below.\n{_RULE}\n"
_CONTEXT_CLOSING: Final = (
    f"\n{_RULE}\nGiven the context information and not prior knowledge, answer the query.\n",
    f"\n{_RULE}\nUse the context information to answer the query.\n",
)


def sample_skeleton(rng: Random, native_share: float = 0.6) -> Skeleton:
    """Draw a skeleton; it is the native skeleton with probability `native_share`."""
    draw = rng.random()
    if draw < native_share:
        return NATIVE
    if draw < native_share + (1 - native_share) * 0.25:
        opening = rng.choice(("", "You are a helpful assistant.\n\n")) + _CONTEXT_OPENING
        question = "Query: {q}\nAnswer:" + rng.choice(("", " "))
        return Skeleton(opening, "", "\n\n", rng.choice(_CONTEXT_CLOSING), question, "\n\n")
    instruction = rng.choice(_INSTRUCTIONS)
    gap = rng.choice(("\n\n", "\n\n", "\n", " "))
    label = rng.choice(_LABELS) if rng.random() < 0.3 else ""
    separator = rng.choice(("\n\n", "\n\n", "\n", "\n\n\n", "\n---\n", " "))
    return Skeleton(
        instruction + gap if instruction else "",
        label,
        separator,
        rng.choice(("\n\n", "\n\n", "\n", "\n\n\n")),
        rng.choice(_QUESTIONS),
        rng.choice(("\n\n", "\n")),
    )


def all_texts() -> list[str]:
    """Return all fixed texts of skeletons, for the tokenizer's training."""
    return [
        NATIVE_INSTRUCTION,
        *_INSTRUCTIONS,
        *_LABELS,
        *_QUESTIONS,
        _CONTEXT_OPENING,
        *_CONTEXT_CLOSING,
        "1 2 3 4 5 6 7 8 9",
    ]


FREQUENT: Final = 260
"""Number of the list's first words that get a token for their capitalised form, too."""

COMMON_WORDS: Final = tuple((files(__package__) / "common_words.txt").read_text(encoding="utf-8").split())

PAD, BOS, EOS = 0, 1, 2
SPECIAL_TOKENS: Final = ("<pad>", "<bos>", "<eos>")
_MARK: Final = "▁"
_LETTERS: Final = "".join(chr(code) for code in range(33, 127)) + "äöüßéèêáàåæøñçÄÖÜÉ–—’‘“”…•€£°"

CHAT_TEMPLATE: Final = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{{- ' ' + message['content'] + eos_token + '\\n\\n' -}}"
    "{%- elif message['role'] == 'system' -%}"
    "{{- message['content'] + '\\n\\n' -}}"
    "{%- else -%}"
    "{{- message['content'] -}}"
    "{%- set answering = not loop.last or add_generation_prompt -%}"
    "{%- if answering and not message['content'].rstrip().endswith('Answer:') -%}"
    "{{- '\\nAnswer:' -}}"
    "{%- endif -%}"
    "{%- endif -%}"
    "{%- endfor -%}"
)


def _texts(seed: int, contexts: int) -> Iterator[str]:
    rng = Random(seed)
    for index in range(contexts):
        context = sample_context(
            rng, lambda text: len(text.split()) + 2, chunk_tokens=256, questions=40, held_out=index % 4 == 0
        )
        yield "\n\n".join(context.chunk_texts)
        for question in context.questions:
            yield f"Question: {question.text}\nAnswer: {question.answer}"
    for _ in range(400):
        yield from all_texts()
    every = [*COMMON_WORDS, *words.SURNAMES, *words.TOWNS, *words.WOMEN, *words.MEN]
    for group in (words.COMPANY_WORDS, words.SHIP_FIRST, words.SHIP_SECOND, words.NICK_FIRST, words.NICK_SECOND):
        every += group
    for values in words.VALUES.values():
        every += values
    every += [name.capitalize() for name in COMMON_WORDS[:FREQUENT]]
    for _ in range(120):
        yield " ".join(every)
    # Invented names add their syllables to the vocabulary.
    maker = NameMaker(rng, held_out=False)
    for _ in range(4000):
        yield maker.town()


def build_tokenizer(vocabulary: int = 4608, seed: int = 99, contexts: int = 600) -> Tokenizer:
    """Train the tokenizer on the generator's text and a list of common English words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Metaspace(_MARK, prepend_scheme="always", split=True),
            pre_tokenizers.Split(
                Regex(rf"{_MARK}?\p{{L}}+|{_MARK}?\p{{N}}+|{_MARK}?[^\p{{L}}\p{{N}}{_MARK}]+|{_MARK}"), "isolated"
            ),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - 256,
        min_frequency=3,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=[_MARK, "\n", *_LETTERS],
        limit_alphabet=len(_LETTERS) + 2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed, contexts), trainer)
    return _with_bytes(tokenizer)


def _with_bytes(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer with byte tokens, decoder and `<bos>` rule, which the trainer cannot add."""
    spec: dict[str, Any] = json.loads(tokenizer.to_str())
    vocabulary = spec["model"]["vocab"]
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    spec["model"]["byte_fallback"] = True
    full = Tokenizer.from_str(json.dumps(spec))
    full.decoder = decoders.Sequence(
        [
            decoders.Replace(_MARK, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Replace(Regex(" ?\n ?"), "\n"),
            decoders.Strip(" ", 1, 0),
        ]
    )
    full.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
    )
    return full


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` (with the chat template) to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL_TOKENS[PAD],
        "bos_token": SPECIAL_TOKENS[BOS],
        "eos_token": SPECIAL_TOKENS[EOS],
        "model_max_length": 8192,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
