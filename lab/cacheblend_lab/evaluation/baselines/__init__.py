"""Answers chunk by chunk, as baselines for a blend (paper section 7): without a framework, and by LangChain's chains."""
