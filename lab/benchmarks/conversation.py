"""Measures ten turns of a conversation, each with new notes: computed tokens and the time to first token.

python lab/benchmarks/conversation.py [--engine vllm] [--turns 10] [--chunks 2] [--ratio R]

The prompts are answered turn by turn in three ways: ``kept`` uses the engine's prefix cache; ``forgotten`` empties the
prefix cache before each question; ``full`` is a full prefill. As with an agent, a prompt holds all earlier messages
with their notes, and the new question at the end. The bundled model decodes greedily; all times come from one process.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median
from typing import Any

from cacheblend_rag import (
    BlendEngine,
    BlendPrompt,
    BlendSettings,
    Chunk,
    Generation,
    SamplingParams,
    TransformersEngine,
    VLLMEngine,
    bundled_corpus,
    chat_prompt,
    split_text,
)

WAYS = ("kept", "forgotten", "full")
SHORT = SamplingParams(max_tokens=24)


def prompts_of(
    engine: BlendEngine, notes: Sequence[Chunk], blend: BlendSettings, turns: int, chunks: int
) -> list[BlendPrompt]:
    """Return the prompt of each turn; the model generates the answers in between."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Answer from the notes."}]
    prompts = []
    for turn in range(turns):
        new = "\n\n".join(note.text for note in notes[turn * chunks : (turn + 1) * chunks])
        messages.append({"role": "user", "content": f"{new}\n\nQuestion: Who is named in note {turn + 1}?"})
        prompts.append(chat_prompt(engine.tokenizer, messages, engine.registry))
        messages.append({"role": "assistant", "content": engine.generate(prompts[-1], SHORT, blend).text})
    return prompts


def talk(engine: BlendEngine, way: str, prompts: Sequence[BlendPrompt], blend: BlendSettings) -> list[Generation]:
    """Answer a conversation's prompts in order, and return the answers."""
    engine.reset_prefix_cache()
    done = []
    for prompt in prompts:
        if way == "forgotten":
            engine.reset_prefix_cache()
        done.append(engine.generate(prompt, SHORT, BlendSettings(quality="full") if way == "full" else blend))
    return done


def show(answers: dict[str, list[list[Generation]]]) -> None:
    """Print the computed tokens and time ratios of each way, turn by turn; times are medians over the rounds."""
    ttft = {
        way: [median(turn.timings.ttft_s for turn in turns) for turns in zip(*rounds, strict=True)]
        for way, rounds in answers.items()
    }
    print(
        "turn  prompt  computed: " + "  ".join(f"{way:>9}" for way in WAYS) + "   full / kept  full / forgotten  (time)"
    )
    for turn, prompt in enumerate(answers["kept"][0]):
        computed = "  ".join(f"{answers[way][0][turn].usage.computed_tokens:9}" for way in WAYS)
        times = "  ".join(f"{ttft['full'][turn] / ttft[way][turn]:12.1f}" for way in WAYS[:2])
        print(f"{turn + 1:4}  {prompt.usage.prompt_tokens:6}            {computed}  {times}")
    for way in WAYS[:2]:
        pairs = zip(answers[way][0], answers["full"][0], strict=True)
        same = [_agreeing(mine.token_ids, whole.token_ids) for mine, whole in pairs]
        print(f"{way}: {sum(same) / len(same):.0%} of the full prefill's tokens before the first that differs")


def _agreeing(mine: Sequence[int], wanted: Sequence[int]) -> float:
    """Return the length of the common prefix, as a share of ``wanted``."""
    same = next(
        (at for at, (a, b) in enumerate(zip(mine, wanted, strict=False)) if a != b), min(len(mine), len(wanted))
    )
    return same / len(wanted) if wanted else 1.0


def main() -> None:
    """Measure and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--chunks", type=int, default=2, help="new chunks of each turn")
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with VLLMEngine() if options.engine == "vllm" else TransformersEngine() as engine:
        text = "\n\n".join(file.read_text(encoding="utf-8") for file in sorted(bundled_corpus().iterdir()))
        notes = split_text(text, engine.tokenizer, options.chunk_tokens)[: options.turns * options.chunks]
        engine.precompute(notes)
        blend = BlendSettings(options.ratio)
        prompts = prompts_of(engine, notes, blend, options.turns, options.chunks)
        rounds = {way: [talk(engine, way, prompts, blend) for _ in range(options.rounds)] for way in WAYS}
        show(rounds)


if __name__ == "__main__":
    main()
