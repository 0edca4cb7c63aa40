#!/usr/bin/env bash
# Run this package's tests with the lowest llama-index-core it claims to work with. Everything else is borrowed from the
# environment that runs this: PYTHON (default: .venv of the repository). Usage: scripts/test_lowest.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-../../.venv/bin/python}
lowest=0.14.0
overlay=$(mktemp -d)
trap 'rm -rf "$overlay"' EXIT
# The lowest version downloads NLTK's stop words; later ones bring them.
NLTK_DATA=$("$python" -c 'import llama_index.core as core; print(core.__path__[0])' 2>/dev/null)/_static/nltk_cache
export NLTK_DATA
"$python" -m pip install --quiet --no-deps --target "$overlay" "llama-index-core==$lowest"
# In front of site-packages: PYTHONPATH wins over what is installed. The package calls itself 0.13.6 inside; its metadata is right.
export PYTHONPATH=$overlay
"$python" - "$lowest" "$overlay" <<'PY'
import sys
from importlib.metadata import version
import llama_index.core
assert version("llama-index-core") == sys.argv[1], version("llama-index-core")
assert llama_index.core.__file__.startswith(sys.argv[2]), llama_index.core.__file__
print("llama-index-core", sys.argv[1])
PY
"$python" -m pytest "$@"
