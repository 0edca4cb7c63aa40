"""Evaluates the bundled model on held-out names: `python -m training.evaluate`.

The table shows exact match of whole answers under full recompute, full KV reuse and blends with different check layers
and ratios, pooled over seeds, with 95% intervals that treat the questions of one context as one group.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any, Final

import torch
from tokenizers import Tokenizer

from cacheblend_lab.fiction.questions import QUESTION_KINDS
from cacheblend_lab.fiction.world import FictionContext, sample_context
from cacheblend_lab.intervals import share_interval
from training.batches import Encoder
from training.blending import Prompt, answers_match, blend, place_chunks, prefill
from training.export import TRAINING_COMMAND, fingerprint, load_exported
from training.tokenizer import BOS, EOS, NATIVE
from training.train import MODEL_FOLDER

_CARD = """# The bundled demo model

A small Llama trained from scratch on generated, fictional documents. It answers short questions about people,
companies, observatories and ships from the chunks in its prompt, for names it never saw in training. It knows nothing
else: it exists so that the library can be tried, tested and measured without a download.

- Shape: {shape}
- Prompt: `<bos>Answer from the notes.\\n\\n{{chunk}}\\n\\n{{chunk}}\\n\\nQuestion: {{question}}\\nAnswer:`, with as
  many chunks as fit; answer: ` {{answer}}<eos>`. The chat template renders a system and a user message to the
  same text. An answer names first what has to be found first: `Mira Halwick, Aberport` for a question about the founder of a
  company, `the Silver Heron, 1911` for one about a nickname, `A, 1911; B, 1932: A` for one about which of two came first.
- Trained by `{training}` {origin}: seed {seed}, {steps} steps and {tokens} tokens in all{averaged}; `make demo-model` begins from
  scratch.{note}
- Weights: `model.safetensors`, bf16, xxh3-128 `{digest}`.
- Licence: Apache-2.0, as the project.

## Quality

Held-out names, prompts of six chunks of at most 512 tokens, exact match of the whole answer, greedy decoding, pooled over
seeds, with 95% intervals for questions that share contexts. Written by `{command}`.

`cross` and `two-hop-cross` need a fact whose name stands in an earlier chunk; an `alias` question uses a nickname. "Main kinds"
are the first four. Contexts of documents alone:

{plain}

Contexts with lists, units and facts told of a nickname between the documents. `nickname` needs an earlier chunk to tell whom
the nickname means, `table` the title of the list whose row the fact is, `unit` what its number is counted by; a `comparison`
asks which of two years is earlier:

{interludes}
"""


def write_card(
    path: Path, plain: str, interludes: str, facts: Mapping[str, str], command: str, *, note: str = ""
) -> None:
    """Write the model card."""
    text = _CARD.format(
        shape=facts["shape"],
        # Weights without an origin are older than the present training module, and were trained from scratch.
        training=facts["training"] if "origin" in facts else TRAINING_COMMAND,
        origin=facts.get("origin", "from scratch"),
        seed=facts["seed"],
        steps=facts["steps"],
        tokens=f"{int(facts['tokens']):,}",
        averaged=f", then averaged with {facts['averaged']}" if "averaged" in facts else "",
        digest=facts["xxh3_128"],
        command=command,
        note=f" {note}" if note else "",
        plain=plain,
        interludes=interludes,
    )
    path.write_text(text, encoding="utf-8")


REUSE: Final = {"check": 0, "ratio": 0.0}
METHODS: Final[dict[str, dict[str, Any] | None]] = {
    "full recompute": None,
    "full KV reuse": REUSE,
    "blend 15%, check layer 2": {"check": 2, "ratio": 0.15},
    "blend 5%, check layer 2": {"check": 2, "ratio": 0.05},
    "blend 2%, check layer 2": {"check": 2, "ratio": 0.02},
    "blend 5%, check layer 1": {"check": 1, "ratio": 0.05},
    "blend 5%, check layer 5": {"check": 5, "ratio": 0.05},
    "random 5%, from layer 2": {"check": 2, "ratio": 0.05, "score": "random"},
    "oracle 5%, from layer 2": {"check": 2, "ratio": 0.05, "score": "oracle"},
}
QUICK: Final = ("full recompute", "full KV reuse", "blend 15%, check layer 2", "blend 2%, check layer 2")
MAIN_KINDS: Final = ("single", "cross", "two_hop", "two_hop_cross")

Counts = dict[str, dict[str, list[tuple[str, bool]]]]
"""Method -> question kind -> one entry per question: the name of its context, and whether the answer is right."""


def held_out_contexts(
    seed: int,
    contexts: int,
    encoder: Encoder,
    *,
    chunk_tokens: int = 512,
    interludes: bool = False,
) -> Iterator[tuple[str, FictionContext]]:
    """Yield pairs of a unique name and a context with held-out names; equal seeds give equal contexts."""
    rng = Random(f"evaluation:{seed}:{chunk_tokens}:False")  # as of the shipped card
    for number in range(contexts):
        yield (
            f"{seed}-{number}",
            sample_context(
                rng,
                encoder.count,
                chunk_tokens=chunk_tokens,
                questions=32,
                held_out=True,
                interludes=interludes,
            ),
        )


@torch.no_grad()
def evaluate(
    folder: Path,
    *,
    seeds: Sequence[int],
    contexts: int,
    methods: Sequence[str],
    chunk_tokens: int,
    interludes: bool = False,
) -> Counts:
    """Answer the questions of `contexts` contexts per seed by each method; return which answers are right."""
    model = load_exported(folder)
    encoder = Encoder(Tokenizer.from_file(str(folder / "tokenizer.json")))
    torch.manual_seed(seeds[0])
    results: Counts = {name: defaultdict(list) for name in methods}
    how: dict[str, Any] = {"chunk_tokens": chunk_tokens, "interludes": interludes}
    drawn = (held_out_contexts(seed, contexts, encoder, **how) for seed in seeds)
    for group, context in chain.from_iterable(drawn):
        chunks = tuple(encoder.encode(text) for text in context.chunk_texts)
        prompt = Prompt((BOS, *encoder.encode(NATIVE.opening)), chunks, encoder.encode(NATIVE.separator))
        questions = [
            (
                (*encoder.encode(NATIVE.closing), *encoder.encode(NATIVE.question.format(q=question.text))),
                (*encoder.encode(question.answer), EOS),
            )
            for question in context.questions
        ]
        full, placed = prefill(model, prompt.ids), place_chunks(model, prompt)
        for name in methods:
            settings = METHODS[name]
            cache = full if settings is None else blend(model, prompt, placed, full=full, **settings)
            for question, right in zip(context.questions, answers_match(model, cache, questions), strict=True):
                results[name][question.kind].append((group, right))
    return results


def table(results: Counts) -> str:
    """Return the results as a Markdown table of percentages with 95% intervals; "main kinds" pools the first four."""
    first = next(iter(results.values()))
    asked = [kind for kind in QUESTION_KINDS if first[kind]]
    rows = [["exact match, %", *(kind.replace("_", "-") for kind in asked), "main kinds"]]
    rows.append(["---"] * len(rows[0]))
    counts = [len(first[kind]) for kind in asked]
    rows.append(["questions", *map(str, counts), str(sum(len(first[kind]) for kind in MAIN_KINDS))])
    for name, kinds in results.items():
        groups = [kinds[kind] for kind in asked] + [[answer for kind in MAIN_KINDS for answer in kinds[kind]]]
        rows.append([name, *map(_share, groups)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _share(answers: Sequence[tuple[str, bool]]) -> str:
    if not answers:
        return "-"
    values = [float(right) for _, right in answers]
    low, high = share_interval(values, [group for group, _ in answers])
    return f"{100 * sum(values) / len(values):.1f} ({100 * low:.1f}-{100 * high:.1f})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Evaluate the model and print the table; with --card, write the table into the model card."""
    parser = argparse.ArgumentParser(description="Evaluate the bundled demo model.")
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER)
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], help="draw contexts by each of these, and pool them"
    )
    parser.add_argument(
        "--contexts", type=int, default=24, help="contexts of six chunks a seed, up to 32 questions each"
    )
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument(
        "--interludes", action="store_true", help="contexts with lists, units and nicknames, and questions about them"
    )
    parser.add_argument("--quick", action="store_true", help="four methods only")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--card", action="store_true", help="write the model card")
    parser.add_argument("--note", default="", help="remark for the model card on how the weights came about")
    options = parser.parse_args(arguments)
    if options.card and (options.quick or options.interludes or options.chunk_tokens != 512):
        parser.error(
            "the model card shows every method at 6 x 512 tokens in both kinds of contexts: leave the others out"
        )
    torch.set_num_threads(options.threads)
    methods = QUICK if options.quick else tuple(METHODS)

    def measure(interludes: bool) -> str:
        results = evaluate(
            options.model,
            seeds=options.seeds,
            contexts=options.contexts,
            methods=methods,
            chunk_tokens=options.chunk_tokens,
            interludes=interludes,
        )
        text = table(results)
        sys.stdout.write(text + "\n")
        return text

    shown = measure(options.interludes)
    if options.card:
        seeds = " ".join(map(str, options.seeds))
        command = f"python -m training.evaluate --contexts {options.contexts} --seeds {seeds} --card"
        facts = fingerprint(options.model)
        write_card(options.model / "README.md", shown, measure(True), facts, command, note=options.note)


if __name__ == "__main__":
    main()
