"""Counts how often a model calls a tool that its prompt offers: ``python lab/benchmarks/tool_calls.py [model]``.

The default is SmolLM2-135M, whose own chat template has no tools, so it gets the template of Hermes and Qwen. Each
question is asked freely and with the first call forced.
"""

from __future__ import annotations

import sys

from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_cacheblend import CacheBlendRetriever, ChatCacheBlend
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import create_retriever_tool

from cacheblend_rag import TransformersEngine

NOTES = [
    "The harbour of Marlow was built in 1911 by Ada Brenmoor, who came from the company and stayed for long.",
    "The bakery was founded by Sonia Halston, whose daughter runs it now, behind the old lighthouse in the west.",
    "Travel above 500 euros is approved by the head of finance. Below that, any manager approves it, in writing.",
]
QUESTIONS = [
    "Who founded the bakery?",
    "Who approves travel above 500 euros?",
    "When was the harbour of Marlow built?",
    "Look up in the notes who built the harbour of Marlow.",
]
TEMPLATE = """{% if tools %}<|im_start|>system
{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}

{% endif %}You may call one or more functions to answer the user. Functions:
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
To call one, answer with nothing but:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}{% for m in messages %}{% if not (loop.first and tools and m['role'] == 'system') %}<|im_start|>\
{{ 'user' if m['role'] == 'tool' else m['role'] }}
{% if m['role'] == 'tool' %}<tool_response>
{% endif %}{{ m['content'] }}{% for c in m.tool_calls or [] %}
<tool_call>
{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}
</tool_call>{% endfor %}{% if m['role'] == 'tool' %}
</tool_response>{% endif %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@wrap_model_call
def forced(request, handler):
    first = isinstance(request.messages[-1], HumanMessage)
    return handler(request.override(tool_choice="any") if first else request)


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    with TransformersEngine(model) as engine:
        if model == "smollm2":
            engine.tokenizer.chat_template = TEMPLATE
        retriever = CacheBlendRetriever.from_documents([Document(note) for note in NOTES], engine, k=2)
        search = create_retriever_tool(retriever, "search_notes", "Looks up notes about people, places and rules.")
        llm = ChatCacheBlend(engine=engine, max_tokens=60)
        for way, middleware in (("freely", []), ("forced", [forced])):
            agent = create_agent(llm, [search], system_prompt="Answer from the notes.", middleware=middleware)
            called = 0
            for question in QUESTIONS:
                messages = agent.invoke({"messages": [HumanMessage(question)]}, {"recursion_limit": 8})["messages"]
                called += any(isinstance(message, AIMessage) and message.tool_calls for message in messages)
                print(f"{way}: {question} {messages[-1].text!r}")
            print(f"{way}: called in {called} of {len(QUESTIONS)}")


if __name__ == "__main__":
    main()
