"""Checks that blending this model, with these libraries, computes the same as the model itself: the parity gate.

Every model passes the gate before it is blended. The gate compares logits with the model's own full prefill in three
blends of a prompt of random tokens. The first blend recomputes all tokens (ratio 1). The other two use stored KV that
is exact although it was computed at other positions: one reuses all of it, one recomputes a part. So rotation,
placement, masks and both passes must be right for the logits to agree. The logits may differ by a few times the
difference that the model's own prefill shows at other positions, where only rounding differs. The same limit holds,
layer by layer, for the KV that these blends leave, since a deep model's logits hide errors of one layer. If a layer has
a short sliding window, a fourth blend uses a prompt longer than the window. If a tier stores KV by a codec that changes
numbers, a blend of decoded KV must predict almost the same as a blend of exact KV. The gate also reports the
first-token KL divergence of an ordinary 15% blend, the cost of the approximation on meaningless text; this number has
no limit.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Final, Protocol

import torch

from cacheblend_rag.blending.fusor import fuse
from cacheblend_rag.blending.plan import BlendPlan, StoredSpan
from cacheblend_rag.blending.policies import policy
from cacheblend_rag.blending.rope import NotRotaryError, Rope
from cacheblend_rag.blending.settings import FuseOptions
from cacheblend_rag.blending.target import BlendTarget
from cacheblend_rag.store.codec import LOSSY, through
from cacheblend_rag.store.kv import ChunkKV, LayerKV

# Logit difference that counts as equal, as a multiple of the logits' standard deviation: kernels may only sum in
# another order for another shape.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 3e-1}
# The limit is `_ROUNDINGS` times the measured effect of rounding on this model's logits, within `_LEAST` to `_MOST`
# times the tolerance: the effect is one measurement, and rounding may send tokens of a mixture of experts to other
# experts.
_ROUNDINGS, _LEAST, _MOST = 6, 0.25, 2
# Bounds of the limit for the KV of a layer, as a share of its norm; the KV of another token is off by more than 1.
_KV_LEAST, _KV_MOST = 0.1, 0.5
_CHUNK, _CHUNKS, _GAP, _QUESTION, _OFFSET = 16, 3, 2, 6, 37
CODEC_LIMIT: Final = 0.01
"""Largest KL divergence allowed, in nats, between blends of exact and of decoded KV: the median over questions."""
# Number of questions. A token that a mixture of experts sends to another expert changes one question much, and so can
# rounding: hence the median.
_QUESTIONS: Final = 5
# Tokens of a pass that fill a GPU: a pass of fewer tokens takes no less time.
_FILLED: Final = 512
# Longest sliding window that the gate tests beyond: a longer prompt costs seconds on a CPU.
_WINDOW = 512


class GateSubject(Protocol):
    """Gives the gate (and calibration) access to an engine's model."""

    num_layers: int
    vocab_size: int
    dtype: torch.dtype

    @property
    def window(self) -> int | None:
        """Return the size in tokens of the smallest sliding window of a layer; None if no layer has one."""

    def fits(self, tokens: int) -> bool:
        """Return whether memory has room for a prompt of ``tokens`` tokens."""

    def detect_rope(self) -> Rope:
        """Measure the model's rotation; raises NotRotaryError."""

    def full_prefill(self, token_ids: Sequence[int], offset: int = 0) -> tuple[torch.Tensor, ChunkKV]:
        """Return the last token's logits ``[vocab]`` and all KV of a prefill at positions shifted by ``offset``."""

    def target(self, token_ids: Sequence[int], rope: Rope) -> BlendTarget:
        """Return a target for one prompt."""

    def logits(self, target: BlendTarget) -> torch.Tensor:
        """Return the last token's logits ``[vocab]`` after a blend."""

    def kv(self, target: BlendTarget) -> Sequence[LayerKV]:
        """Return each layer's KV of the whole prompt after a blend."""


@dataclass(frozen=True)
class GateReport:
    """Holds the gate's findings.

    Attributes:
        passed: Whether the model may be blended.
        reason: Why the model may not be blended, in words; empty if passed.
        errors: Largest logit difference of each check, in standard deviations of the logits.
        first_token_kl: KL divergence, in nats, of the first token's distribution: full prefill against a 15% blend.
        limit: Largest allowed logit difference.
        codecs: Result of :func:`check_codecs` for the tiers' codecs.
        pass_s: Seconds of a pass of almost no tokens, as the gate's own prefills took; 0 if no prefill ran.
        token_s: Seconds that each token adds to a pass.
    """

    passed: bool
    reason: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    first_token_kl: float | None = None
    limit: float | None = None
    codecs: dict[str, float] = field(default_factory=dict)
    pass_s: float = 0.0
    token_s: float = 0.0


def run_gate(
    subject: GateSubject, codecs: Collection[str] = (), known: GateReport | None = None
) -> tuple[GateReport, Rope | None]:
    """Run the gate for a model whose KV tiers store by ``codecs``.

    Args:
        subject: The model.
        codecs: Codecs of the tiers.
        known: Report of an earlier run for the same model, code and machine: then only the rotation is measured again,
            and the time of a pass, which is corrected only downwards.

    Returns:
        The report, and the rotation of the model's keys where it is known, else None.
    """
    if subject.num_layers < 2:
        return GateReport(False, "a model of one layer has nothing to blend"), None
    try:
        rope = subject.detect_rope()
        if known is not None:
            return _timed_again(subject, rope, known), rope
        report = _compare(subject, rope)
        return _with_codecs(report, check_codecs(subject, rope, codecs)) if report.passed else report, rope
    except NotRotaryError as error:
        return GateReport(False, str(error)), None
    except Exception as error:  # any exception of a foreign forward: the gate cannot run it
        return GateReport(
            False, f"its forward cannot be run at given positions ({type(error).__name__}: {error})"
        ), None


def check_codecs(subject: GateSubject, rope: Rope, codecs: Collection[str]) -> dict[str, float]:
    """Compare blends of KV stored by ``codecs`` with blends of exact KV, for chunks of random tokens.

    Both blends reuse all stored KV and recompute none, which shows most of a codec's effect.

    Returns:
        For each codec that changes numbers, the KL divergence that :data:`CODEC_LIMIT` bounds.
    """
    if LOSSY not in codecs:
        return {}
    prompts = [_Prompt(subject, rope, _CHUNK, question) for question in range(_QUESTIONS)]
    exact = prompts[0].alone()  # only the questions of the prompts differ
    want = [subject.logits(prompt.blend(exact, 0.0)) for prompt in prompts]
    kvs = [ChunkKV([through(LOSSY, layer) for layer in kv.layers], kv.start) for kv in exact]
    got = [subject.logits(prompt.blend(kvs, 0.0)) for prompt in prompts]
    return {LOSSY: median(map(first_token_kl, want, got))}


def _with_codecs(report: GateReport, found: dict[str, float]) -> GateReport:
    failed = [
        f"the KV codec {name} of its store moves what it predicts by {kl:.2g} nats, where {CODEC_LIMIT:g} are allowed: "
        "choose another one, or none"
        for name, kl in found.items()
        if not kl <= CODEC_LIMIT
    ]
    return replace(report, passed=not failed, reason="; ".join(failed), codecs=found)


class _Prompt:
    """Holds chunks of random tokens with gaps between them and a question, and blends the chunks' KV."""

    def __init__(self, subject: GateSubject, rope: Rope, chunk: int, question: int = 0):
        self._subject, self._rope, self._chunk = subject, rope, chunk
        generator = torch.Generator().manual_seed(0)
        length = prompt_tokens(chunk)
        self.ids: list[int] = torch.randint(0, subject.vocab_size, (length,), generator=generator).tolist()
        if question:
            generator.manual_seed(question)
            self.ids[-_QUESTION:] = torch.randint(0, subject.vocab_size, (_QUESTION,), generator=generator).tolist()
        self._starts = [i * (chunk + _GAP) for i in range(_CHUNKS)]
        self._seconds: dict[int, float] = {}  # shortest time of a prefill, by its number of tokens

    def _prefill(self, token_ids: Sequence[int], offset: int = 0) -> tuple[torch.Tensor, ChunkKV]:
        begin = time.perf_counter()
        logits, kv = self._subject.full_prefill(token_ids, offset)
        float(logits[0])  # waits for the device
        took = time.perf_counter() - begin
        self._seconds[len(token_ids)] = min(took, self._seconds.get(len(token_ids), took))
        return logits, kv

    def time_again(self, tokens: int | None = None) -> None:
        """Prefill the prompt, or its first ``tokens``, for the time alone: a stall may have met the other prefills.

        The number of prefills does not depend on their times, since all ranks have to run the same passes.
        """
        self._prefill(self.ids[:tokens])

    def cost(self) -> tuple[float, float]:
        """Return the seconds of a pass of no tokens and the seconds per token, from the prefills so far."""
        (few, few_s), (many, many_s) = min(self._seconds.items()), max(self._seconds.items())
        # A device that is not filled by this many tokens takes as long for one token: then the cost per token is a
        # guess.
        token_s = max((many_s - few_s) / max(1, many - few), few_s / _FILLED)
        return max(0.0, few_s - few * token_s), token_s

    def asking(self, question: int) -> _Prompt:
        """Return the same chunks with another question."""
        return _Prompt(self._subject, self._rope, self._chunk, question)

    @cached_property
    def full(self) -> tuple[torch.Tensor, ChunkKV]:
        """Return logits and KV of the model's own full prefill."""
        return self._prefill(self.ids)

    @cached_property
    def elsewhere(self) -> tuple[torch.Tensor, ChunkKV]:
        """Return logits and KV of the full prefill at other positions."""
        return self._prefill(self.ids, _OFFSET)

    def alone(self) -> list[ChunkKV]:
        """Return each chunk's KV, computed without the rest of the prompt."""
        whole = [self._prefill(self.ids[s : s + self._chunk])[1] for s in self._starts]
        return [cut(kv, 0, self._chunk) for kv in whole]

    def in_context(self) -> list[ChunkKV]:
        """Return each chunk's KV, taken from the full prefill at other positions."""
        return [cut(self.elsewhere[1], s, s + self._chunk, _OFFSET) for s in self._starts]

    def blend(self, kvs: Sequence[ChunkKV], ratio: float) -> BlendTarget:
        """Blend the prompt with the chunks' KV ``kvs`` and return its target."""
        spans = tuple(StoredSpan(s, s + self._chunk, kv) for s, kv in zip(self._starts, kvs, strict=True))
        target = self._subject.target(self.ids, self._rope)
        fuse(BlendPlan(len(self.ids), (), spans, "gate"), target, FuseOptions(policy("hkvd"), ratio))
        return target

    def wrong_layer(self, got: Sequence[LayerKV]) -> str | None:
        """Return which layer's KV differs from the full prefill, in words; None if no layer does.

        The error of a chunk is the median over its tokens: rounding sends single tokens to other experts. Values need
        no rotation, so the difference of values at other positions measures the rounding in a layer.
        """
        least = _KV_LEAST * TOLERANCE[self._subject.dtype]
        chunks = [slice(s, s + self._chunk) for s in self._starts]
        inside = torch.zeros(len(self.ids), dtype=torch.bool)
        for chunk in chunks:
            inside[chunk] = True
        parts: list[slice | torch.Tensor] = [*chunks, ~inside]
        worst: tuple[float, str] = (0.0, "")
        for layer, (want, moved, kv) in enumerate(zip(self.full[1].layers, self.elsewhere[1].layers, got, strict=True)):
            rounding = _relative(moved.v, want.v)
            errors = {name: _relative(getattr(kv, name[0]), getattr(want, name[0])) for name in ("keys", "values")}
            for part in parts:
                limit = min(_KV_MOST, max(_ROUNDINGS * float(rounding[part].median()), least))
                for name, error in errors.items():
                    off = float(error[part].median())
                    if not off / limit <= max(1.0, worst[0]):
                        worst = off / limit, f"{name} of layer {layer} off by {off:.2g} of their norm, not {limit:.2g}"
        return worst[1] or None


def prompt_tokens(chunk: int) -> int:
    """Return the length of the gate's prompt with chunks of ``chunk`` tokens."""
    return _CHUNKS * (chunk + _GAP) + _QUESTION


def _compare(subject: GateSubject, rope: Rope) -> GateReport:
    prompt = _Prompt(subject, rope, _CHUNK)
    alone, errors, wrong = prompt.alone(), {}, {}
    limit = TOLERANCE[subject.dtype]
    limit *= min(_MOST, max(_ROUNDINGS * _error(prompt.elsewhere[0], prompt.full[0]) / limit, _LEAST))

    def compare(name: str, prompt: _Prompt, kvs: Sequence[ChunkKV], ratio: float) -> None:
        done = prompt.blend(kvs, ratio)
        errors[name] = _error(subject.logits(done), prompt.full[0])
        if (layer := prompt.wrong_layer(subject.kv(done))) is not None:
            wrong[name] = layer
        if not errors[name] <= limit:  # logits are the same on every rank, so all ranks ask more questions, or none
            others = [prompt.asking(question) for question in range(1, _QUESTIONS)]
            more = [_error(subject.logits(each.blend(kvs, ratio)), each.full[0]) for each in others]
            errors[name] = float(torch.tensor([errors[name], *more]).median())  # NaN if one error is NaN

    compare("ratio 1 equals the full prefill", prompt, alone, 1.0)
    compare("exact KV from other positions, reused", prompt, prompt.in_context(), 0.0)
    compare("exact KV from other positions, blended", prompt, prompt.in_context(), 0.3)
    kl = first_token_kl(prompt.full[0], subject.logits(prompt.blend(alone, 0.15)))
    window = subject.window or 0
    chunk = window // _CHUNKS + _CHUNK  # the prompt is longer than the window by about three chunks of `_CHUNK` tokens
    # The prompt above already tests a window of less than half its length.
    if prompt_tokens(_CHUNK) <= 2 * window and window <= _WINDOW and subject.fits(prompt_tokens(chunk)):
        past = _Prompt(subject, rope, chunk)
        compare("exact KV from other positions, past a window", past, past.in_context(), 0.3)
    failed = [f"{name}: off by {error:.2g} standard deviations" for name, error in errors.items() if not error <= limit]
    failed += [f"{name}: {layer}" for name, layer in wrong.items()]
    prompt.time_again()
    pass_s, token_s = prompt.cost()
    return GateReport(not failed, "; ".join(failed), errors, kl, limit, pass_s=pass_s, token_s=token_s)


def _timed_again(subject: GateSubject, rope: Rope, known: GateReport) -> GateReport:
    """Return ``known`` with the costs of a pass as measured now, if they are lower: a stall may have met either."""
    prompt = _Prompt(subject, rope, _CHUNK)
    prompt.time_again(_CHUNK)
    prompt.time_again()
    costs = [prompt.cost(), (known.pass_s, known.token_s)]
    pass_s, token_s = min(costs, key=lambda cost: cost[0] + cost[1] * len(prompt.ids))
    return replace(known, pass_s=pass_s, token_s=token_s)


def first_token_kl(want: torch.Tensor, got: torch.Tensor) -> float:
    """Return KL(want ‖ got) in nats of two logit vectors ``[vocab]``."""
    p, q = want.double().log_softmax(-1), got.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum())


def _relative(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Return each token's error relative to its norm, ``[tokens]`` in host memory, for ``[kv_heads, tokens, dim]``."""
    want = want.float().transpose(0, 1).flatten(1)
    off = (got.float().transpose(0, 1).flatten(1) - want).norm(dim=1)
    share: torch.Tensor = off / want.norm(dim=1).clamp_min(1e-6)
    return share.cpu()


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).abs().max() / want.float().std())


def cut(kv: ChunkKV, start: int, end: int | None = None, offset: int = 0) -> ChunkKV:
    """Return tokens of a prefill that was shifted by ``offset``, in host memory, in the form that a store returns."""
    return ChunkKV([type(x)(x.k[:, start:end].cpu(), x.v[:, start:end].cpu()) for x in kv.layers], start + offset)
