"""Policies of other packages are found by entry point or given as objects, and errors name unusable ones."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag.blending import policies
from cacheblend_rag.blending.policies import GROUP, POLICIES, Candidates, SelectionPolicy, policy
from cacheblend_rag.blending.profile import ModelProfile
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import InputError
from tests.blending.families import BLENDED, make_model
from tests.blending.prompts import Scene, engine_for

EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party_policy"
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put packages on the path, as an installer leaves them, with these entry points."""

    def put(package: str, points: dict[str, str]) -> None:
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"[{GROUP}]", *(f"{name} = {value}" for name, value in points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        monkeypatch.syspath_prepend(tmp_path)
        forget()

    def forget() -> None:
        policies._installed.cache_clear()
        policies._named.cache_clear()

    yield put
    monkeypatch.undo()
    forget()


@pytest.fixture
def example(install: Install, monkeypatch: pytest.MonkeyPatch) -> SelectionPolicy:
    """Install the example, and return its policy."""
    monkeypatch.syspath_prepend(EXAMPLE)
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    install(project["name"].replace("-", "_"), project["entry-points"][GROUP])
    from late_starts import LateStarts  # type: ignore[import-not-found]

    made: SelectionPolicy = LateStarts()
    return made


def test_the_example_policy_works_by_name_and_as_an_object_and_chooses_the_documented_tokens(
    example: SelectionPolicy,
) -> None:
    scene, ratio = Scene(), 0.2
    with engine_for(make_model(BLENDED["llama"]()), scene) as engine:
        engine.precompute(scene.chunks)

        def answer(settings: BlendSettings) -> tuple[Any, Any]:
            engine.reset_prefix_cache()
            seen: list[torch.Tensor] = []
            engine.on_first_logits = seen.append
            return engine.generate(scene.prompt, SamplingParams(1), settings), seen[0]

        lengths = [len(chunk.token_ids) for chunk in scene.chunks[1:]]
        places = [(number, at) for number, length in enumerate(lengths) for at in range(length)]
        count = round(ratio * len(places))
        want = sorted(sorted(places, key=lambda place: -(place[0] + 1) / (place[1] + 1))[:count])
        by_name, logits = answer(BlendSettings(ratio, "late-starts"))
        as_object, same = answer(BlendSettings(ratio, example))
        assert by_name.policy == as_object.policy == "late-starts"
        assert by_name.usage.recomputed_tokens == as_object.usage.recomputed_tokens == count
        assert torch.equal(logits, same)
        candidates = Candidates(
            torch.arange(len(places)), *(torch.tensor([place[at] for place in places]) for at in (0, 1))
        )
        assert [places[at] for at in example.select(candidates, count).nonzero().squeeze(1)] == want

        class Wanted(SelectionPolicy):
            name = "wanted"

            def score(self, candidates: Candidates) -> torch.Tensor:
                places = zip(candidates.chunk.tolist(), candidates.offset.tolist(), strict=True)
                return torch.tensor([place in want for place in places])

        torch.testing.assert_close(answer(BlendSettings(ratio, Wanted()))[1], logits, atol=1e-5, rtol=1e-5)
        full = answer(BlendSettings(quality="full"))[1]
        none = answer(BlendSettings(0.0, "full-reuse"))[1]
        for which in ("late-starts", example):
            torch.testing.assert_close(answer(BlendSettings(1.0, which))[1], full, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(answer(BlendSettings(0.0, which))[1], none, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(logits, full, atol=1e-3)
        assert not torch.allclose(logits, none, atol=1e-3)


def test_an_unknown_policy_name_is_refused_with_the_known_names_and_the_entry_point_group(
    example: SelectionPolicy,
) -> None:
    with pytest.raises(InputError, match=r"'best'; known ones: static, .*late-starts.*" + GROUP):
        BlendSettings(policy="best")


def test_a_policy_travels_as_a_registered_name(example: SelectionPolicy) -> None:
    for which in ("late-starts", example):
        params = BlendSettings(0.2, which).to_params()
        assert params == {"ratio": 0.2, "policy": "late-starts"}
        assert BlendSettings.from_params(params).policy == "late-starts"


def test_a_policy_object_unknown_to_other_processes_is_refused_with_the_way_to_register(
    example: SelectionPolicy,
) -> None:
    class Lonely(type(example)):  # type: ignore[misc]
        name = "lonely"

    for which, name in ((Lonely(), "lonely"), (type("Other", (type(example),), {})(), "late-starts")):
        settings = BlendSettings(0.2, which)
        for each in (settings, ModelProfile().resolve(settings, 8)):
            with pytest.raises(InputError, match=rf"'{name}'.*Register .*{GROUP}"):
                each.to_params()
    changed = type(example)()
    changed.power = 2  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="Register"):
        BlendSettings(0.2, changed).to_params()
    assert BlendSettings(0.2, policy("hkvd")).to_params()["policy"] == "hkvd"


def test_a_policy_object_needs_a_name_that_no_bundled_policy_has(example: SelectionPolicy) -> None:
    for name, said in (("", "no name"), (None, "no name"), ("hkvd", "called 'hkvd'")):
        with pytest.raises(InputError, match=said):
            BlendSettings(0.2, type("Mine", (type(example),), {"name": name})())


def test_names_of_bundled_policies_cannot_be_overridden(install: Install, example: SelectionPolicy) -> None:
    install("impostor", dict.fromkeys(POLICIES, "late_starts:LateStarts"))
    assert [type(policy(name)).__module__.startswith("cacheblend_rag.") for name in POLICIES] == [True] * len(POLICIES)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("not_there:Policy", "ModuleNotFoundError"),
        ("late_starts:Missing", "AttributeError"),
        ("json:dumps", "no SelectionPolicy of that name"),
        ("late_starts:LateStarts", "no SelectionPolicy of that name"),
    ],
)
def test_a_package_whose_policy_cannot_be_loaded_is_named(
    install: Install, example: SelectionPolicy, value: str, said: str
) -> None:
    install("broken_package", {"broken": value})
    assert BlendSettings(policy="broken").policy == "broken"  # checking options imports nothing
    with pytest.raises(InputError, match=rf"broken_package .*{said}"):
        policy("broken")


def test_two_packages_with_the_same_policy_name_are_both_named(install: Install, example: SelectionPolicy) -> None:
    install("second", {"late-starts": "late_starts:LateStarts"})
    with pytest.raises(InputError, match=r"(late.starts and second|second and late.starts)"):
        policy("late-starts")
