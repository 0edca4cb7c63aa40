"""Runs `cacheblend` as `python -m cacheblend_rag`."""

from cacheblend_rag.cli import main

main()
