"""Writes the model card of the bundled model from an evaluation's real output."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from training.export import TRAINING_COMMAND

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
    """Write the model card.

    Args:
        path: The card's file.
        plain: Result of `evaluate.table` on documents alone.
        interludes: Result of `evaluate.table` on contexts with interludes.
        facts: Result of `evaluate.fingerprint`.
        command: The command that measured the table.
        note: A remark on the origin of the weights.
    """
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
