"""Blend options form one list, are checked in one place, and survive JSON."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_rag.blending.policies import POLICIES, policy
from cacheblend_rag.blending.profile import ModelProfile, load_profile, save_profile
from cacheblend_rag.blending.settings import HOW_NAMES, BlendSettings, FuseOptions, Quality, TextRange, TextRatio
from cacheblend_rag.errors import InputError

LAYERS = st.sets(st.integers(1, 200), min_size=1, max_size=4).map(lambda layers: tuple(sorted(layers)))
SETTINGS = st.builds(
    BlendSettings,
    ratio=st.none() | st.just("auto") | st.floats(0, 1),
    policy=st.none() | st.sampled_from(sorted(POLICIES)),
    check_layers=st.none() | LAYERS,
) | st.builds(BlendSettings, quality=st.sampled_from(get_args(Quality)))
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"ratio": -0.1}, "-0.1"),
    ({"ratio": 1.5}, "1.5"),
    ({"ratio": float("nan")}, "nan"),
    ({"ratio": "0.3"}, "'0.3'"),
    ({"ratio": True}, "True"),
    ({"policy": "best"}, "'best'"),
    ({"policy": ["hkvd"]}, "hkvd"),
    ({"check_layers": (3, 1)}, r"\(3, 1\)"),
    ({"check_layers": [2, 2]}, r"\[2, 2\]"),
    ({"check_layers": (-1,)}, "-1"),
    ({"check_layers": (0, 1)}, r"\(0, 1\)"),
    ({"check_layers": ()}, r"\(\)"),
    ({"check_layers": 1}, "is 1;"),
    ({"check_layers": "1"}, "'1'"),
    ({"check_layers": (1.0,)}, "1.0"),
    ({"check_layers": (True,)}, "True"),
    ({"quality": "best"}, "'best'"),
    ({"quality": ["high"]}, "high"),
    ({"quality": "fast", "ratio": 0.3}, "quality='fast' chooses ratio"),
    ({"quality": "full", "policy": "static"}, "quality='full' chooses policy"),
    ({"widths": (1.0,)}, "'widths'"),
]


@given(SETTINGS)
def test_options_survive_json(settings: BlendSettings) -> None:
    assert BlendSettings.from_params(json.loads(json.dumps(settings.to_params()))) == settings


@given(SETTINGS)
def test_a_profile_fills_in_unset_options_and_changes_nothing_else(settings: BlendSettings) -> None:
    profile = ModelProfile(0.05, "sink", (2,), (1.0,), text=TextRange(0.4, 0.1))
    resolved = profile.resolve(settings, num_layers=1000)
    filled = {name: getattr(profile if getattr(settings, name) is None else settings, name) for name in HOW_NAMES}
    assert (resolved.policy.name, resolved.check_layers) == (filled["policy"], filled["check_layers"])
    assert resolved.auto == (settings.ratio == "auto")
    assert profile.text is not None
    rule = TextRatio(0.05, profile.text.most_left_out)
    assert resolved.ratio == (rule if resolved.auto else filled["ratio"])
    assert len(resolved.widths) == len(resolved.check_layers)
    assert resolved.widths[-1] == 1
    assert resolved.quality == (None if settings.named else settings.quality or "high")


@given(SETTINGS)
def test_decisions_survive_json_and_pickle(settings: BlendSettings) -> None:
    decided = ModelProfile(0.05, "sink", (2,), (1.0,), text=TextRange(0.4, 0.1)).resolve(settings, num_layers=1000)
    assert FuseOptions.from_params(json.loads(json.dumps(decided.to_params()))) == decided
    assert pickle.loads(pickle.dumps(decided)) == decided


@pytest.mark.parametrize(
    "wrong",
    [
        {"ratio": "auto"},
        {"ratio": TextRatio(0.1, 0.5)},
        {"ratio": 1.1},
        {"check_layers": (2, 1)},
        {"check_layers": ()},
        {"widths": (1.0, 1.0)},
        {"widths": (0.0,)},
        {"widths": (float("nan"),)},
        {"widths": ("1",)},
        {"reuse": "all"},
        {"reuse": None},
    ],
)
def test_impossible_decisions_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        FuseOptions(**{"policy": policy("hkvd"), "ratio": 0.2, **wrong})


def test_a_ratio_or_a_rule_for_it_is_raised_and_never_lowered() -> None:
    fixed, ruled = FuseOptions(policy("hkvd"), 0.2), FuseOptions(policy("hkvd"), TextRatio(0.2, 0.5), auto=True)
    assert [fixed.at_least(ratio).ratio for ratio in (0.1, 0.4)] == [0.2, 0.4]
    assert [ruled.at_least(ratio).ratio for ratio in (0.1, 0.4)] == [TextRatio(0.2, 0.5), TextRatio(0.4, 0.5)]


def test_a_profile_against_blending_is_followed_unless_the_request_calls_for_a_blend() -> None:
    profile = ModelProfile(reuse="prefix")
    assert profile.resolve(BlendSettings(), 8).reuse == "prefix"
    assert profile.resolve(BlendSettings(quality="full"), 8).reuse == "off"
    for asked in ({"ratio": 0.3}, {"policy": "sink"}, {"check_layers": (1,)}, {"quality": "high"}, {"quality": "fast"}):
        assert profile.resolve(BlendSettings(**asked), 8).reuse == "chunks"  # type: ignore[arg-type]


def test_each_quality_resolves_to_the_profiles_settings() -> None:
    def resolved(profile: ModelProfile, quality: Quality) -> tuple[str, float, str]:
        found = profile.resolve(BlendSettings(quality=quality), 8)
        assert isinstance(found.ratio, float)
        return found.policy.name, found.ratio, found.reuse

    uncalibrated, calibrated = ModelProfile(), ModelProfile(0.05, "static", calibrated={"why": "made up"})
    assert resolved(uncalibrated, "high") == (ModelProfile.policy, ModelProfile.ratio, "chunks")
    assert resolved(uncalibrated, "fast") == (ModelProfile.policy, ModelProfile.fast, "chunks")
    assert resolved(calibrated, "high") == resolved(calibrated, "fast") == ("static", 0.05, "chunks")
    for quality, reuse in (("exact", "prefix"), ("full", "off")):
        assert resolved(uncalibrated, quality)[2] == reuse  # type: ignore[arg-type]
    assert ModelProfile.ratio > ModelProfile.fast


def test_a_ratio_given_to_the_engine_turns_blending_on(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEBLEND_HOME", str(tmp_path / "home"))
    save_profile(ModelProfile(reuse="prefix"), "0" * 32, tmp_path)
    assert load_profile("0" * 32, tmp_path).reuse == "prefix"
    assert load_profile("0" * 32, tmp_path, ratio=0.2).reuse == "chunks"


@pytest.mark.parametrize(("params", "named"), WRONG)
def test_a_wrong_option_value_is_named_in_the_error(params: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        BlendSettings.from_params(params)


@pytest.mark.parametrize("layers", [(8,), (1, 8), (10**30,)])
def test_a_layer_beyond_the_model_is_named_in_the_error(layers: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=f"{layers[-1]}.*layers 1 to 7"):
        ModelProfile().resolve(BlendSettings(check_layers=layers), num_layers=8)


def test_check_layers_may_be_a_list() -> None:
    assert BlendSettings(check_layers=[1, 3]) == BlendSettings(check_layers=(1, 3))  # type: ignore[arg-type]


def test_a_broken_profile_is_ignored(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEBLEND_HOME", str(tmp_path))
    good = {"ratio": 0.05, "check_layers": [2], "widths": [1.0]}
    file = tmp_path / "cacheblend.json"
    for wrong in ({"ratio": 2}, {"check_layers": [2, 1]}, {"widths": [1.0, 1.0]}, {"policy": "best"}, {"ratio": None}):
        file.write_text(json.dumps({**good, **wrong}))
        assert load_profile("0" * 32, tmp_path) == ModelProfile()
    file.write_text(json.dumps(good))
    assert load_profile("0" * 32, tmp_path).check_layers == (2,)
    with pytest.raises(InputError, match=r"1\.5"):
        load_profile("0" * 32, tmp_path, ratio=1.5)


def test_every_policy_has_its_registered_name() -> None:
    assert [policy(name).name for name in POLICIES] == list(POLICIES)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_without_static_deviations_falls_back_to_one_that_needs_none(name: str) -> None:
    each = policy(name)
    assert not policy(each.without_static).needs_static


def test_checking_options_needs_no_torch() -> None:
    code = (
        "import sys; from cacheblend_rag.blending.settings import BlendSettings; BlendSettings(0.1, 'hkvd', (1,));"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
