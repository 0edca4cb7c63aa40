"""Try this package with a vLLM that cannot be installed here: `make vllm-versions VERSION=0.33.0`.

A GPU's wheel is unpacked without its kernels into a separate folder, which precedes the installed vLLM on the path. Packages
that the wheel needs and this environment does not have are installed there, too. The kernels, if any, are those of the
installed CPU build: a version is tried on a CPU as far as its Python code goes. The results go into docs/versions.md.

    python -m tests.engines.vllm.try_version 0.33.0            # unpack, run the tests, note the result
    python -m tests.engines.vllm.try_version --installed       # the vLLM of this environment
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[3]
TABLE = ROOT / "docs" / "versions.md"
PLACE = ROOT / ".vllm-versions"
HERE = "tests/engines/vllm"
INTERPRETER = ROOT / HERE / "interpreter"
# The tests of interfaces, of the connector's steps in vLLM's code of either runner, of refusals and of pace.
_STEPS = ("interface", "steps", "fairness", "versions", "pace", "worker", "refusals")
STEPS = [f"{HERE}/test_{name}.py" for name in _STEPS]
ENGINES = {"V1": [f"{HERE}/test_parity.py", "-k", "qwen3 or chunked"], "V2": [f"{HERE}/test_runner_v2.py"]}
_KERNELS = (".so", ".h", ".hpp", ".cuh", ".inl", ".cu", ".cpp", ".pyd")


def unpack(version: str) -> Path:
    """Download a version's wheel and unpack its Python code; return the folder."""
    place = PLACE / version
    if not (place / "vllm").is_dir():
        place.mkdir(parents=True, exist_ok=True)
        wheels = PLACE / "wheels"
        download = [sys.executable, "-m", "pip", "download", f"vllm=={version}", "--no-deps", "--dest", str(wheels)]
        subprocess.run(download, check=True)
        (wheel,) = wheels.glob(f"vllm-{version}-*.whl")
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(place, [n for n in packed.namelist() if not n.endswith(_KERNELS)])
        wheel.unlink()
    return place


def borrow_kernels(place: Path) -> None:
    """Make an unpacked version use the installed CPU build's kernels, and mark it as a CPU version."""
    import vllm

    for kernels in Path(vllm.__file__).parent.glob("*.so"):
        link = place / "vllm" / kernels.name
        if not link.exists():
            link.symlink_to(kernels)
    for metadata in place.glob("vllm-*.dist-info/METADATA"):
        text = metadata.read_text(encoding="utf-8")
        metadata.write_text(re.sub(r"(?m)^(Version: [\d.]+)$", r"\1+cpu", text, count=1), encoding="utf-8")


def complete(place: Path) -> None:
    """Install the packages that the version imports and this environment does not have, by the wheel's list."""
    (metadata,) = place.glob("vllm-*.dist-info/METADATA")
    wanted = re.findall(r"(?m)^Requires-Dist: ([A-Za-z0-9_.-]+)", metadata.read_text(encoding="utf-8"))
    names = {re.sub(r"[-_.]+", "_", name).lower(): name for name in wanted}
    check = (
        "import cacheblend_rag.engines.vllm.worker, cacheblend_rag.engines.vllm.engine, cacheblend_rag.server.launch"
    )
    for _ in range(20):
        done = subprocess.run(
            [sys.executable, "-c", check], env=environment(place), capture_output=True, text=True, check=False
        )
        missing = re.search(r"No module named '([A-Za-z0-9_]+)", done.stderr)
        if done.returncode == 0 or missing is None:
            break
        name = names.get(missing[1].lower())
        if name is None:
            raise SystemExit(f"{missing[1]} is missing, and the wheel does not name it:\n{done.stderr[-2000:]}")
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(place), name]
        subprocess.run(install, check=True)


def environment(place: Path | None, **more: str) -> dict[str, str]:
    """Return the environment in which Python imports the vLLM of ``place``."""
    before = [str(place)] if place is not None else []
    path = [*before, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **more}


def run(tests: list[str], env: dict[str, str], log: Path) -> str:
    """Run tests; return the counts of their results in words."""
    results = log.with_suffix(".xml")
    with log.open("w", encoding="utf-8") as out:
        command = [sys.executable, "-m", "pytest", *tests, f"--junitxml={results}"]
        subprocess.run(command, env=env, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, check=False)
    suite = ElementTree.parse(results).getroot().find("testsuite")
    assert suite is not None
    total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    words = f"{total - skipped - failed} passed"
    return words + (f", {skipped} skipped" if skipped else "") + (f", **{failed} failed**" if failed else "")


def note(version: str, runner: str, what: str, result: str) -> None:
    """Write a row of the table, in place of an earlier row of the same version, runner and tests."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    start = f"| {version} | {runner} | {what} |"
    lines = [line for line in lines if not line.startswith(start)]
    first = next(i for i, line in enumerate(lines) if line.startswith("| version | runner |")) + 2
    end = next(i for i in range(first, len(lines)) if not lines[i].startswith("|"))
    table = sorted([*lines[first:end], f"{start} {result} | {today} |"])
    TABLE.write_text("\n".join([*lines[:first], *table, *lines[end:]]) + "\n", encoding="utf-8")
    print(f"{version} {runner}: {what}: {result}")  # noqa: T201


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", nargs="?")
    parser.add_argument("--installed", action="store_true", help="the vLLM of this environment")
    parser.add_argument(
        "--engines", action="store_true", help="real engines, too, with the installed CPU build's kernels"
    )
    chosen = parser.parse_args()
    PLACE.mkdir(exist_ok=True)
    place: Path | None = None
    if chosen.installed:
        from cacheblend_rag.engines.vllm.versions import installed_version

        name = str(installed_version())
    else:
        name = str(chosen.version)
        place = unpack(name)
        if chosen.engines:
            borrow_kernels(place)
        complete(place)
    borrowed = "" if chosen.installed else ", kernels of the installed CPU build"
    log = PLACE / f"{name}-steps.log"
    note(name, "V1 and V2", "interfaces, steps by the runners' own connector code", run(STEPS, environment(place), log))
    for runner, tests in ENGINES.items() if chosen.engines else ():
        what = f"engines on a CPU{borrowed}" + (", Triton interpreted" if runner == "V2" else "")
        note(name, runner, what, run(tests, environment(place), PLACE / f"{name}-{runner}.log"))


if __name__ == "__main__":
    main()
