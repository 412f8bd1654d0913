#!/usr/bin/env bash
# Install what the tests need and run them: bash scripts/test.sh [--slow] [arguments of pytest]
#   default: everything that is not marked slow, a few minutes on 2 cores; --slow: the marked rest as well.
set -euo pipefail

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
# shellcheck source=scripts/environment.sh
source scripts/environment.sh
make_environment requirements.txt requirements-dev.txt
marker=(-m "not slow")
if [[ "${1:-}" == "--slow" ]]; then
    marker=()
    shift
fi
"$VENV/bin/python" -m ruff check --quiet .
exec "$VENV/bin/python" -m pytest -rs "${marker[@]}" "$@"
