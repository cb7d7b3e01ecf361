# SPDX-License-Identifier: Apache-2.0
# Sourced by quickstart.sh and test.sh: makes a virtual environment with a CPU build of vLLM beside this package.

LMCACHE_RELEASE="${LMCACHE_RELEASE:-0.5.6}"

say() { printf '\n== %s\n' "$*"; }
die() { printf '\nerror: %s\n' "$*" >&2; exit 1; }

# find_python: a Python that vLLM supports, from $PYTHON or from PATH.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3.10 python3.14 python3}; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info < (3, 15))' 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    die "no Python 3.10 to 3.14 with venv and pip${PYTHON:+ at $PYTHON}. Install one (Debian, Ubuntu: apt install python3-venv)," \
        "or name it: PYTHON=/path/to/python3 $0"
}

# make_venv VENV EXTRAS: vLLM for CPU, LMCache and this package (editable) with EXTRAS in VENV; quick when done before.
make_venv() {
    local venv="$1" extras="$2" stamp python wanted
    stamp="$extras ${VLLM_RELEASE:-} $LMCACHE_RELEASE $(cat setup.cfg setup.py startup_files/* scripts/install_vllm.py | cksum)"
    if [ -n "${PYTHON:-}" ] && [ -x "$venv/bin/python" ]; then
        python="$(find_python)"
        wanted="$("$python" -c 'import sys; print(*sys.version_info[:2], sep=".")')"
        [ -x "$venv/bin/python$wanted" ] || die "$venv is not of Python $wanted. Name another folder: VENV=.venv-$wanted PYTHON=$PYTHON $0"
    fi
    [ "$(cat "$venv/.ready" 2>/dev/null)" = "$stamp" ] && return
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        python="$(find_python)"
        "$python" -m venv "$venv"
    fi
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check --upgrade pip
    say "installing vLLM for CPU into $venv (some minutes, once)"
    # LMCache has no build for Python 3.14 yet; without it the encoder cache works in memory and on disk.
    "$venv/bin/python" scripts/install_vllm.py "lmcache==$LMCACHE_RELEASE; python_version < '3.14'"
    say "installing vllm-omni-patch[$extras]"
    # Twice quiet: errors only. setuptools warns of editable installs in general.
    PYTHONWARNINGS=ignore "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-warn-conflicts \
        --editable ".[$extras]"
    printf '%s' "$stamp" > "$venv/.ready"
}
