# Sourced by quickstart.sh and test.sh: the virtual environment, made once and kept while the requirements stand.

VENV="${VENV:-$PWD/.venv}"

# make_environment FILE...: a virtual environment that holds what the requirement files pin.
make_environment() {
    local python="${PYTHON:-python3}" stamp="$VENV/.requirements" key file
    "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || {
        echo "needs Python 3.11, 3.12 or 3.13; name one: PYTHON=python3.11 bash $0" >&2
        exit 1
    }
    [[ -x "$VENV/bin/python" ]] || "$python" -m venv "$VENV"
    for file in "$@"; do
        key="$(sha256sum <"$file")"
        grep -qsF "$key" "$stamp" && continue
        echo "installing $file into $VENV"
        "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -r "$file"
        echo "$key" >>"$stamp"
    done
}
