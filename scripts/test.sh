#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what the tests need into .venv, then checks style, types and docs, and runs the unit and the live tests.
#   ./scripts/test.sh              everything that CI runs
#   ./scripts/test.sh unit         style, types and unit tests
#   ./scripts/test.sh -m slow ...  further arguments go to pytest (this form runs pytest alone)
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh

VENV="${VENV:-.venv}"
make_venv "$VENV" lmcache,nvml,plots,docs,test,dev
bin="$VENV/bin"
unset VLLM_OMNI_PATCH VLLM_OMNI_PATCH_STRICT VLLM_OMNI_PATCH_REPORT_DIR
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}"

# vLLM imports Ray if it can, so Ray is installed beside the environment, for the slow tests. vLLM installs its other needs.
if [ "${1:-} ${2:-}" = "-m slow" ] && [ ! -d "$VENV/ray-for-tests/grpc_reflection" ]; then
    say "installing Ray and Ray Serve beside the environment for their tests (about 400 MB on disk)"
    "$bin/python" -m pip install --quiet --no-deps --upgrade --target "$VENV/ray-for-tests" ray==2.60.0 msgpack==1.2.4 \
        grpcio-reflection==1.78.0 pyarrow==26.0.1 \
        || echo "cannot install Ray: its tests are skipped"
fi
if [ "${1:-} ${2:-}" = "-m slow" ] && [ ! -f "$VENV/proxy-for-tests/disagg_epd_proxy.py" ]; then
    say "fetching vLLM's example proxy and torchvision beside the environment for their tests (30 MB)"
    "$bin/python" tests/support/epd_proxy.py || echo "cannot fetch them: their tests are skipped"
fi

case "${1:-all}" in
    -*) exec "$bin/python" -m pytest "$@" ;;
    all|unit) ;;
    *) die "usage: $0 [unit | pytest options]" ;;
esac

# The encoder-cache tests talk to a real Redis server where there is one.
if [ "${1:-all}" = all ] && ! command -v redis-server >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing redis-server for the remote-storage tests"
    { apt-get update -qq && apt-get install -y -qq redis-server; } >/dev/null 2>&1 || echo "cannot install redis-server: its tests are skipped"
fi

# Tracers, which bring a wrapt of their own, lie beside the environment, and so does Triton: vLLM behaves otherwise where
# it can be imported.
if [ "${1:-all}" = all ] && [ ! -d "$VENV/neighbours-for-tests/ddtrace" ]; then
    say "installing OpenTelemetry's and Datadog's tracers beside the environment (50 MB on disk)"
    "$bin/python" -m pip install -qq --target "$VENV/neighbours-for-tests" --no-warn-conflicts ddtrace==4.16.0 \
        opentelemetry-distro==0.61b0 opentelemetry-instrumentation-fastapi==0.61b0 \
        || echo "cannot install tracers: their tests are skipped"
fi
if [ "${1:-all}" = all ] && [ ! -d "$VENV/triton-for-tests/triton" ]; then
    say "installing Triton beside the environment for the V2 runner's tests (about 1 GB on disk)"
    "$bin/python" -m pip install --quiet --no-deps --target "$VENV/triton-for-tests" triton==3.9.0 \
        || echo "cannot install Triton: the tests of the V2 runner are skipped"
fi

say "style and types"
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy"
say "documentation"
"$bin/python" scripts/generate_docs.py --check
"$bin/zensical" build --strict

if [ "${1:-all}" = unit ]; then
    exec "$bin/python" -m pytest -m "not slow" tests/unit
fi
exec "$bin/python" -m pytest -m "not slow" tests/unit tests/live
