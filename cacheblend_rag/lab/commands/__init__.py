"""Adds the lab's commands to the command line: `bench`, `eval`, `figures`, `learn`, `tune-retriever`, `realm`."""
