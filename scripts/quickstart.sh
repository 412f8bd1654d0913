#!/usr/bin/env bash
# From a fresh clone to a served drafter: bash scripts/quickstart.sh [RECIPE] [--record]   (default: smollm2-quick)
#   makes .venv (VENV names another folder), installs requirements.txt, then runs scripts/quickstart.py:
#   models, prompts, the teacher's answers, six phases, the archive, the table, a real POST /draft.
# Needs Python 3.11-3.13 on Linux; time and memory of a run: data/results/quickstart-cost.json. A second run skips what
# is finished. Without an NVIDIA GPU, PIP_EXTRA_INDEX_URL may name the index of PyTorch's CPU builds: several GB less.
set -euo pipefail

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
# shellcheck source=scripts/environment.sh
source scripts/environment.sh
make_environment requirements.txt
recipe=smollm2-quick
if [[ $# -gt 0 && "$1" != -* ]]; then
    recipe="$1"
    shift
fi
exec "$VENV/bin/python" -m scripts.quickstart --recipe "$recipe" "$@"
