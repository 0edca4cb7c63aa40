"""Tests that the installed vLLM has every interface that this package uses, with matching signatures."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")

from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA
from vllm.exceptions import VLLMValidationError
from vllm.renderers.params import TokenizeParams

import cacheblend_rag.engines.vllm as package
from cacheblend_rag.engines.remote.wire import TOO_LONG
from cacheblend_rag.engines.vllm import versions
from cacheblend_rag.engines.vllm.connector import BlendConnector
from cacheblend_rag.engines.vllm.messages import StepMeta, WorkerMeta
from cacheblend_rag.engines.vllm.worker import BaseWorker, BlendWorker

ROOT = Path(package.__file__).parents[2]


def overridden(ours: type, base: type) -> list[str]:
    return [n for n in vars(ours) if not n.startswith("_") and hasattr(base, n)]


def accepts(ours: Any, base: Any) -> None:
    """Assert that any call that fits the base's signature fits ours."""
    mine, its = inspect.signature(ours).parameters, inspect.signature(base).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in mine.values())
    for index, (name, parameter) in enumerate(its.items()):
        if parameter.kind in {parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL}:
            continue
        assert name in mine or takes_any, f"{ours.__qualname__} does not take {name}"
        if name in mine and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            assert list(mine).index(name) == index, f"{ours.__qualname__} takes {name} elsewhere"
    for name, parameter in mine.items():
        required = parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        assert not required or name in its, f"{ours.__qualname__} wants {name}, which vLLM does not give"


@pytest.mark.parametrize("name", overridden(BlendConnector, BlendConnector.__base__))
def test_the_connectors_methods_accept_vllms_arguments(name: str) -> None:
    ours, base = inspect.getattr_static(BlendConnector, name), inspect.getattr_static(BlendConnector.__base__, name)
    assert isinstance(ours, property) == isinstance(base, property)
    if not isinstance(ours, property):
        accepts(ours, base)


@pytest.mark.parametrize("ours", [BlendConnector, StepMeta, WorkerMeta])
def test_no_subclass_of_vllms_interfaces_is_abstract(ours: type) -> None:
    assert not inspect.isabstract(ours), ours.__abstractmethods__


@pytest.mark.parametrize("name", ["initialize_from_config", "execute_model", "sample_tokens"])
def test_the_workers_methods_accept_vllms_arguments(name: str) -> None:
    accepts(getattr(BlendWorker, name), getattr(BaseWorker, name))


@pytest.mark.parametrize("name", ["render_chat", "render_completion", "render_responses"])
def test_the_servers_renderer_accepts_vllms_arguments(name: str) -> None:
    from vllm.renderers.online_renderer import OnlineRenderer

    from cacheblend_rag.server.renderer import BlendRenderer

    accepts(getattr(BlendRenderer, name), getattr(OnlineRenderer, name))


def test_vllms_worker_and_connector_have_the_used_parts() -> None:
    assert callable(BaseWorker.get_model)
    assert "kv_cache_config" in inspect.signature(BlendConnector.__base__.__init__).parameters


def vllm_imports() -> list[tuple[str, str]]:
    """Return every name that this package imports from vLLM."""
    found = set()
    for file in [*(ROOT / "engines").rglob("*.py"), *(ROOT / "server").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                found |= {(str(node.module), alias.name) for alias in node.names}
    return sorted(found)


@pytest.mark.parametrize(("module", "name"), vllm_imports())
def test_every_name_imported_from_vllm_exists(module: str, name: str) -> None:
    if module.endswith("cpu_worker"):
        pytest.skip("another platform's")
    found = importlib.import_module(module)
    assert hasattr(found, name) or importlib.import_module(f"{module}.{name}")


def test_the_modules_of_vllms_server_are_found() -> None:
    assert callable(versions.server_flags().make_arg_parser)
    assert callable(versions.server_flags().validate_parsed_serve_args)
    assert callable(versions.server_startup().cli_env_setup)


def fields(kind: Any) -> dict[str, Any]:
    return {field.name: field for field in dataclasses.fields(kind)}


def test_vllms_data_classes_have_the_used_fields() -> None:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    scheduled = {"scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "total_num_scheduled_tokens"}
    assert scheduled | {"has_sync_kv_loads", "finished_req_ids"} <= fields(SchedulerOutput).keys()
    assert {"req_id", "num_computed_tokens"} <= fields(NewRequestData).keys()
    assert {"req_ids", "num_computed_tokens"} <= fields(CachedRequestData).keys()
    reported = {"finished_recving", "failed_recving", "kv_connector_worker_meta"}
    assert reported <= fields(KVConnectorOutput).keys()
    assert "kv_connector_output" in fields(ModelRunnerOutput)
    needed = {
        name
        for name, field in fields(CommonAttentionMetadata).items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    assert needed <= given_to("CommonAttentionMetadata", "attention.py") <= fields(CommonAttentionMetadata).keys()


def given_to(name: str, file: str) -> set[str]:
    """Return the keywords of the last call of the function or method ``name`` in a file of this package."""
    source = ast.parse((ROOT / "engines" / "vllm" / file).read_text(encoding="utf-8"))
    calls = [n for n in ast.walk(source) if isinstance(n, ast.Call)]
    named = [n for n in calls if name in (getattr(n.func, "id", ""), getattr(n.func, "attr", ""))]
    return {str(keyword.arg) for keyword in named[-1].keywords}


def test_the_forward_context_accepts_the_arguments_of_our_passes() -> None:
    from vllm.forward_context import set_forward_context
    from vllm.v1.attention.backend import AttentionMetadataBuilder

    assert given_to("set_forward_context", "paged.py") <= inspect.signature(set_forward_context).parameters.keys()
    assert given_to("build", "attention.py") <= inspect.signature(AttentionMetadataBuilder.build).parameters.keys()


def test_vllms_block_pool_has_the_methods_that_lending_needs() -> None:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    assert issubclass(BlendConnector, SupportsHMA)
    assert {"bind_gpu_block_pool", "request_finished_all_groups"} <= set(dir(BlendConnector.__base__)) | set(
        dir(SupportsHMA)
    )
    assert {"get_num_free_blocks", "get_new_blocks", "free_blocks"} <= set(dir(BlockPool))
    assert list(inspect.signature(BlockPool.get_new_blocks).parameters)[:2] == ["self", "num_blocks"]
    assert callable(KVCacheManager.get_block_ids)


@pytest.mark.parametrize("backend", ["flash_attn", "flashinfer", "triton_attn", "cpu_attn"])
def test_every_backend_writes_its_cache_by_do_kv_cache_update(backend: str) -> None:
    """The test reads the source, because a GPU's backends cannot be imported without their libraries."""
    import vllm

    source = Path(vllm.__file__).parent / "v1" / "attention" / "backends" / f"{backend}.py"
    functions = [n for n in ast.walk(ast.parse(source.read_text(encoding="utf-8"))) if isinstance(n, ast.FunctionDef)]
    found = next(f for f in functions if f.name == "do_kv_cache_update")
    assert [a.arg for a in found.args.args] == ["self", "layer", "key", "value", "kv_cache", "slot_mapping"]


def test_vllms_executors_step_through_the_worker() -> None:
    """Blends run in the worker's methods: vLLM's executors must call these, and not the model runner's."""
    import vllm

    executors = Path(vllm.__file__).parent / "v1" / "executor"
    text = {file.name: file.read_text(encoding="utf-8") for file in executors.glob("*.py")}
    direct = {name for name, source in text.items() if "model_runner.sample_tokens(" in source}
    assert direct <= {"ray_utils.py"}  # see BlendConnector.start_load_kv


def test_vllms_error_names_the_parameter_that_marks_a_too_long_prompt() -> None:
    with pytest.raises(VLLMValidationError) as error:
        TokenizeParams(max_total_tokens=4)._token_len_check(None, [1] * 5)
    assert error.value.parameter in TOO_LONG
