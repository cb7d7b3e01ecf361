#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the loader's unit tests, in environments of their own, on the oldest wrapt that setup.cfg admits, on the last one
# before 2.0 (what OpenTelemetry's instrumentation allows) and on the newest.
#   ./scripts/test_wrapt.sh [release ...]
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh

floor="$(sed -n 's/^ *wrapt>=\([0-9.]*\).*/\1/p' setup.cfg)"
[ "$#" -gt 0 ] || set -- "==$floor" "<2" ">=2"
python="${VENV:-.venv}/bin/python"
[ -x "$python" ] || python="$(find_python)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
unset VLLM_OMNI_PATCH VLLM_OMNI_PATCH_STRICT VLLM_OMNI_PATCH_REPORT_DIR

for release in "$@"; do
    [[ "$release" == [0-9]* ]] && release="==$release"
    rm -rf "$work/venv"
    "$python" -m venv "$work/venv"
    "$work/venv/bin/pip" install --quiet --editable ".[test]" prometheus-client "wrapt$release"
    say "wrapt $("$work/venv/bin/python" -c 'import wrapt; print(wrapt.__version__)')"
    "$work/venv/bin/python" -m pytest -q tests/unit/test_{imports,loader,startup,status,strict,contract,metrics}.py
done
