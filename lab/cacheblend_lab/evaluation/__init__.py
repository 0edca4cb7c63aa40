"""Measures the quality of every method on data sets, with intervals, and the paper's figures on your own model.

Module ``prepare.py`` makes prompts of a data set's samples, ``methods.py`` and ``answers.py`` answer them,
``summary.py`` computes numbers with intervals, and ``figures/`` and ``report.py`` write pages.
"""
