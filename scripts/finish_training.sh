#!/usr/bin/env bash
# Run, in order, the phases that phase_log does not hold yet, then pack and evaluate: bash scripts/finish_training.sh RECIPE
#   A phase that was cut off goes on from its last checkpoint. Needs the teacher's answers (generate_teacher).
set -euo pipefail

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
recipe="${1:?usage: bash scripts/finish_training.sh RECIPE}"
python="${VENV:-$root/.venv}/bin/python"
[[ -x "$python" ]] || python=python3

"$python" train.py --recipe "$recipe" --phase all --resume
"$python" -m scripts.pack_model --recipe "$recipe"
"$python" -m scripts.evaluate --recipe "$recipe" prompt_lookup untrained "runs/$recipe/polish" "${MODEL_DIR:-model}"
