"""Trains the bundled model from scratch: `python -m training.train`.

Training is data-parallel over CPU processes with averaged gradients. Every random choice depends only on the seed, the
step and the process, so an interrupted run resumes from its last checkpoint with equal batches. The recipe: answers'
cross-entropy, a little text cross-entropy, a binding loss without extra weights (after two layers the tied head must
name the entity of a value, after five layers the information of an earlier sentence: a list's topic, a unit, a
nickname's entity), Muon for matrices, and contexts that grow from one short chunk to six chunks of 512 tokens.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Final

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from cacheblend_lab.fiction.questions import QUESTION_KINDS
from cacheblend_rag.engines.models import bundled_model_directory
from training.batches import (
    ANSWER,
    BIND_LAYER,
    FIND_LAYER,
    LINK_LAYER,
    TEXT,
    VERDICT,
    Batch,
    Encoder,
    collate,
    make_example,
)
from training.export import TRAINING_COMMAND, export, fingerprint, load_exported
from training.model import DemoModel, ModelShape, grow, initialise, rope_table, rotate
from training.tokenizer import EOS, build_tokenizer, save_tokenizer

MODEL_FOLDER: Final = bundled_model_directory()


@dataclass(frozen=True)
class Stage:
    """Describes one stage of the curriculum.

    Attributes:
        shapes: (chunks, tokens per chunk, questions), drawn with equal probability.
        steps: Most steps of the stage.
        tokens: Tokens per step and process.
        gap: Scale of the position gap in a context; 0 for none.
        goal: Answer accuracy (moving average) that ends the stage early; above 1 never.
        lessons: Whether to train exercises in comparing years, and one head on the explanations of nicknames; these
            lessons slow a run from scratch, and help a run that continues a model.
    """

    shapes: tuple[tuple[int, int, int], ...]
    steps: int
    tokens: int = 3072
    gap: float = 2500.0
    goal: float = 2.0
    lessons: bool = False

    @property
    def verdict_weight(self) -> float:
        """Return the weight of `VERDICT` tokens: lower with lessons, whose exercises add many such tokens."""
        return 2.0 if self.lessons else 8.0


CURRICULUM: Final = (
    Stage(((1, 36, 6),), 500, gap=0, goal=0.60),
    Stage(((2, 36, 8), (3, 36, 10)), 400, goal=0.72),
    Stage(((2, 36, 8), (4, 36, 12), (6, 36, 14), (6, 48, 16)), 400, goal=0.78),
    Stage(((6, 36, 14), (6, 64, 24), (6, 128, 36)), 200, gap=2600),
    Stage(((6, 128, 40), (6, 256, 52), (4, 256, 44)), 160, 3700, gap=1600),
    Stage(((6, 512, 64), (6, 512, 64), (6, 512, 64), (6, 256, 56), (8, 512, 64), (3, 512, 60)), 600, 4600, gap=0),
)
CONTINUED: Final = (
    Stage(((6, 64, 26), (4, 64, 20), (3, 64, 16), (6, 128, 40)), 300, 3400, gap=2600, lessons=True),
    Stage(((6, 256, 56), (6, 256, 56), (4, 256, 48), (6, 128, 40)), 150, 4200, gap=1600, lessons=True),
    replace(CURRICULUM[-1], steps=250, lessons=True),
)
"""Curriculum for a model that knows a part of the fictional world: it learns the new part in short contexts first."""
LR_MATRICES, LR_OTHER = 0.01, 4e-3
LR_LONG = 0.6
"""Factor on both learning rates in the last two stages, whose contexts are long."""
TEXT_WEIGHT, BIND_WEIGHT, LINK_WEIGHT, FIND_WEIGHT = 0.15, 0.3, 0.4, 0.3
TEXT_SHARE = 0.5
WARM_UP = 50
DECAY = 0.5
"""Share of the last two stages' steps over which the learning rate falls to zero."""


@dataclass
class Progress:
    """Holds the progress of a run; saved with every checkpoint."""

    step: int = 0
    stage: int = 0
    stage_step: int = 0
    tokens: int = 0
    accuracy: float = 0.0
    seconds: float = 0.0
    started: int = 0  # step at which the optimisers were new


def make_batch(rng: Random, encoder: Encoder, stage: Stage, shape: tuple[int, int, int]) -> Batch:
    """Draw examples of a shape until the stage's tokens per step are used up."""
    chunks, chunk_tokens, questions = shape
    examples: list[Any] = []
    width = 0
    while True:
        gap = stage.gap * rng.random() * 1.5 if rng.random() < 0.7 else 0.0
        example = make_example(
            rng,
            encoder,
            chunks=chunks,
            chunk_tokens=chunk_tokens,
            questions=questions,
            gap=gap,
            lessons=stage.lessons,
        )
        width = max(width, len(example.ids))
        if examples and width * (len(examples) + 1) > stage.tokens:
            return collate(examples)
        if any(mark >= ANSWER for mark in example.loss):
            examples.append(example)


def look_up_loss(model: DemoModel, state: Tensor, batch: Batch) -> Tensor | None:
    """Return the mean of -log(share of attention on the target) for one head of `FIND_LAYER`; None without targets.

    The targets are `batch.find`; `state` is the layer's input.
    """
    if not len(batch.find):
        return None
    queries, keys, _ = model.blocks[FIND_LAYER].qkv(state)
    cos, sin = (part[:, None].to(state.dtype) for part in rope_table(batch.positions[:, :-1], model.shape))
    head = queries.shape[1] - 1
    queries, keys = rotate(queries[:, head:], cos, sin)[:, 0], rotate(keys[:, -1:], cos, sin)[:, 0]
    losses = []
    for row in sorted(set(batch.find[:, 0].tolist())):
        position, start, end = batch.find[batch.find[:, 0] == row][:, 1:].T[..., None]
        place = torch.arange(keys.shape[1])
        scores = (queries[row, position[:, 0]] @ keys[row].T).float() * queries.shape[-1] ** -0.5
        scores = scores.masked_fill(place > position, -torch.inf).log_softmax(-1)
        losses.append(-scores.masked_fill((place < start) | (place >= end), -torch.inf).logsumexp(-1))
    return torch.cat(losses).mean()


def losses(model: DemoModel, batch: Batch, verdict_weight: float) -> tuple[Tensor, dict[str, float]]:
    """Return the training loss and the figures to log."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden, kept = model(batch.ids[:, :-1], batch.positions[:, :-1], (BIND_LAYER, FIND_LAYER, LINK_LAYER))
        marks = batch.loss[:, 1:]
        chosen = (marks >= ANSWER) | ((marks == TEXT) & (torch.rand(marks.shape) < TEXT_SHARE))
        targets, marks = batch.ids[:, 1:][chosen], marks[chosen]
        answers = marks >= ANSWER
        logits = model.logits(hidden[chosen]).float()
        bind = {}
        for layer in (BIND_LAYER, LINK_LAYER):
            rows = batch.bind[batch.bind[:, 2] == layer]
            if len(rows):
                state = kept[layer][rows[:, 0], rows[:, 1]]
                state = F.rms_norm(state, (state.shape[-1],)) * 0.1
                scores = model.logits(state).float().scatter(1, rows[:, 5:7], -torch.inf).log_softmax(-1)
                bind[layer] = scores, rows
        found = look_up_loss(model, kept[FIND_LAYER], batch)
    entropy = F.cross_entropy(logits, targets, reduction="none")
    weights = torch.where(marks == VERDICT, verdict_weight, 1.0)[answers]
    answer_loss, text_loss = (entropy[answers] * weights).sum() / weights.sum(), entropy[~answers].mean()
    total = answer_loss + TEXT_WEIGHT * text_loss
    shown = {"answer": answer_loss.item(), "text": text_loss.item()}
    for layer, (scores, rows) in bind.items():
        loss = -(scores.gather(1, rows[:, 3:4]) + scores.gather(1, rows[:, 4:5])).mean()
        total = total + (BIND_WEIGHT if layer == BIND_LAYER else LINK_WEIGHT) * loss
        shown[f"bind{layer}"] = (scores.argmax(-1, keepdim=True) == rows[:, 3:5]).any(-1).float().mean().item()
    if found is not None:
        total = total + FIND_WEIGHT * found
        shown["find"] = found.item()
    right = (logits.argmax(-1) == targets).float()
    words = answers & (targets != EOS)
    # The accuracy leaves out verdicts: right verdicts in exercises would hide wrong answers to questions.
    shown["accuracy"] = right[words & (marks != VERDICT)].mean().item()
    for index, kind in enumerate((*QUESTION_KINDS, "verdict")):
        asked = words & (marks == ANSWER + index)
        if asked.any():
            shown[kind] = right[asked].mean().item()
    return total, shown


def learning_rate(progress: Progress, curriculum: Sequence[Stage]) -> float:
    """Return the factor on the base rates: warm-up, constant, lower for long contexts, linear decay at the end."""
    factor = min(1.0, (progress.step - progress.started + 1) / WARM_UP)
    tail = curriculum[-2:]
    if progress.stage < len(curriculum) - 2:
        return factor
    done = progress.stage_step + sum(stage.steps for stage in tail[: progress.stage - len(curriculum) + len(tail)])
    left = 1 - done / sum(stage.steps for stage in tail)
    return factor * LR_LONG * min(1.0, max(0.02, left / DECAY))


def _synchronise(parameters: Sequence[Tensor], extra: list[float], processes: int) -> list[float]:
    if processes == 1:
        return extra
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([*(g.flatten() for g in gradients), torch.tensor(extra)])
    dist.all_reduce(flat)
    flat /= processes
    start = 0
    for gradient in gradients:
        gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
        start += gradient.numel()
    return flat[start:].tolist()


def _save(
    path: Path,
    model: DemoModel,
    optimisers: Sequence[torch.optim.Optimizer],
    progress: Progress,
    facts: Mapping[str, str],
) -> None:
    state = {
        "model": model.state_dict(),
        "shape": asdict(model.shape),
        "optimisers": [optimiser.state_dict() for optimiser in optimisers],
        "progress": vars(progress),
        "facts": dict(facts),
    }
    unfinished = path.with_suffix(".tmp")
    torch.save(state, unfinished)
    unfinished.replace(path)


def _restore(path: Path, model: DemoModel, optimisers: Sequence[torch.optim.Optimizer]) -> Progress:
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    for optimiser, state in zip(optimisers, saved["optimisers"], strict=True):
        optimiser.load_state_dict(state)
    return Progress(**saved["progress"])


def shortened(stages: Sequence[Stage], steps: int) -> tuple[Stage, ...]:
    """Return the stages scaled to about `steps` steps in total."""
    whole = sum(stage.steps for stage in stages)
    return tuple(replace(stage, steps=max(1, round(stage.steps * steps / whole))) for stage in stages)


def _take_over(folder: Path, model: DemoModel) -> Progress:
    """Load a finished model's weights into `model`, adding layers as needed."""
    model.load_state_dict(grow(load_exported(folder), model.shape.layers).state_dict())
    before = fingerprint(folder)
    done = int(before["steps"])
    return Progress(done, tokens=int(before["tokens"]), started=done)


def _begin(options: argparse.Namespace, model: DemoModel, optimisers: Sequence[torch.optim.Optimizer]) -> Progress:
    """Start from the run's checkpoint if there is one, else from a finished model if given, else from scratch."""
    latest = options.out / "checkpoint.pt"
    if latest.exists():
        return _restore(latest, model, optimisers)
    return _take_over(options.start_from, model) if options.start_from else Progress()


def _facts(options: argparse.Namespace) -> dict[str, str]:
    """Return the training facts for the model's metadata: command, origin and seed."""
    command, origin = TRAINING_COMMAND, "from scratch"
    if options.start_from:
        digest = fingerprint(options.start_from)["xxh3_128"]
        command += f" --start-from MODEL --steps {options.steps} --rate {options.rate:g}"
        origin = f"from the model with xxh3-128 {digest}"
    return {"training": f"{command} --layers {options.layers}", "origin": origin, "seed": str(options.seed)}


def run(rank: int, options: argparse.Namespace) -> None:
    """Train in one process of the group."""
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    if options.processes > 1:
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{options.port}", rank=rank, world_size=options.processes
        )
    encoder = Encoder(Tokenizer.from_file(str(options.out / "tokenizer.json")))
    model = DemoModel(ModelShape(encoder.size, layers=options.layers))
    initialise(model)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    other = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimisers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=LR_MATRICES, weight_decay=0.01, momentum=0.95),
        torch.optim.AdamW(other, lr=LR_OTHER, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    latest, facts = options.out / "checkpoint.pt", _facts(options)
    curriculum = shortened(CONTINUED, options.steps) if options.start_from else CURRICULUM
    progress = _begin(options, model, optimisers)
    base = [LR_MATRICES * options.rate, LR_OTHER * options.rate]
    log = (options.out / "train.jsonl").open("a", encoding="utf-8") if rank == 0 else None
    clock = time.monotonic()
    while progress.stage < len(curriculum):
        stage = curriculum[progress.stage]
        factor = learning_rate(progress, curriculum)
        for optimiser, rate in zip(optimisers, base, strict=True):
            optimiser.param_groups[0]["lr"] = rate * factor
        torch.manual_seed(options.seed * 1_000_003 + progress.step * 64 + rank)
        # All processes draw one shape, since a step lasts as long as its slowest process.
        sizes = Random(f"{options.seed}:{progress.step}").choice(stage.shapes)
        batch = make_batch(Random(f"{options.seed}:{progress.step}:{rank}"), encoder, stage, sizes)
        total, shown = losses(model, batch, stage.verdict_weight)
        total.backward()  # type: ignore[no-untyped-call]
        (accuracy, tokens) = _synchronise(
            [*matrices, *other], [shown["accuracy"], float(batch.ids.numel())], options.processes
        )
        torch.nn.utils.clip_grad_norm_([*matrices, *other], 1.0)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        progress.step += 1
        progress.stage_step += 1
        progress.tokens += int(tokens * options.processes)
        progress.accuracy += (accuracy - progress.accuracy) * (0.03 if progress.stage_step > 10 else 0.2)
        now = time.monotonic()
        progress.seconds, clock = progress.seconds + now - clock, now
        if log and progress.step % 10 == 0:
            row = {**vars(progress), **shown, "mean_accuracy": progress.accuracy, "lr": factor}
            print(json.dumps({k: round(v, 4) for k, v in row.items()}), file=log, flush=True)
        finished = progress.stage_step >= stage.steps
        if finished or (progress.stage_step > 40 and progress.accuracy > stage.goal):
            progress.stage, progress.stage_step, progress.accuracy = progress.stage + 1, 0, 0.0
        if rank == 0 and (progress.step % options.save_every == 0 or progress.stage == len(curriculum)):
            _save(latest, model, optimisers, progress, facts)
    if rank == 0:
        export(latest, options.out, options.model)
    if options.processes > 1:
        dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    """Build or copy the tokenizer, train and export the model."""
    parser = argparse.ArgumentParser(description="Train the bundled demo model.")
    parser.add_argument("--out", type=Path, default=Path("runs/demo-model"), help="checkpoints and log")
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER, help="where the finished model goes")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--layers", type=int, default=10, help="more than --start-from has: it grows")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--port", type=int, default=29517, help="local port the processes meet at")
    parser.add_argument(
        "--new-tokenizer", action="store_true", help="build a new vocabulary, keep the shipped one if not"
    )
    parser.add_argument("--start-from", type=Path, help="go on from this finished model")
    parser.add_argument("--steps", type=int, default=600, help="with --start-from: how many")
    parser.add_argument("--rate", type=float, default=1.0, help="factor on the learning rates")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    # Token ids of indexed chunks stay valid across trainings if the vocabulary does not change.
    known = MODEL_FOLDER / "tokenizer.json"
    if not (options.out / "tokenizer.json").exists():
        fresh = options.new_tokenizer or not known.exists()
        save_tokenizer(build_tokenizer() if fresh else Tokenizer.from_file(str(known)), options.out)
    if options.processes == 1:
        run(0, options)
    else:
        # The workers' C library reads these variables: it keeps freed memory for the next step instead of returning it.
        os.environ |= {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
        context = multiprocessing.get_context("spawn")
        workers = [context.Process(target=run, args=(rank, options)) for rank in range(options.processes)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if any(worker.exitcode for worker in workers):
            raise SystemExit("training failed in a worker process; its message is above")


if __name__ == "__main__":
    main(sys.argv[1:])
