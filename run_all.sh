#!/usr/bin/env bash
# The one door: sets the environment up, then runs every notebook, the tests (test), JupyterLab (lab), a page of results (report) or the documentation (docs).
# Options: ./run_all.sh --help. Needs Python 3.11 or newer and, the first time, a network.
if [ -z "${BASH_VERSION:-}" ]; then # dash and other shells read no further
    echo "run_all.sh: this shell is not bash; use bash: bash run_all.sh" >&2
    exit 2
fi
set -euo pipefail

self=${BASH_SOURCE[0]}
while [ -L "$self" ]; do # what a symlink leads to; macOS has no readlink -f
    to=$(readlink -- "$self")
    case $to in /*) self=$to ;; *) self=$(dirname -- "$self")/$to ;; esac
done
here=$(CDPATH= cd -- "$(dirname -- "$self")" && pwd -P)
runner=$here/tools/runner.py # standard library only until it runs something, so it checks the words before any install

die() {
    printf 'run_all.sh: %s\n' "$*" >&2
    exit 1
}

# Python looks for modules in the current folder, with -c and -m: -I and -P (of 3.11) forbid it, so that nothing there is executed.
# usable PYTHON [MODULE]: PYTHON runs, is new enough, and has MODULE.
usable() {
    "$1" -I -c "import sys, ${2:-os}; sys.exit(sys.version_info < (3, 11))" >/dev/null 2>&1
}

find_python() {
    for name in python3.13 python3.12 python3.11 python3; do
        if usable "$name" ensurepip; then
            "$name" -I -c 'import sys; print(sys.executable)'
            return
        fi
    done
    die "needs Python 3.11 or newer with its module venv; python3.13, python3.12, python3.11 and python3 are not" \
        "(Debian, Ubuntu: apt install python3 python3-venv; macOS: brew install python)"
}

# What an install depends on: the Python, pyproject.toml, and where `import pfl_core` and `import pfl_papers` lead.
state() {
    "$1" -P - "$here" <<'PY'
import hashlib, importlib.util, pathlib, sys
found = map(importlib.util.find_spec, ("pfl_core", "pfl_papers"))
project = pathlib.Path(sys.argv[1], "pyproject.toml").read_bytes()
print(sys.version.split()[0], hashlib.sha256(project).hexdigest()[:16], sys.argv[1], *(spec and spec.origin for spec in found))
PY
}

# install WHAT...: uv takes half of pip's time. It does not know of an index that pip was given; there, and where uv fails, pip installs.
install() {
    export PIP_DISABLE_PIP_VERSION_CHECK=1
    if ! "$python" -I -m pip config list | grep -Eq '\.(index-url|no-index)=' && "$python" -I -m pip install -q uv; then
        UV_PYTHON="$python" "$python" -I -m uv pip install --compile-bytecode "$@" && return
        printf 'run_all.sh: uv did not manage that; now with pip\n'
    fi
    "$python" -I -m pip install "$@"
}

# The environment: the active one (conda's base is nobody's environment), else .venv here.
env=${VIRTUAL_ENV:-}
if [ -z "$env" ] && [ "${CONDA_DEFAULT_ENV:-}" != base ]; then
    env=${CONDA_PREFIX:-}
fi
if [ -n "$env" ]; then
    usable "$env/bin/python" || die "the active environment $env has no Python 3.11 or newer: deactivate it, or activate another"
    base=$env/bin/python
else
    env=$here/.venv
    base=$env/bin/python
    usable "$base" || base=$(find_python)
fi
python=$env/bin/python

for word in "$@"; do
    case $word in -h | --help) exec "$base" -P "$runner" --help ;; esac
done
extra=$("$base" -P "$runner" --check "$@") # test, docs, ray or nothing; a wrong word ends here with code 2

if [ "$base" != "$python" ]; then
    printf 'run_all.sh: making %s with %s\n' "$env" "$("$base" --version)"
    "$base" -I -m venv --clear "$env"
fi

stamp=$env/.pfl_core-installed
have=
if [ -f "$stamp" ]; then have=$(cat "$stamp"); fi
want=$(state "$python")
if [ "$have" != "$want $extra" ] && { [ -n "$extra" ] || [ "${have% *}" != "$want" ]; }; then
    printf 'run_all.sh: installing into %s (the first time some minutes)\n' "$env"
    "$python" -I -m pip --version >/dev/null 2>&1 || "$python" -I -m ensurepip
    (cd -- "$here" && install -e ".[notebooks${extra:+,$extra}]")
    printf '%s %s\n' "$(state "$python")" "$extra" >"$stamp"
fi

# One test opens a notebook in a browser: install Debian's where that is possible; elsewhere, without one, the test says so.
if [ "$extra" = test ] && [ "$(id -u)" = 0 ] && grep -qs '^ID=debian$' /etc/os-release && ! command -v chromedriver >/dev/null; then
    printf 'run_all.sh: installing chromium and its driver\n'
    { timeout 120 apt-get update -q && DEBIAN_FRONTEND=noninteractive timeout 300 apt-get install -qy chromium chromium-driver; } >/dev/null ||
        printf 'run_all.sh: that did not work; the test in a browser will be skipped\n'
fi

exec "$python" -P "$runner" "$@"
