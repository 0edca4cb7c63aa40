"""Tests which files a model is read from by vLLM's arguments, and which fingerprint its KV has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")

from cacheblend_rag.engines import precision
from cacheblend_rag.engines.models import bundled_model_directory
from cacheblend_rag.engines.vllm.arguments import prepare
from cacheblend_rag.errors import InputError, ModelError
from cacheblend_rag.prompts.templates import turn_lead
from cacheblend_rag.server.arguments import parse
from cacheblend_rag.server.options import ServeOptions
from tests.engines.vllm.engines import SHAPE, save_model

YARN = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}}


def identity(tmp_path: Path, model: Any = None, **given: Any) -> str:
    """Return the fingerprint that an engine's processes and its client use."""
    launch = prepare(model, tmp_path, **given)
    told = launch.arguments["kv_transfer_config"]["kv_connector_extra_config"]["fingerprint"]
    assert told == launch.fingerprint.digest
    return str(told)


def test_quantisation_and_config_overrides_change_the_fingerprint(tmp_path: Path) -> None:
    stretched = {"hf_overrides": YARN}
    given: list[dict[str, Any]] = [{}, stretched, {"quantization": "fp8"}, stretched | {"quantization": "fp8"}]
    found = [identity(tmp_path, **each) for each in given]
    assert len(set(found)) == len(found)
    assert [identity(tmp_path, **each) for each in given] == found
    assert identity(tmp_path, hf_overrides={}, quantization=None, max_model_len=512) == found[0]
    assert len(set(map(len, found))) == 1


def test_an_override_function_changes_the_fingerprint_by_its_effect(tmp_path: Path) -> None:
    def stretched(config: Any) -> Any:
        config.rope_parameters = YARN["rope_parameters"]
        return config

    def again(config: Any) -> Any:
        return stretched(config)

    found = [identity(tmp_path, hf_overrides=each) for each in (stretched, again)]
    assert found[0] == found[1] != identity(tmp_path, hf_overrides=lambda config: config)


def test_a_model_larger_than_the_free_memory_is_refused_before_vllm_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable: 1024 kB\nSwapFree: 0 kB\n")
    monkeypatch.setattr(precision, "_MEMORY", tmp_path / "meminfo")
    with pytest.raises(ModelError, match=r"of memory in float32, and 1\.0 MiB are free"):
        prepare(None, tmp_path)
    assert identity(tmp_path, quantization="fp8")


def test_naming_the_method_of_quantised_files_keeps_the_fingerprint(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    save_model(LlamaConfig(**SHAPE, quantization_config={"quant_method": "awq", "bits": 4}), tmp_path / "model")
    given = {"skip_tokenizer_init": True, "model": tmp_path / "model"}
    assert identity(tmp_path, **given, quantization="awq_marlin") == identity(tmp_path, **given)


def test_the_server_uses_the_fingerprint_of_the_engine(tmp_path: Path) -> None:
    flags = ["--hf-overrides", '{"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}']
    args, launch = parse(ServeOptions(store=tmp_path), [*flags, "--quantization", "fp8"])
    assert (args.hf_overrides["rope_parameters"]["factor"], args.quantization) == (4.0, "fp8")
    assert launch.fingerprint.digest == identity(tmp_path, hf_overrides=args.hf_overrides, quantization="fp8")
    assert launch.fingerprint.digest != identity(tmp_path)


def test_the_requested_revision_of_a_hub_model_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def download(name: str, *, revision: str | None, cache_dir: str | None, **_: Any) -> str:
        asked.append((name, revision, cache_dir))
        return str(bundled_model_directory())

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    parse(ServeOptions(store=tmp_path, model="acme/model"), ["--revision", "v2", "--download-dir", "/models"])
    prepare("acme/model", tmp_path, revision="v3")
    assert asked == [("acme/model", "v2", "/models"), ("acme/model", "v3", None)]


@pytest.mark.parametrize(("given", "revision"), [({}, None), ({"revision": "v2"}, "v2")])
def test_a_hub_tokenizer_has_the_revision_that_vllm_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], revision: str | None
) -> None:
    from transformers import AutoTokenizer

    asked: list[Any] = []
    tokenizer = AutoTokenizer.from_pretrained(bundled_model_directory())
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *of, **how: (asked.append((*of, how)), tokenizer)[1])
    prepare(None, tmp_path, tokenizer="acme/tokens", **given)
    prepare(None, tmp_path, tokenizer="acme/tokens", tokenizer_revision="v9", **given)
    assert asked == [("acme/tokens", {"revision": revision}), ("acme/tokens", {"revision": "v9"})]


SPOKEN = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}[assistant] {{ strftime_now('%Y') }}"


def test_the_served_chat_template_determines_the_turns_of_a_conversation(tmp_path: Path) -> None:
    file = tmp_path / "spoken.jinja"
    file.write_text(SPOKEN)
    own = parse(ServeOptions(store=tmp_path), [])[1]
    assert own.lead == turn_lead(own.tokenizer)
    args, launch = parse(ServeOptions(store=tmp_path), ["--chat-template", str(file)])
    assert launch.tokenizer.decode(launch.lead).strip() == "[assistant]"
    assert launch.header_ids == own.header_ids
    assert "2024" in args.chat_template, "the date is a fixed one"
    with pytest.raises(InputError, match=r"nowhere\.jinja"):
        parse(ServeOptions(store=tmp_path), ["--chat-template", "nowhere.jinja"])
