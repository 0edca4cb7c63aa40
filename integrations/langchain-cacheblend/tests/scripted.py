"""An engine without a model: it answers from its prompt by rule, conforms to JSON schemas and calls tools."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from transformers import AutoTokenizer

from cacheblend_rag import (
    BlendEngine,
    BlendPrompt,
    BlendSettings,
    Chunk,
    ChunkOutcome,
    Generation,
    PrecomputeReport,
    SamplingParams,
    StreamEvent,
    Timings,
    Usage,
    text_prompt,
)
from cacheblend_rag.blending.profile import ModelProfile
from cacheblend_rag.frameworks import ChunkRegistry, Request
from cacheblend_rag.prompts.prompt import TokenizedPrompt
from cacheblend_rag.store.kv import ModelFingerprint

from plain import BUNDLED

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}"
    "{% for m in messages %}<<{{ m['role'] }}>>{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<<end>>\n{% endfor %}"
    "{% if add_generation_prompt %}<<assistant>>{% endif %}"
)
_TURN = re.compile(r"<<(\w+)>>(.*?)<<end>>", re.DOTALL)


class ScriptedEngine(BlendEngine):
    """Answers ``Answer to: <last user turn>``; calls the first tool of the prompt; fills schemas from the user's words."""

    supports_json_schema: ClassVar[bool] = True

    def __init__(self, window: int = 8192, answer: str | None = None):
        self.tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
        self.tokenizer.chat_template = TEMPLATE
        self.fingerprint = ModelFingerprint("5" * 32, "scripted")
        self.context_window, self.num_layers, self.profile = window, 8, ModelProfile()
        self.registry = ChunkRegistry()
        self.answer = answer
        self.stored: set[str] = set()
        self.tokenized: list[BlendPrompt] = []
        self.prompts: list[BlendPrompt] = []
        self.requests: list[Request] = []
        self._sources: dict[tuple[int, ...], BlendPrompt] = {}
        self.prefetched: list[str] = []
        self.closed_streams = 0

    def precompute(self, chunks: Sequence[Chunk], progress: Callable[[int], None] | None = None) -> PrecomputeReport:
        self.registry.add(chunks)
        new = {chunk.id for chunk in chunks} - self.stored
        self.stored |= new
        return PrecomputeReport(len(new), len(chunks) - len(new))

    def forget(self, chunk_ids: Any) -> int:
        gone = {c if isinstance(c, str) else c.id for c in chunk_ids} & self.stored
        self.registry.remove(gone)
        self.stored -= gone
        return len(gone)

    def prefetch(self, chunk_ids: Any) -> None:
        self.prefetched += chunk_ids

    @property
    def sampling(self) -> list[SamplingParams]:
        return [request.sampling for request in self.requests]

    def tokenize(self, prompt: BlendPrompt | TokenizedPrompt | str) -> TokenizedPrompt:
        tokens = super().tokenize(prompt)
        if not isinstance(prompt, TokenizedPrompt):
            source = text_prompt(self.tokenizer, prompt, self.registry) if isinstance(prompt, str) else prompt
            self.tokenized.append(source)
            self._sources[tokens.token_ids] = source
        return tokens

    def stream(
        self,
        prompt: BlendPrompt | TokenizedPrompt | str | Request,
        sampling: SamplingParams | None = None,
        settings: BlendSettings | None = None,
    ) -> Iterator[StreamEvent]:
        request = self.request(prompt, sampling, settings)
        self.requests.append(request)
        self.prompts.append(self._sources[request.prompt.token_ids])
        return self._stream(request.prompt, request.sampling, self.prompts[-1])

    def _stream(self, tokens: TokenizedPrompt, sampling: SamplingParams, prompt: BlendPrompt) -> Iterator[StreamEvent]:
        missing = tuple(span.chunk.id for span in tokens.spans if span.chunk.id not in self.stored)
        reused = sum(span.end - span.start for span in tokens.spans if span.chunk.id in self.stored)
        said = "".join(s if isinstance(s, str) else s.text for s in prompt.segments)
        text = answer(said, sampling) if self.answer is None else self.answer
        stops = [text.index(stop) for stop in sampling.stop if stop in text]
        text = text[: min(stops)] if stops else text
        if "CACHEBLEND_TRANSCRIPT" in os.environ:  # see taught.py
            with Path(os.environ["CACHEBLEND_TRANSCRIPT"]).open("a") as file:
                file.write(json.dumps({"prompt": tokens.token_ids, "answer": text}) + "\n")
        size = len(tokens.token_ids)
        done = Generation(
            text=text,
            token_ids=tuple(self.tokenizer(text).input_ids),
            finish_reason="stop",
            mode="blend" if reused else "prefill",
            reason="scripted",
            usage=Usage(size, reused, 0, size - reused, len(text)),
            timings=Timings(0.1, 0.2),
            chunks=tuple(
                ChunkOutcome(span.chunk.id, span.start, span.end - span.start, "missing", lacks=("kv",))
                if span.chunk.id in missing
                else ChunkOutcome(span.chunk.id, span.start, span.end - span.start, "reused")
                for span in tokens.spans
            ),
        )
        try:
            for at in range(0, len(text), 7):
                yield StreamEvent(text[at : at + 7])
            yield StreamEvent("", done)
            self.stored.update(missing)
        finally:
            self.closed_streams += 1

    def close(self) -> None:
        pass


def answer(text: str, sampling: SamplingParams) -> str:
    """Answer a prompt by rule."""
    turns = _TURN.findall(text)
    asked = next((content for role, content in reversed(turns) if role == "user"), text)
    if sampling.json_schema is not None:
        schema = sampling.json_schema
        schema = json.loads(schema) if isinstance(schema, str) else schema
        made = instance(schema, asked, schema.get("$defs", {}))
        return json.dumps(made, ensure_ascii=False, separators=(",", ":"))  # guided decoding writes it so
    tools = re.search(r"<tools>(.*)</tools>", text)
    if tools and turns[-1][0] == "user":
        function = json.loads(tools[1])[0]["function"]
        call = {"name": function["name"], "arguments": instance(function["parameters"], asked, {})}
        return f"Let me see.\n<tool_call>{json.dumps(call, ensure_ascii=False)}</tool_call>"
    return f"Answer to: {asked[-200:]}"


def instance(schema: Mapping[str, Any], asked: str, definitions: Mapping[str, Any]) -> Any:
    """Return an instance of ``schema``, with the number or the quoted name in the user's text where the schema has one."""
    if "$ref" in schema:
        return instance(definitions[schema["$ref"].rpartition("/")[2]], asked, definitions)
    if "const" in schema:
        return schema["const"]
    for options in ("anyOf", "enum"):
        if options in schema:
            first = schema[options][0]
            return instance(first, asked, definitions) if options == "anyOf" else first
    kind = schema.get("type", "object")
    number = re.search(r"\((\d+)\)", asked)
    quoted = re.search(r"'(.+?)'", asked)
    simple = {
        "integer": int(number[1]) if number else 1,
        "number": float(number[1]) if number else 1.0,
        "string": quoted[1] if quoted else "Pirate",
        "boolean": True,
        "null": None,
        "array": [],
    }
    if kind != "object":
        return simple[kind]
    # A schema without properties is JSON mode: the keys are those in the user's text.
    properties = schema.get("properties", {key: {"type": "string"} for key in re.findall(r"'(\w+)'", asked)})
    return {name: instance(part, asked, definitions) for name, part in properties.items()}
