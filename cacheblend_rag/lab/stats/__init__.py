"""Gives the numbers that all measurements share: intervals, metrics, rows of files, plots."""
