"""Adds the lab's commands to the command line: `bench`, `eval`, `figures`, `tune-retriever`, `realm`."""
