"""Measures the quality of every method on data sets, with intervals, and the paper's figures on your own model.

Samples of a data set become prompts in ``prepare.py``, answers by ``methods.py`` and ``answers.py``, numbers with intervals
in ``summary.py``, pages in ``figures/`` and ``report.py``.
"""
