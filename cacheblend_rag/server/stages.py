"""Says on stderr what a server does while it starts, and when: most of it is vLLM's work, and takes as long as it takes."""

from __future__ import annotations

import sys
import time

import psutil


def elapsed() -> float:
    """Return how many seconds this process has been running."""
    return time.time() - float(psutil.Process().create_time())


def tell(stage: str) -> None:
    """Say what begins now, behind the seconds since the command was typed; the words are ours."""
    sys.stderr.write(f"{elapsed():5.1f} s  {stage}\n")
    sys.stderr.flush()
