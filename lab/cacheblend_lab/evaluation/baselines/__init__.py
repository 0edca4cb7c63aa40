"""Answers chunk by chunk, which a blend is compared with (paper section 7): without a framework, and by LangChain's chains."""
