#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the sdist and, from it, the wheel; installs the wheel alone and runs the unit tests against it, away from this
# checkout. The other packages come from the environment of test.sh, which has to be there.
#   ./scripts/test_wheel.sh [pytest options]       leaves both files in dist/
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh

VENV="$(realpath "${VENV:-.venv}")"
[ -x "$VENV/bin/python" ] || die "there is no $VENV; run ./scripts/test.sh first, or name it: VENV=/path $0"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
unset VLLM_OMNI_PATCH VLLM_OMNI_PATCH_STRICT VLLM_OMNI_PATCH_REPORT_DIR

say "building"
"$VENV/bin/python" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet build
rm -rf dist
"$work/venv/bin/python" -m build --outdir dist . > "$work/build.log" || { tail -20 "$work/build.log"; exit 1; }
ls dist

say "unit tests from the wheel alone"
site="$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
"$work/venv/bin/pip" install --quiet --no-deps dist/*.whl
# Last on the path, and its own startup files are not read: this package comes from the wheel.
"$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/zz_dependencies.pth"
mkdir "$work/tree"
# What looks at the checkout itself (docs, installs) has no place here.
cp -r tests startup_files setup.cfg "$work/tree"
cd "$work/tree"
"$work/venv/bin/python" -I -c 'import vllm_omni_patch as a; assert a.__file__.startswith("'"$site"'"), a.__file__'
"$work/venv/bin/python" -m pytest -m "not slow" --ignore tests/unit/test_docs.py --ignore tests/unit/test_install.py "$@" tests/unit
