#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the unit tests on each Python from 3.10 to 3.14 that this machine has (on PATH or of pyenv), each in an
# environment of its own. On 3.15, which no vLLM supports yet, those of the installation and of activation.
#   ./scripts/test_pythons.sh                         tests that need torch are skipped
#   WITH="torch numpy" ./scripts/test_pythons.sh      further packages for the environments
#   ./scripts/test_pythons.sh PYTHON ... [-- PYTEST OPTIONS]
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh

pythons=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do pythons+=("$1"); shift; done
[ $# -eq 0 ] || shift
if [ "${#pythons[@]}" -eq 0 ]; then
    for minor in 10 11 12 13 14 15; do
        for candidate in "python3.$minor" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3."$minor".*/bin/python; do
            if "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then pythons+=("$candidate"); continue 2; fi
        done
        echo "no Python 3.$minor with venv and pip found"
    done
fi
[ "${#pythons[@]}" -gt 0 ] || die "no Python found"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
unset VLLM_OMNI_PATCH VLLM_OMNI_PATCH_STRICT VLLM_OMNI_PATCH_REPORT_DIR

failed=()
for python in "${pythons[@]}"; do
    version="$("$python" -c 'import platform; print(platform.python_version())')"
    say "Python $version"
    rm -rf "$work/venv"
    "$python" -m venv "$work/venv"
    # shellcheck disable=SC2086  # WITH holds several packages
    PYTHONWARNINGS=ignore "$work/venv/bin/python" -m pip install -qq --disable-pip-version-check \
        --editable ".[test]" prometheus-client ${WITH:-} || { failed+=("$version"); continue; }
    tests=(tests/unit)
    [[ "$version" != 3.15.* ]] || tests=(tests/unit/test_install.py tests/unit/test_startup.py)
    "$work/venv/bin/python" -m pytest -q -m "not slow" -p no:cacheprovider "${tests[@]}" "$@" || failed+=("$version")
done
[ "${#failed[@]}" -eq 0 ] || die "failed on ${failed[*]}"
