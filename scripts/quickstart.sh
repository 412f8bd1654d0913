#!/usr/bin/env bash
# From a fresh clone to a served drafter: bash scripts/quickstart.sh [RECIPE]   (default: smollm2-quick)
#   makes .venv (VENV names another folder), installs requirements.txt, then runs scripts/quickstart.py:
#   models, prompts, the teacher's answers, six phases, the archive, the table, a real POST /draft.
# Needs Python 3.11-3.13, about 6 GB of memory, 8 GB of disk (5 of them packages) and, on 2 cores, about a quarter
# of an hour. A second run skips what is finished.
set -euo pipefail

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
# shellcheck source=scripts/environment.sh
source scripts/environment.sh
make_environment requirements.txt
exec "$VENV/bin/python" -m scripts.quickstart --recipe "${1:-smollm2-quick}"
