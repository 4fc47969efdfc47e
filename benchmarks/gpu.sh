#!/usr/bin/env bash
# Everything that needs a GPU, in stages that each end in their time; lines and logs in $OUT (gpu-results):
#
#   benchmarks/gpu.sh [tests] [kernels] [serve] [http] [train] [sanitize]         without a name: the first five
#
# PYTHON is the interpreter (.venv's, else python3), SERVE_PEERS and TRAIN_PEERS the programs that time vLLM and the
# other trainers in the same run, LIMIT_stage a stage's seconds. Ends with 1 if a stage failed.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-gpu-results}
mkdir -p "$OUT"
if [ -z "${PYTHON:-}" ]; then PYTHON=.venv/bin/python; [ -x "$PYTHON" ] || PYTHON=python3; fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} PYTHONUNBUFFERED=1
export PYTHONPATH=$PWD:$PWD/serve:$PWD/kernels:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}
failed=0

# stage NAME SECONDS COMMAND…: its output in $OUT/NAME.log, the end of it shown
stage() {
    local name=$1 limit_name=LIMIT_$1 seconds=$2 begun=$SECONDS status
    shift 2
    timeout "${!limit_name:-$seconds}" "$@" > "$OUT/$name.log" 2>&1
    status=$?
    echo "== $name: exit code $status after $((SECONDS - begun)) s"
    grep -E '^(E  |FAILED|ERROR)' "$OUT/$name.log" | cut -c1-240 | head -30
    tail -n 12 "$OUT/$name.log" | cut -c1-240
    [ $status = 0 ] || failed=1
}

bench() { "$PYTHON" -m peftkit.cli.main bench "$@"; }
export -f bench
export PYTHON OUT

for name in "${@:-tests kernels serve http train}"; do for part in $name; do
    case $part in
        tests)
            workers=$("$PYTHON" -c 'import importlib.util as u; print("-n 6 --dist worksteal" if u.find_spec("xdist") else "")')
            stage tests-ops 300 "$PYTHON" -m pytest $workers -p no:cacheprovider -q -m gpu tests/ops
            stage tests-library 200 "$PYTHON" -m pytest $workers -p no:cacheprovider -q -m gpu tests/library
            stage tests-engine 400 "$PYTHON" -m pytest $workers -p no:cacheprovider -q -m gpu tests/engine --duration 180
            ;;
        kernels) stage kernels 560 bash -c 'bench kernels --quick --out "$OUT/kernels.jsonl"' ;;
        serve)
            stage serve 560 bash -c 'bench serve --limit 500 --only S1 --only S2 --only S3 --only S4 --only S5 \
                ${SERVE_PEERS:+--peer "$SERVE_PEERS"} --out "$OUT/serve.jsonl"'
            stage serve-profile 120 bash -c 'bench serve --only profile --profile --out "$OUT/serve-profile.jsonl"'
            ;;
        http) stage http 150 bash -c 'bench serve --http --quick --shape 1b --out "$OUT/http.jsonl"' ;;
        train)
            stage train 400 bash -c 'bench train --quick --levels full,offload,none --profile --limit 330 \
                ${TRAIN_PEERS:+--peers "$TRAIN_PEERS"} --out "$OUT/train.jsonl"'
            stage train-losses 170 bash -c 'bench train --shapes small:nf4:lora:2x512 --levels full --seconds 0 \
                --losses --longest --out "$OUT/train-losses.jsonl"'
            ;;
        sanitize)
            for tool in memcheck racecheck; do
                PYTORCH_NO_CUDA_MEMORY_CACHING=1 stage sanitize-$tool 280 compute-sanitizer --tool $tool \
                    --kernel-name-exclude kernel_substring=at:: --error-exitcode 1 "$PYTHON" benchmarks/sanitize.py
            done
            ;;
        *)
            echo "benchmarks/gpu.sh: no stage $part: tests, kernels, serve, http, train, sanitize" >&2
            exit 2
            ;;
    esac
done; done
exit $failed
