#!/usr/bin/env bash
# Run this package's tests with the lowest langchain-core it claims to work with, and a langchain of the same days. Everything
# else is borrowed from the environment that runs this: PYTHON (default: .venv of the repository).
# Usage: scripts/test_lowest.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-../../.venv/bin/python}
overlay=$(mktemp -d)
trap 'rm -rf "$overlay"' EXIT
"$python" -m pip install --quiet --no-deps --target "$overlay" langchain-core==1.4.7 langchain==1.3.9
# In front of site-packages: PYTHONPATH wins over what is installed.
export PYTHONPATH=$overlay
"$python" - "$overlay" <<'PY'
import sys
from importlib.metadata import version
import langchain_core
assert langchain_core.__file__.startswith(sys.argv[1]), langchain_core.__file__
print("langchain-core", version("langchain-core"), "langchain", version("langchain"))
PY
"$python" -m pytest "$@"
