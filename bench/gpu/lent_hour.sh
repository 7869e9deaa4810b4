#!/bin/bash
# One call on a lent GPU machine: unpack the bundle, build, check, measure, in under ten minutes.
#
#   build/gpu-bundle/lent_hour.sh --call 1 [other flags of python -m bench.gpu]
#
# Calls: `python -m bench.gpu --plan`. Results go to $OUT, else to ./gpu-results; with --resume
# those that lie there are gone on with. Only the machine's own python3 is used (GPU_PYTHON= for
# another); nothing is installed or downloaded.
set -euo pipefail
started=$SECONDS
here=$(cd "$(dirname "$0")" && pwd)
python=${GPU_PYTHON:-python3}
out=${OUT:-$PWD/gpu-results}
work=${BUNDLE_WORK:-/tmp/sgl-esft-gpu}
mkdir -p "$out" "$work"
if ! cmp -s "$here/manifest.json" "$work/manifest.json"; then
    "$python" -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="data")' \
        "$here/bundle.tar.xz" "$work"
    "$python" -m compileall -q -j 0 "$work/site" "$work/src" || true # or the first import is slow
    cp "$here/manifest.json" "$work/manifest.json"
fi
export PYTHONPATH="$work/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export ESFT_GPU_BUNDLE="$work/manifest.json"
# Its sources lie in no repository; the bundle's commit is theirs.
BENCH_COMMIT=$("$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["commit"])' "$work/manifest.json")
export BENCH_COMMIT GIT_CEILING_DIRECTORIES="$work"
# The bundle's operators are older than SGLang asks for, on purpose (manifest.json: unproved).
export SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1
export TVM_FFI_CACHE_DIR="$work/compiled" HF_HUB_OFFLINE=1
if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=name,memory.total,memory.free,driver_version --format=csv | tee "$out/nvidia-smi.csv"
fi
cd "$work/src"
# What unpacking took is of the same ten minutes.
minutes=$("$python" -c 'import sys; print(9.5 - float(sys.argv[1]) / 60)' $((SECONDS - started)))
"$python" -m bench.gpu --minutes "$minutes" --out "$out" "$@" 2>&1 | tee "$out/said-$(date +%H%M%S).txt"
