"""Turns the command line into the arguments of vLLM's server."""

from __future__ import annotations

import ipaddress
import os
import socket
from argparse import Namespace
from collections.abc import Sequence
from copy import copy
from dataclasses import is_dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from cacheblend_rag.engines.models import BUNDLED_MODEL, is_bundled
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import encoder_for
from cacheblend_rag.prompts.prompt import rag_header
from cacheblend_rag.prompts.templates import PLAIN_TEMPLATE, dated_template, turn_lead
from cacheblend_rag.protocol import TOKENIZER_PROBE, ModelInfo
from cacheblend_rag.server.keys import read_keys, refuse_stored_answers
from cacheblend_rag.server.options import ServeOptions, flag_names

if TYPE_CHECKING:
    from pathlib import Path

    from cacheblend_rag.engines.vllm.arguments import Launch
    from cacheblend_rag.engines.vllm.client import BlendClient

DEFAULT_SHUTDOWN_S = 30
SHARED_PREFILL = 64
"""Most tokens of one prompt that a step computes on a CPU while other requests wait for the step."""

# Flags of vLLM that set the sizes of the paged KV cache and of the engine's steps.
_SIZES = (
    "kv_cache_memory_bytes",
    "gpu_memory_utilization",
    "num_gpu_blocks_override",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "enable_chunked_prefill",
)
# Flags of vLLM that set the version of the model's files and the download directory.
_VERSIONS = ("revision", "tokenizer_revision", "download_dir")
_LOOPBACK = "127.0.0.1"
_MOST_HEADERS = 1 << 16  # bytes of a request's first line and headers
_ONE_PROCESS = "the server is one process; for more, start several over one --store and put a load balancer in front"
# Flags of vLLM that this server does not support, with the reasons.
_REFUSED = {
    "headless": "it has no HTTP server",
    "grpc": "chunks are served over HTTP alone",
    "kv_transfer_config": "the connector is cacheblend-rag's",
    "kv_offloading_size": "KV is kept in RAM by cacheblend-rag's store (--ram-budget)",
    "worker_cls": "the worker is cacheblend-rag's",
    "skip_tokenizer_init": "chunks are found in text",
    "config": "give the flags themselves",
}


def parse(options: ServeOptions, flags: Sequence[str]) -> tuple[Namespace, Launch]:
    """Parse vLLM's flags and add the arguments of the blending engine.

    Raises:
        InputError: A flag is not supported by this server.
        ModelError: vLLM is missing, or the model cannot be found.
    """
    from cacheblend_rag.engines.vllm.versions import check_version, server_flags

    check_version()

    from vllm.config import KVTransferConfig
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from cacheblend_rag.engines.vllm.arguments import prepare

    parser = FlexibleArgumentParser(prog="cacheblend serve")  # type: ignore[no-untyped-call]
    parser = server_flags().make_arg_parser(parser)
    parser.error = partial(_refuse_flags, parser)
    parser.set_defaults(
        shutdown_timeout=DEFAULT_SHUTDOWN_S,
        enable_prompt_tokens_details=True,
        host=_LOOPBACK,
        h11_max_incomplete_event_size=_MOST_HEADERS,
        long_prefill_token_threshold=SHARED_PREFILL if current_platform.is_cpu() else 0,
        allowed_origins=[],  # vLLM's default since 0.33: else any page in a local browser could ask
    )
    args = parser.parse_args(list(flags))
    _refuse(args, parser)
    _refuse_strangers(args, options)
    _take_keys(args, options.keys)
    _validate(args)
    launch = prepare(
        options.model,
        options.store,
        header=None if options.instruction is None else partial(rag_header, instruction=options.instruction),
        ratio=options.ratio,
        dtype=args.dtype,
        ram_budget=options.ram_budget,
        disk_budget=options.disk_budget,
        writer=options.writer,
        **({"tokenizer": args.tokenizer} if args.tokenizer else {}),
        **_chosen(args, parser, options),
    )
    for name, value in launch.arguments.items():
        own, given = value, getattr(args, name, None)
        if name == "kv_transfer_config":
            own = KVTransferConfig(**value)
        elif name == "served_model_name":
            own = given or [value]
        elif is_dataclass(given):  # a config group of vLLM: a value that the user has set stays
            group: Any = type(given)
            own = given if given != parser.get_default(name) else group(**value)
        setattr(args, name, own)
    args.chat_template = _chat_template(args, launch.tokenizer)
    return args, replace(launch, lead=_lead(launch.tokenizer, args.chat_template))


def _refuse_flags(parser: Any, message: str) -> NoReturn:
    """Report a wrong flag in a line or two; vLLM's parser would print hundreds of lines of usage.

    Raises:
        InputError: Always.
    """
    known = sorted({*parser._option_string_actions, *flag_names()})
    given = [word for word in message.split() if word.startswith("--")] if "unrecognized" in message else []
    guesses = [(word, get_close_matches(word.partition("=")[0], known, 1)) for word in given]
    meant = "".join(f" {word}: did you mean {near[0]}?" for word, near in guesses if near)
    raise InputError(
        f"{message[:1].upper()}{message[1:]}.{meant} `cacheblend serve --help` lists our flags, `vllm serve --help=all` vLLM's."
    )


def _chosen(args: Namespace, parser: Any, options: ServeOptions) -> dict[str, Any]:
    """Return the flags that the user has set about the paged KV cache, the engine's steps and the model."""
    from cacheblend_rag.engines.vllm.arguments import ALTERING

    names = (*_SIZES, *_VERSIONS, *ALTERING)
    given = {name: getattr(args, name) for name in names if getattr(args, name) != parser.get_default(name)}
    if options.kv_memory is None:
        return given
    if "kv_cache_memory_bytes" in given:
        raise InputError("--kv-memory and --kv-cache-memory-bytes mean the same; give one of them.")
    return {**given, "kv_cache_memory_bytes": options.kv_memory}


def _refuse(args: Namespace, parser: Any) -> None:
    if args.model_tag:
        raise InputError(f"{args.model_tag!r} stands alone; name the model with --model.")
    for name, why in _REFUSED.items():
        if getattr(args, name, None) != parser.get_default(name):
            raise InputError(f"--{name.replace('_', '-')} does not go with `cacheblend serve`: {why}.")
    if (args.api_server_count or 1) != 1 or args.data_parallel_size != 1:
        raise InputError(f"--api-server-count and --data-parallel-size other than 1 are refused: {_ONE_PROCESS}.")


def _validate(args: Namespace) -> None:
    """Let vLLM check that its flags fit together; raises InputError if they do not."""
    from vllm.exceptions import VLLMValidationError

    from cacheblend_rag.engines.vllm.versions import server_flags

    try:
        server_flags().validate_parsed_serve_args(args)
    except (TypeError, ValueError, VLLMValidationError) as error:
        raise InputError(str(error)) from error


def _refuse_strangers(args: Namespace, options: ServeOptions) -> None:
    """Raise InputError if other machines could reach a server without an API key, unless --allow-no-key is given."""
    if options.keys is not None or args.uds or options.allow_no_key or api_keys(args) or _is_loopback(args.host):
        return
    raise InputError(
        f"--host {args.host!r} lets other machines in, and no API key is set: whoever reaches the server could read and delete "
        f"every chunk. Set CACHEBLEND_API_KEY (or give --api-key or --keys), or leave out --host to serve {_LOOPBACK} alone. "
        "Where something in front of the server checks who asks, --allow-no-key serves all the same."
    )


def _take_keys(args: Namespace, path: Path | None) -> None:
    """Check the file of keys, if given, against the other flags, and have several namespaces share steps fairly."""
    from cacheblend_rag.engines.vllm.fairness import FAIR

    if path is None:
        return
    keys = read_keys(path)
    refuse_stored_answers(keys)
    if api_keys(args):
        raise InputError(
            "--keys is in place of --api-key, CACHEBLEND_API_KEY and VLLM_API_KEY; one of those is set. Give one of them."
        )
    if keys.shared and args.scheduler_cls is None:
        args.scheduler_cls = FAIR


def _is_loopback(host: str | None) -> bool:
    """Return whether every address of ``host`` is a loopback address; False if ``host`` cannot be resolved."""
    try:
        # An empty name means all interfaces, but would resolve to the loopback.
        found = socket.getaddrinfo(host, None) if host else []
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(address[0]).is_loopback for *_, address in found)


def _chat_template(args: Namespace, tokenizer: Any) -> str | None:
    """Return the user's chat template, else the one that chunk headers are rendered with; dates in both are fixed."""
    if args.chat_template is not None:
        from vllm.renderers.chat_utils import load_chat_template

        return dated_template(str(load_chat_template(args.chat_template)))
    own = getattr(tokenizer, "chat_template", None)
    if own is not None and not isinstance(own, str):
        return None  # several named templates: vLLM chooses
    bos = "{{ bos_token }}" if own is None and encoder_for(tokenizer).prefix_ids else ""
    return dated_template(own or bos + PLAIN_TEMPLATE)


def _lead(tokenizer: Any, template: str | None) -> tuple[int, ...] | None:
    """Return the tokens that the served template writes before an answer; None if vLLM chooses the template."""
    if template is None:
        return None
    served = copy(tokenizer)
    served.chat_template = template
    return turn_lead(served)


def api_keys(args: Namespace) -> list[str]:
    """Return the accepted API keys, all with equal rights: those of --api-key, else those of the environment."""
    from vllm import envs

    return [key for key in (args.api_key or [os.environ.get("CACHEBLEND_API_KEY"), envs.VLLM_API_KEY]) if key]


def model_info(client: BlendClient, options: ServeOptions, args: Namespace) -> ModelInfo:
    """Return the description of the model that clients receive."""
    bundled = is_bundled(options.model)
    return ModelInfo(
        name=client.fingerprint.name,
        served_as=tuple(args.served_model_name),
        fingerprint=client.fingerprint.digest,
        tokenizer=args.tokenizer or (BUNDLED_MODEL if bundled else str(options.model)),
        tokenizer_probe=tuple(encoder_for(client.tokenizer).template(TOKENIZER_PROBE)),
        header_ids=tuple(client.header_ids),
        context_window=client.context_window,
        blended=client.gate.passed,
        reason=client.gate.reason,
        num_layers=client.num_layers,
        controlled=client.controlled,
        profile=replace(client.profile, calibrated={}, origin=""),  # clients get no file paths
    )
