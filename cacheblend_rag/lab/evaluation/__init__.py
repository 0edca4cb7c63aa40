"""Measures the quality of every method on data sets, with intervals, and the paper's figures on your own model."""
