"""Holds the code that commands share: options, option groups, output, and opening models."""
