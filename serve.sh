#!/usr/bin/env bash
# Serve the packed model: bash serve.sh [flags of server.py; --help lists them]
#   MODEL_DIR (default: model/ beside this file), HOST (127.0.0.1), PORT (8000), VENV (.venv beside this file).
# Without an environment at VENV yet, a folder wheels/ beside this file is installed into a new one there, with no
# network; once there is an environment, wheels/ is not looked at.
# When the model is ready a curl line is printed, with real ids, to paste into another terminal.
set -euo pipefail

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

venv="${VENV:-$root/.venv}"

fail() {
    echo "serve.sh: $*" >&2
    exit 1
}

# ---- offline: no library may look anything up while serving
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1
export HF_HUB_DISABLE_TELEMETRY=1 TOKENIZERS_PARALLELISM=false

# ---- Python: the project's own environment where there is one
if [[ ! -x "$venv/bin/python" && (-e "$venv" || -L "$venv") ]]; then
    fail "$venv is there but holds no bin/python: remove it, or let VENV name another folder"
fi
if [[ -d "$root/wheels" && ! -e "$venv" ]]; then
    echo "installing from wheels/ into $venv"
    mkdir -p -- "$(dirname -- "$venv")" && mkdir -- "$venv" || fail "cannot make the folder $venv"
    # Set only now: what is removed is what was made here. Half an environment would pass for a whole one next time.
    trap 'rm -rf -- "$venv"' EXIT
    python3 -m venv "$venv" ||
        fail "python3 cannot make a virtual environment; install Python 3.11 or newer with its venv module"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-index \
        --find-links "$root/wheels" --require-hashes -r "$root/requirements-serve.txt" ||
        fail "wheels/ lacks what requirements-serve.txt pins; fill it: pip download -r requirements-serve.txt -d wheels"
    trap - EXIT
fi
python="$venv/bin/python"
[[ -x "$python" ]] || python="$(command -v python3)" || fail "python3 is missing; install Python 3.11 or newer"

missing="$("$python" -c '
import importlib.util, sys
print(*[name for name in sys.argv[1:] if importlib.util.find_spec(name) is None])
' torch transformers safetensors zstandard pydantic fastapi uvicorn prometheus_client)"
[[ -z "$missing" ]] ||
    fail "$python lacks ${missing// /, }; install with: $python -m pip install -r requirements-serve.txt"

# ---- server.py says in one sentence when the model is missing, and which command makes it
exec "$python" "$root/server.py" "$@"
