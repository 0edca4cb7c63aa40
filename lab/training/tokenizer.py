"""Trains the bundled model's tokenizer: BPE in which a word has equal tokens at every place.

A word at a text's start, after a line break and after a space gets the same leading marker, so texts can be tokenised
separately and their ids concatenated. Every line break is a token of its own. Text outside the vocabulary falls back to
bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any, Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from cacheblend_lab.fiction import names, words
from cacheblend_lab.fiction.world import sample_context
from training import skeletons

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
        yield from skeletons.all_texts()
    every = [*COMMON_WORDS, *words.SURNAMES, *words.TOWNS, *words.WOMEN, *words.MEN]
    for group in (words.COMPANY_WORDS, words.SHIP_FIRST, words.SHIP_SECOND, words.NICK_FIRST, words.NICK_SECOND):
        every += group
    for values in words.VALUES.values():
        every += values
    every += [name.capitalize() for name in COMMON_WORDS[:FREQUENT]]
    for _ in range(120):
        yield " ".join(every)
    # Invented names add their syllables to the vocabulary.
    maker = names.NameMaker(rng, held_out=False)
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
