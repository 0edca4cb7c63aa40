"""`python -m cacheblend_rag` is `cacheblend`."""

from cacheblend_rag.cli import main

main()
