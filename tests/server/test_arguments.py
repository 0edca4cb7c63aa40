"""Tests how `cacheblend serve` reads its flags, before a model is loaded."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")

from cacheblend_rag.engines.models import bundled_model_directory
from cacheblend_rag.engines.vllm.arguments import Launch
from cacheblend_rag.engines.vllm.fairness import FAIR
from cacheblend_rag.engines.writer import KVWriter
from cacheblend_rag.errors import InputError, ModelError
from cacheblend_rag.prompts.prompt import header_ids, rag_header
from cacheblend_rag.server.arguments import api_keys, parse
from cacheblend_rag.server.options import ServeOptions, flag_names
from cacheblend_rag.store.kv import ModelFingerprint
from tests.blending.writers import alter_config, write_for


def parsed(tmp_path: Path, *flags: str, **options: Any) -> Any:
    return parse(ServeOptions(store=tmp_path, **options), flags)


def test_the_default_model_is_the_bundled_one_on_our_connector_and_worker(tmp_path: Path) -> None:
    args, launch = parsed(tmp_path, "--port", "8123", "--max-model-len", "2048")
    assert (args.port, args.max_model_len, args.served_model_name) == (8123, 2048, ["bundled"])
    assert Path(args.model) == bundled_model_directory()
    assert args.worker_cls.startswith("cacheblend_rag.")
    assert args.kv_transfer_config.kv_connector_module_path.startswith("cacheblend_rag.")
    assert args.kv_transfer_config.kv_connector_extra_config["store"] == str(tmp_path)
    assert launch.header_ids == header_ids(launch.tokenizer, rag_header(launch.tokenizer))
    assert args.enable_prompt_tokens_details
    assert args.shutdown_timeout > 0


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2")
def test_every_process_gets_the_models_own_kv_writer_unless_writer_is_none(
    tmp_path: Path,
) -> None:
    args, launch = parsed(tmp_path, model="smollm2")
    assert launch.writer == KVWriter.read("smollm2").name
    assert args.kv_transfer_config.kv_connector_extra_config["writer"] == asdict(launch.writer)
    assert parsed(tmp_path, model="smollm2", writer="none")[1].writer is None


def test_a_kv_writer_is_checked_at_once_and_passed_to_every_process(tmp_path: Path) -> None:
    directory = bundled_model_directory()
    fingerprint = ModelFingerprint.from_directory(directory, torch.float32)
    write_for(AutoModelForCausalLM.from_pretrained(directory), fingerprint, tmp_path / "writer")
    args, launch = parsed(tmp_path, writer=tmp_path / "writer")
    assert args.kv_transfer_config.kv_connector_extra_config["writer"] == asdict(launch.writer)
    assert launch.writer.directory == str(tmp_path / "writer")
    # The header of chunks follows the profile of model and writer, as in the engine.
    (tmp_path / "writer" / "cacheblend.json").write_text('{"blockwise": true}')
    _, launch = parsed(tmp_path, writer=tmp_path / "writer", ratio=0.25)
    assert (launch.profile.blockwise, launch.profile.ratio, launch.header_ids) == (True, 0.25, ())
    alter_config(tmp_path / "writer", use_dora=True)
    with pytest.raises(InputError, match="cannot be used: it takes use_dora"):
        parsed(tmp_path, writer=tmp_path / "writer")


def test_the_users_flags_override_our_defaults(tmp_path: Path) -> None:
    flags = ["--shutdown-timeout", "3", "--served-model-name", "mine", "also-mine", "--dtype", "bfloat16"]
    args, launch = parsed(tmp_path, *flags, "--chat-template", "{{ messages }}", instruction="Be brief.")
    assert (args.shutdown_timeout, args.served_model_name, args.dtype) == (3, ["mine", "also-mine"], "bfloat16")
    assert args.chat_template == "{{ messages }}"
    assert launch.header_ids == header_ids(launch.tokenizer, rag_header(launch.tokenizer, "Be brief."))


def test_the_kv_cache_on_a_cpu_is_sized_for_the_model_up_to_half_the_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    token = 2 * 10 * 2 * 64 * 4  # K and V, layers, KV heads, head size, fp32
    args, _ = parsed(tmp_path, "--max-model-len", "4096")
    assert args.kv_cache_memory_bytes == 4 * 4096 * token
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=200 << 20))
    args, _ = parsed(tmp_path, "--max-model-len", "8192")
    assert args.kv_cache_memory_bytes == 100 << 20


@pytest.mark.parametrize(
    ("cpu", "flags", "tokens"), [(True, [], 64), (True, ["0"], 0), (False, [], 0), (False, ["9"], 9)]
)
def test_long_prompts_on_a_cpu_are_limited_to_64_tokens_a_step_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpu: bool, flags: list[str], tokens: int
) -> None:
    monkeypatch.setattr("vllm.platforms.current_platform.is_cpu", lambda: cpu)
    monkeypatch.setattr(
        "cacheblend_rag.engines.vllm.arguments.prepare", lambda *_, **__: Launch({}, tmp_path, *[None] * 6)
    )
    monkeypatch.setattr("cacheblend_rag.server.arguments._chat_template", lambda *_: None)
    given = [f"--long-prefill-token-threshold={value}" for value in flags]
    assert parsed(tmp_path, *given)[0].long_prefill_token_threshold == tokens


@pytest.mark.parametrize(("tenants", "flags"), [("", []), ("a", []), ("a", ["--scheduler-cls", "its.Own"])])
def test_several_tenants_get_the_fair_scheduler_unless_the_user_names_a_scheduler(
    tmp_path: Path, tenants: str, flags: list[str]
) -> None:
    names = ("default", *tenants)
    keys = "".join(f'[[key]]\nvalue = "{name}"\nrole = "ask"\ntenant = "{name}"\n' for name in names)
    (tmp_path / "keys.toml").write_text(keys)
    chosen = parsed(tmp_path, *flags, keys=tmp_path / "keys.toml")[0].scheduler_cls
    assert chosen == (flags[1] if flags else FAIR if tenants else None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "options", "expected"),
    [
        (["--kv-cache-memory-bytes", "123456789"], {}, 123456789),
        (["--gpu-memory-utilization", "0.5"], {}, None),
        (["--num-gpu-blocks-override", "100"], {}, None),
        ([], {"kv_memory": 77 << 20}, 77 << 20),
    ],
)
def test_the_users_kv_cache_flags_are_used_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], options: dict[str, Any], expected: int | None
) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    args, _ = parsed(tmp_path, *flags, **options)
    assert args.kv_cache_memory_bytes == expected


@pytest.mark.slow
def test_the_kv_cache_size_of_the_environment_is_not_overridden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert parsed(tmp_path)[0].kv_cache_memory_bytes is None


def test_the_size_of_the_kv_cache_given_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give one of them"):
        parsed(tmp_path, "--kv-cache-memory-bytes", "123456789", kv_memory=77 << 20)


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (["--kv-transfer-config", '{"kv_connector": "X", "kv_role": "kv_both"}'], "--kv-transfer-config"),
        (["--worker-cls", "a.B"], "--worker-cls"),
        (["--skip-tokenizer-init"], "--skip-tokenizer-init"),
        (["--kv-offloading-size", "4"], "--ram-budget"),
        (["--headless"], "--headless"),
        (["--api-server-count", "2"], "several over one --store"),
        (["--data-parallel-size", "2"], "several over one --store"),
        (["some/model"], "--model"),
        (["--enable-auto-tool-choice"], "tool-call-parser"),
    ],
)
def test_flags_that_cannot_be_honoured_are_refused_with_the_reason(
    tmp_path: Path, flags: list[str], match: str
) -> None:
    with pytest.raises(InputError, match=match):
        parsed(tmp_path, *flags)


def test_a_missing_model_is_named_in_the_error(tmp_path: Path) -> None:
    for options in ({}, {"instruction": "Be brief."}):
        with pytest.raises(ModelError, match="missing"):
            parsed(tmp_path, model=str(tmp_path / "missing"), **options)


@pytest.fixture
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CACHEBLEND_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_keys")
def test_a_server_without_a_key_listens_on_this_machine_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parsed(tmp_path)[0].host == "127.0.0.1"
    for own in ("127.0.0.1", "127.1.2.3", "localhost", "::1"):
        assert parsed(tmp_path, "--host", own)[0].host == own
    loaded = []
    monkeypatch.setattr("cacheblend_rag.engines.vllm.arguments.prepare", lambda *_, **__: loaded.append(1))
    for open_to_all in ("0.0.0.0", "::", "", "0", "10.1.2.3", "::ffff:0.0.0.0"):
        with pytest.raises(InputError, match=r"CACHEBLEND_API_KEY.*--api-key.*--allow-no-key"):
            parsed(tmp_path, "--host", open_to_all)
    assert not loaded


@pytest.mark.slow
@pytest.mark.usefixtures("no_keys")
def test_a_key_a_socket_or_allow_no_key_lets_the_server_listen_on_every_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    anywhere = ("--host", "0.0.0.0")
    assert parsed(tmp_path, *anywhere, "--api-key", "secret")[0].host == "0.0.0.0"
    assert parsed(tmp_path, *anywhere, allow_no_key=True)[0].host == "0.0.0.0"
    assert parsed(tmp_path, *anywhere, "--uds", str(tmp_path / "socket"))[0].uds
    for name in ("CACHEBLEND_API_KEY", "VLLM_API_KEY"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "secret")
            assert parsed(tmp_path, *anywhere)[0].host == "0.0.0.0"


@pytest.mark.usefixtures("no_keys")
def test_no_cross_origin_is_allowed_by_default(tmp_path: Path) -> None:
    assert parsed(tmp_path)[0].allowed_origins == []
    assert parsed(tmp_path, "--allowed-origins", '["http://page"]')[0].allowed_origins == ["http://page"]


@pytest.mark.parametrize(("given", "sent"), [(None, False), ("1", False), ("0", True)])
def test_vllms_usage_statistics_are_sent_only_if_the_environment_enables_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, sent: bool
) -> None:
    from vllm.usage import usage_lib

    from cacheblend_rag.server import launch

    monkeypatch.setattr(usage_lib, "_USAGE_STATS_ENABLED", None)
    monkeypatch.setattr(usage_lib, "_USAGE_STATS_DO_NOT_TRACK_PATH", str(tmp_path / "not there"))
    for name in ("DO_NOT_TRACK", "VLLM_DO_NOT_TRACK", "VLLM_NO_USAGE_STATS"):
        monkeypatch.delenv(name, raising=False)
    if given is None:
        monkeypatch.setenv("VLLM_NO_USAGE_STATS", "")  # monkeypatch then undoes the value that serve sets
        monkeypatch.delenv("VLLM_NO_USAGE_STATS")
    else:
        monkeypatch.setenv("VLLM_NO_USAGE_STATS", given)
    with pytest.raises(InputError, match="no-such"):
        launch.serve(ServeOptions(store=tmp_path), ["--no-such-flag"])
    assert usage_lib.is_usage_stats_enabled() == sent


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--no-such-flag-at-all", "Unrecognized arguments: --no-such-flag-at-all."),
        ("--max-modellen=9", "did you mean --max-model-len?"),
        ("--kv-memry", "did you mean --kv-memory?"),
        ("--port=x", "Argument --port: invalid"),
    ],
)
def test_a_mistyped_flag_is_reported_in_one_line_with_a_suggestion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, said: str
) -> None:
    with pytest.raises(InputError) as refused:
        parsed(tmp_path, flag)
    assert said in str(refused.value) and "cacheblend serve --help" in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1 and "usage:" not in capsys.readouterr().err


def test_flag_suggestions_cover_exactly_the_flags_of_serve() -> None:
    from typer.main import get_command

    from cacheblend_rag.cli import app

    command = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    own = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    assert own - {"-h", "--help"} == set(flag_names())


def test_keys_come_from_the_flag_or_else_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEBLEND_API_KEY", "from-environment")
    assert api_keys(parsed(tmp_path, "--api-key", "one", "two")[0]) == ["one", "two"]
    assert api_keys(parsed(tmp_path)[0]) == ["from-environment"]
    monkeypatch.delenv("CACHEBLEND_API_KEY")
    assert api_keys(parsed(tmp_path)[0]) == []


@pytest.mark.usefixtures("no_keys")
async def test_the_keys_of_both_environment_variables_open_vllms_own_routes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import httpx
    from fastapi import FastAPI
    from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware

    from cacheblend_rag.server.launch import guard

    keys = {"CACHEBLEND_API_KEY": "ours", "VLLM_API_KEY": "theirs"}
    for name, key in keys.items():
        monkeypatch.setenv(name, key)
    args, _ = parsed(tmp_path)
    app = FastAPI()
    app.state.limits = guard(ServeOptions(store=tmp_path), args, 4096)
    app.get("/v1/models")(lambda: "served")
    init_entrypoints_middleware(args, app, ())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        for key, status in [("ours", 200), ("theirs", 200), ("other", 401)]:
            answer = await client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == status, key


@pytest.mark.usefixtures("no_keys")
def test_a_key_file_excludes_every_other_key_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cacheblend_rag.server.keys import Key, key_of
    from cacheblend_rag.server.launch import guard

    file = tmp_path / "keys.toml"
    file.write_text("[[key]]\nvalue = 'asks'\nrole = 'ask'\n")
    args, _ = parsed(tmp_path, "--host", "0.0.0.0", keys=file)
    limits = guard(ServeOptions(store=tmp_path, keys=file), args, 4096)
    key = key_of("asks", limits.keys.keys)
    assert key is not None
    assert (key.role, args.api_key, limits.local) == ("ask", [], False)
    with pytest.raises(InputError, match="one of them"):
        parsed(tmp_path, "--api-key", "another", keys=file)
    monkeypatch.setenv("CACHEBLEND_API_KEY", "another")
    with pytest.raises(InputError, match="one of them"):
        parsed(tmp_path, keys=file)
    assert guard(ServeOptions(store=tmp_path), parsed(tmp_path)[0], 4096).keys.keys == (Key.of("another"),)
    file.write_text("[[key]]\nvalue = 'asks'\n")
    monkeypatch.delenv("CACHEBLEND_API_KEY")
    with pytest.raises(InputError, match="role"):
        parsed(tmp_path, keys=file)


@pytest.mark.usefixtures("no_keys")
def test_tenants_are_refused_if_vllm_stores_responses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys.toml"
    file.write_text("[[key]]\nvalue = 'asks'\nrole = 'ask'\n")
    monkeypatch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")
    parsed(tmp_path, keys=file)
    file.write_text("[[key]]\nvalue = 'asks'\nrole = 'ask'\ntenant = 'acme'\n")
    with pytest.raises(InputError, match="RESPONSES_API_STORE"):
        parsed(tmp_path, keys=file)


@pytest.mark.usefixtures("no_keys")
def test_only_a_server_without_a_key_socket_or_allow_no_key_checks_host_names(
    tmp_path: Path,
) -> None:
    from cacheblend_rag.server.launch import guard

    def local(*flags: str, **options: Any) -> bool:
        return guard(ServeOptions(store=tmp_path, **options), parsed(tmp_path, *flags, **options)[0], 4096).local

    assert local()
    assert not local("--api-key", "secret")
    assert not local("--uds", str(tmp_path / "socket"))
    assert not local(allow_no_key=True)


def test_the_serve_command_passes_unknown_flags_to_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from cacheblend_rag.cli import app
    from cacheblend_rag.server import launch

    seen: list[Any] = []
    monkeypatch.setattr(launch, "serve", lambda options, flags: seen.append((options, list(flags))))
    own = ["serve", "--store", str(tmp_path), "--ratio", "0.2", "--ram-budget", "1GiB", "--max-request-size", "1MiB"]
    others = ["--port", "9", "-tp", "2", "-asc", "1", "--api-key", "a", "b"]
    short = CliRunner().invoke(app, ["serve", "-m", "acme/llm", "--port", "9", "-s", str(tmp_path / "short")])
    assert short.exit_code == 0, short.output
    options, flags = seen.pop()
    assert (options.model, options.store, flags) == ("acme/llm", tmp_path / "short", ["--port", "9"])
    assert "bundled model" not in short.stderr
    assert CliRunner().invoke(app, ["serve", "-m"]).exit_code == 2
    result = CliRunner().invoke(app, own + others)
    assert result.exit_code == 0, result.output
    ((options, flags),) = seen
    assert (options.store, options.ratio, options.ram_budget, options.max_request_size) == (
        tmp_path,
        0.2,
        1 << 30,
        1 << 20,
    )
    assert flags == others
    assert CliRunner().invoke(app, ["serve", "--ratio", "2"]).exit_code == 2


def test_the_flags_of_the_kubernetes_example_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import yaml
    from typer.testing import CliRunner

    from cacheblend_rag.cli import app
    from cacheblend_rag.server import launch

    file = Path(__file__).parents[2] / "examples" / "kubernetes" / "cacheblend.yaml"
    objects = {part["kind"]: part for part in yaml.safe_load_all(file.read_text())}
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    seen: list[Any] = []
    monkeypatch.setattr(launch, "serve", lambda options, flags: seen.append((options, list(flags))))
    result = CliRunner().invoke(app, [*container["command"][1:], *container["args"]])
    assert result.exit_code == 0, result.output
    ((options, flags),) = seen
    assert str(options.store) in {mount["mountPath"] for mount in container["volumeMounts"]}
    monkeypatch.setenv("CACHEBLEND_API_KEY", "from the secret")
    args, _ = parse(ServeOptions(store=tmp_path), flags)  # the example's model is not on this machine
    assert args.host == "0.0.0.0"  # a pod is reached from other machines
    assert args.tensor_parallel_size == container["resources"]["limits"]["nvidia.com/gpu"]
    assert args.shutdown_timeout < pod["terminationGracePeriodSeconds"]
    assert args.port == container["ports"][0]["containerPort"]
    assert container["env"][0]["name"] == "CACHEBLEND_API_KEY"
