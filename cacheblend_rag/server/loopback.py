"""Checks whether a request names this machine as its host, which no page of another site can do."""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit


def names_this_machine(host: str) -> bool:
    """Return whether a ``Host`` header names this machine: ``localhost`` or a loopback address, with any port.

    A page of another site can have its own name resolved to 127.0.0.1 (DNS rebinding). A browser then lets the page read all
    answers of a server on this machine, but still sends the page's name as ``Host``.

    Example:
        >>> names_this_machine("127.0.0.1:7860"), names_this_machine("evil.example:7860")
        (True, False)
    """
    try:
        name = urlsplit("//" + host).hostname or ""
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False
