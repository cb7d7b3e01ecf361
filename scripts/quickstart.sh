#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs an unmodified vLLM on a tiny model, with the flag off and on, and shows what was patched and a cache hit that
# survives a restart.
#   ./scripts/quickstart.sh                   a new environment in .venv with a CPU build of vLLM
#   ./scripts/quickstart.sh --python PATH     the vLLM that is installed for this Python, which is not changed
#   ./scripts/quickstart.sh --keep            keep the working folder (logs, reports, cache)
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh

host_python="" options=()
while [ $# -gt 0 ]; do
    case "$1" in
        --python) [ $# -ge 2 ] || die "--python needs the path of a Python that has vLLM"; host_python="$2"; shift 2 ;;
        --keep) options+=(--keep); shift ;;
        *) die "usage: $0 [--python PATH] [--keep]" ;;
    esac
done

if [ -z "$host_python" ]; then
    VENV="${VENV:-.venv}"
    # An environment that test.sh made has more than is needed here.
    [ -f "$VENV/.ready" ] && "$VENV/bin/python" -c 'import vllm_omni_patch, vllm, pytest' 2>/dev/null \
        || make_venv "$VENV" lmcache
else
    "$host_python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("vllm") is None)' 2>/dev/null \
        || die "$host_python has no vLLM. Name the Python that 'vllm serve' runs with, or leave --python out"
    VENV="${VENV:-.venv-quickstart}"
    say "making $VENV on top of $host_python (its own packages are read, not changed)"
    rm -rf "$VENV"
    "$host_python" -m venv "$VENV"
    "$host_python" - "$VENV" <<'PY'
import pathlib, site, sys, sysconfig
venv = pathlib.Path(sys.argv[1])
inner = next(venv.glob("lib/python*/site-packages"))
folders = dict.fromkeys([*site.getsitepackages(), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
lines = [f"import site; site.addsitedir({str(folder)!r})" for folder in folders if pathlib.Path(folder).is_dir()]
(inner / "zz_host_packages.pth").write_text("\n".join(lines) + "\n")
PY
    "$VENV/bin/pip" install --quiet --editable .
fi

say "running the same vLLM command with the flag off and on"
exec "$VENV/bin/python" scripts/quickstart.py "${options[@]}"
