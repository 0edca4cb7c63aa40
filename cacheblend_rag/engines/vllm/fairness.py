"""Shares vLLM's steps between namespaces, so that one namespace's requests delay the others as little as possible."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from cacheblend_rag.store.files import Namespace

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    from cacheblend_rag.engines.vllm.scheduler_side import SchedulerSide
else:
    Scheduler = object  # fair_scheduler adds the base class that vLLM would take

FAIR: Final = f"{__name__}.fair_scheduler"
"""Value of vLLM's ``scheduler_cls``."""
PATIENCE: Final = 8
"""Most consecutive steps for which prompts may be held back."""
LATELY_S: Final = 10.0
"""Seconds for which a namespace counts as active after its last request."""
_AT_ONCE: Final = 4  # most prompts that share the limit of a step


class FairSteps(Scheduler):
    """Extends one of vLLM's schedulers: the namespace with the least virtual time is served first.

    A namespace's virtual time advances by one for each computed token of a prompt, blended or not, and by two for each
    token of an answer. The time of a returning namespace is raised to the least time of the waiting namespaces
    (start-time fair queueing; "Fairness in Serving Large Language Models", OSDI 2024, section 4). Where vLLM cuts
    prompts (``long_prefill_token_threshold``, on a CPU), steps are too long for sorting alone. Prompts of all other
    namespaces are then held back while the first namespace has something to compute. All prompts of a step together get
    a quarter of the threshold, since the next request waits for the step, or four times the threshold if no other
    namespace was active lately. A held-back prompt is computed later, to the same tokens.
    """

    def __init__(self, *given: Any, **named: Any):
        super().__init__(*given, **named)
        self._times = defaultdict[str, float](float)
        self._seen: dict[str, float] = {}
        self._now, self._held_for = 0.0, 0
        self._most: int = self.max_num_scheduled_tokens
        config = self.scheduler_config
        self._cut = config.long_prefill_token_threshold if config.enable_chunked_prefill else 0

    def schedule(self, *given: Any, **named: Any) -> SchedulerOutput:
        """Compose a step; see vLLM's method ``schedule``."""
        connector: Any = self.connector
        side: SchedulerSide = connector.scheduler
        for name, tokens in side.take_promised().items():
            self._times[name] += tokens
        asking = {_whose(each) for each in chain(self.running, self.waiting, self.kv_holding_waiting)}
        for name in asking:
            self._times[name] = max(self._times[name], self._now)
        self._now = min((self._times[name] for name in asking), default=self._now)
        held = {name for name in asking if self._times[name] > self._now} if self._cut else set()
        self._held_for = self._held_for + 1 if held and self._held_for < PATIENCE else 0
        side.held, side.shared = held if self._held_for else set(), self._shared(asking)
        back = self._in_turn(side.held) if self._cut or len(asking) > 1 else []
        if self._cut:
            self._shorten(side.held, side.shared)
        output: SchedulerOutput = super().schedule(*given, **named)
        for queue, request in back:
            queue.add_request(request)
        for name, tokens in output.num_scheduled_tokens.items():
            request = self.requests[name]
            self._times[_whose(request)] += tokens + (not request.is_prefill_chunk)
        return output

    def _shared(self, asking: Collection[str]) -> bool:
        """Return whether vLLM cuts prompts and more than one namespace was active lately; ``asking`` are active now."""
        now = time.monotonic()
        self._seen |= dict.fromkeys(asking, now)
        return bool(self._cut) and sum(now - at < LATELY_S for at in self._seen.values()) > 1

    def _shorten(self, held: Collection[str], shared: bool) -> None:
        """Limit the prompt tokens of the next step, in total and per prompt; answers are computed as before."""
        answers = sum(not each.is_prefill_chunk for each in self.running)
        prompts = len(self.waiting) + sum(each.is_prefill_chunk and _whose(each) not in held for each in self.running)
        most = max(1, self._cut // 4) if shared else 4 * self._cut
        self.max_num_scheduled_tokens = min(self._most, most + answers * (1 + self.num_spec_tokens))
        self.scheduler_config.long_prefill_token_threshold = max(1, most // max(1, min(prompts, _AT_ONCE)))

    def _in_turn(self, held: Collection[str]) -> list[tuple[Any, Request]]:
        """Sort prompts by virtual time; hold back the prompts of ``held`` namespaces, and return the waiting ones."""
        back = []
        for queue in (self.waiting, self.kv_holding_waiting):
            waiting = sorted(queue, key=self._time)
            queue.remove_requests(waiting)
            for request in waiting:
                if _whose(request) in held:
                    back.append((queue, request))
                else:
                    queue.add_request(request)
        if self._cut:
            self.running.sort(key=lambda request: (request.is_prefill_chunk, self._time(request)))
        for request in self.running:
            if request.is_prefill_chunk and _whose(request) in held:
                request.next_decode_eligible_step = self.current_step + 2  # skips the next step
        return back

    def _time(self, request: Request) -> float:
        return self._times[_whose(request)]


def _whose(request: Request) -> str:
    return Namespace.salted(request.cache_salt)


def fair_scheduler(vllm_config: Any, **given: Any) -> Any:
    """Return the scheduler that vLLM would choose itself, extended by :class:`FairSteps`."""
    config = vllm_config.scheduler_config
    config.scheduler_cls = None
    return type("FairScheduler", (FairSteps, config.get_scheduler_cls()), {})(vllm_config=vllm_config, **given)
