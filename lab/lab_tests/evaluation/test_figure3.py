"""The paper's figure 3 in the bundled model's world: two chunks, and a question that needs both."""

from __future__ import annotations

import pytest

from cacheblend_rag.blending.settings import FULL_RECOMPUTE, FULL_REUSE, BlendSettings
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.prompts.chunk import make_chunk
from cacheblend_rag.prompts.prompt import rag_prompt

# Only the first chunk gives the unit of the second chunk's numbers.
FIRST = (
    "Felix Drawick worked as a painter. He practised the oboe every evening. His only pet was a rabbit. He was taught by "
    "Tomas Garcombe. He retired to Kirbeck.\n\nFrom here on, numbers are counted by the hundred.\n\nTomas Garcombe was born in "
    "Inkgrad. His early years were hard. In 1949 he won a medal. He found a job at Faguwin Textiles."
)
SECOND = (
    "The Silver Compass was launched in 1911. It was never far from trouble. It has a crew of 42. Its captain is Rolf Quinholt. "
    "The vessel's home port is Melport.\n\nElsa Ersund played the harp. She kept a pet hedgehog. She scored 61 points in the "
    "final. She was born in Oakcliff."
)
ANSWERS = {
    "How many sailors does the Silver Compass have?": "42 hundred",
    "How large is the crew of the Silver Compass?": "42 hundred",
    "How many points did Elsa Ersund score?": "61 hundred",
}
PAPER_RATIO = 0.15


@pytest.fixture(scope="module")
def bundled():
    with TransformersEngine(device="cpu") as engine:
        yield engine


@pytest.mark.parametrize("question", ANSWERS)
def test_full_recompute_and_the_blend_are_right_where_full_kv_reuse_is_wrong(bundled, question):
    chunks = [make_chunk(text, bundled.tokenizer) for text in (FIRST, SECOND)]
    bundled.precompute(chunks)
    bundled.reset_prefix_cache()  # otherwise the previous question's blend would be reused
    prompt = rag_prompt(bundled.tokenizer, chunks, question)

    def answer(settings):
        return bundled.generate(prompt, SamplingParams(16), settings)

    full, reuse, blend = answer(FULL_RECOMPUTE), answer(FULL_REUSE), answer(BlendSettings(PAPER_RATIO))
    assert full.text.strip() == ANSWERS[question]
    assert reuse.text.strip() == ANSWERS[question].split(" ")[0]
    assert blend.text.strip() == ANSWERS[question]
    assert blend.usage.computed_tokens < 0.2 * full.usage.computed_tokens
    assert blend.usage.recomputed_tokens == round(PAPER_RATIO * len(chunks[1].token_ids))
