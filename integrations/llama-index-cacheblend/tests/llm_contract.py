"""Defines the contract of every LlamaIndex LLM. A test module subclasses `LLMContract`, makes an LLM and sets its
claims. The suite also runs against LlamaIndex's MockLLM, which checks the suite itself: a failure there is a wrong
expectation."""

from __future__ import annotations

from llm_contract_answers import AnswersContract
from llm_contract_running import RunningContract


class LLMContract(AnswersContract, RunningContract):
    """Joins all parts of the contract."""
