"""Tries the two packages as their users get them: the wheel, with the oldest and newest framework that they allow.

    python integrations/release_check.py                       # both packages: wheel, imports, tests with both ends
    python integrations/release_check.py langchain-cacheblend --only lowest --pytest -k standard

Everything else is borrowed from the environment that runs this (`make setup`). Nothing in that environment changes: what is tried
is installed into temporary folders in front of it. The newest versions come from the package index.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

HERE = Path(__file__).parent
# What must be of the same days as the oldest framework, since later ones ask for more of it.
BESIDE = {"langchain-core==1.4.7": ["langchain==1.3.9"]}
FRAMEWORKS = {"langchain-cacheblend": "langchain-core", "llama-index-cacheblend": "llama-index-core"}
SHOW = """
import importlib, pkgutil, sys
from importlib.metadata import version
package = importlib.import_module(sys.argv[1])
assert package.__file__.startswith(sys.argv[2]), package.__file__
names = [module.name for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    importlib.import_module(name)
for name in package.__all__:
    getattr(package, name)
print(f"  {len(names) + 1} modules and {len(package.__all__)} names of {version(sys.argv[3])} can be imported")
"""


def main() -> None:
    """Check what was asked for; the first failure ends it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help=f"{', '.join(FRAMEWORKS)} (default: both)")
    parser.add_argument("--only", choices=["wheel", "lowest", "newest"], help="one part (default: all three)")
    parser.add_argument("--pytest", nargs=argparse.REMAINDER, default=[], help="what follows goes to pytest")
    given = parser.parse_args()
    for name in given.packages or FRAMEWORKS:
        if name not in FRAMEWORKS:
            parser.error(f"{name} is none of {', '.join(FRAMEWORKS)}")
        project = tomllib.loads((HERE / name / "pyproject.toml").read_text("utf-8"))["project"]
        requirements = [Requirement(text) for text in project["dependencies"]]
        check_bounds(name, requirements)
        framework = next(each for each in requirements if each.name == FRAMEWORKS[name])
        if given.only in (None, "wheel"):
            check_wheel(name)
        if given.only in (None, "lowest"):
            run_tests(name, [pin := f"{framework.name}=={lowest(framework)}", *BESIDE.get(pin, [])], given.pytest)
        if given.only in (None, "newest"):
            run_tests(name, [str(framework)], given.pytest)


def lowest(requirement: Requirement) -> str:
    """Return the oldest version that a requirement allows."""
    return next(each.version for each in requirement.specifier if each.operator == ">=")


def check_bounds(name: str, requirements: list[Requirement]) -> None:
    """See that every dependency is bounded on both sides."""
    for each in requirements:
        operators = {part.operator for part in each.specifier}
        if not {">=", "<"} <= operators:
            sys.exit(f"{name}: {each} needs a lower and an upper bound in pyproject.toml")


def check_wheel(name: str) -> None:
    """Build the wheel, and import all that is in it from there."""
    print(f"{name}: wheel")
    package = name.replace("-", "_")
    with tempfile.TemporaryDirectory() as built, tempfile.TemporaryDirectory() as overlay:
        build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", built]
        subprocess.run(build, cwd=HERE / name, check=True, capture_output=True)
        (wheel,) = Path(built).glob("*.whl")
        install(overlay, [str(wheel)])
        if not (Path(overlay) / package / "py.typed").is_file():
            sys.exit(f"{name}: py.typed is not in the wheel, so type checkers would not look into it")
        show = [sys.executable, "-c", SHOW, package, overlay, name]
        subprocess.run(show, cwd=overlay, check=True, env={**os.environ, "PYTHONPATH": overlay})


def run_tests(name: str, wanted: list[str], arguments: list[str]) -> None:
    """Run the package's tests with other versions of its framework in front of those that are installed."""
    with tempfile.TemporaryDirectory() as overlay:
        install(overlay, wanted)
        env = {**os.environ, "PYTHONPATH": overlay}
        show = "import sys; from importlib.metadata import version; print(*(version(name) for name in sys.argv[1:]))"
        names = [Requirement(each).name for each in wanted]
        print(f"{name}: {' '.join(names)}", end=" ", flush=True)
        subprocess.run([sys.executable, "-c", show, *names], env=env, check=True)
        if name.startswith("llama-index"):  # the oldest version downloads NLTK's stop words; later ones bring them
            find = "import llama_index.core as core; print(core.__path__[0])"
            core = subprocess.run(
                [sys.executable, "-c", find], check=True, capture_output=True, text=True
            ).stdout.strip()
            env["NLTK_DATA"] = f"{core}/_static/nltk_cache"
        subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=HERE / name, env=env, check=True)


def install(overlay: str, wanted: list[str]) -> None:
    """Install packages, without what they depend on, into a folder."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", overlay]
    subprocess.run([*pip, *wanted], check=True)


if __name__ == "__main__":
    main()
