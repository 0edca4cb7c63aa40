"""Tests `doctor` on the command line."""

from __future__ import annotations

import pytest

from cacheblend_rag.engines.models import SMOLLM2
from cacheblend_rag.errors import ModelError
from tests.command_line import as_json

pytestmark = pytest.mark.slow


def test_doctor_reports_gate_profile_bandwidths_and_estimates(run, model_dir, tmp_path):
    found = as_json(run("doctor", "--model", model_dir, "--store", tmp_path, "--json"))
    assert found["blended"] is True
    assert max(found["gate_errors"].values()) < found["gate_limit"]
    assert list(found["codecs"]) == ["int8"]
    assert all(0 < kl < found["codec_limit"] for kl in found["codecs"].values())
    assert found["profile_origin"].startswith("defaults")
    assert found["tiers"].keys() == found["estimates"].keys() == {"ram", "disk"}
    assert found["kv_bytes_per_token"] == 2 * 4 * 2 * 16 * 4  # K and V, layers, KV heads, head dim, fp32
    assert all(each[seconds] > 0 for each in found["estimates"].values() for seconds in ("blend_s", "full_s"))
    text = run("doctor", "--model", model_dir).stdout
    assert "blended" in text
    assert "not measured" in text


def test_doctor_prints_why_a_model_is_not_blended(run, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    from tests.conftest import byte_level

    tokenizer = byte_level()
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=2, n_positions=128)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    result = run("doctor", "--model", tmp_path)
    assert result.exit_code == 0, result.stderr
    assert "no: keys of layer 0 do not move" in result.stdout
    assert "served by ordinary prefill" in result.stderr


def test_a_missing_model_is_exit_code_4(run, tmp_path):
    result = run("doctor", "--model", tmp_path / "nowhere")
    assert result.exit_code == 4
    assert "nowhere" in result.stderr


@pytest.fixture
def opened(monkeypatch) -> list[str | None]:
    """The models that doctor opens from now on; doctor stops there."""
    names: list[str | None] = []

    def open_engine(chosen, store=None):
        names.append(chosen.model)
        raise ModelError("enough")

    monkeypatch.setattr("cacheblend_rag.cli.doctor.open_engine", open_engine)
    return names


@pytest.mark.parametrize(
    ("arguments", "model"),
    [
        ([], SMOLLM2),
        (["--calibrate", "--documents", "docs"], SMOLLM2),
    ],
)
def test_doctor_opens_the_default_model(run, opened, arguments, model):
    run("doctor", *arguments)
    assert opened == [model]


def test_doctor_on_a_store_opens_the_model_of_its_index(run, model_dir, documents, tmp_path, opened):
    run("index", documents, "--store", tmp_path / "s", "--model", model_dir, "--chunk-tokens", 40)
    run("doctor", "--store", tmp_path / "s")
    assert opened == [model_dir]


def test_a_tilde_in_the_store_path_is_expanded(run, model_dir, tmp_path, monkeypatch):
    measured = []
    (tmp_path / "acme").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("cacheblend_rag.calibrate.diagnose.measure_disk", measured.append)
    assert run("doctor", "--model", model_dir, "--store", "~/acme").exit_code == 0
    assert set(measured) == {tmp_path / "acme"}


def test_options_of_a_calibration_are_refused_without_calibrate(run, model_dir, documents):
    result = run("doctor", "--model", model_dir, "--documents", documents, "--margin", 1)
    assert result.exit_code == 2
    assert "--documents, --margin: only with --calibrate" in result.stderr
