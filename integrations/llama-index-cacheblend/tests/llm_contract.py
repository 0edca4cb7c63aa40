"""Says what every LlamaIndex LLM must do. A test module subclasses `LLMContract`, says how to make one, and what it claims.

Run against LlamaIndex's MockLLM as well as ours, so that the suite itself is checked: what fails there is a wrong expectation.
"""

from __future__ import annotations

from llm_contract_answers import AnswersContract
from llm_contract_running import RunningContract


class LLMContract(AnswersContract, RunningContract):
    """All of it."""
