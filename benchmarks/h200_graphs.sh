#!/usr/bin/env bash
# What is measured of kernels and CUDA graphs on one GPU, part by part (all without a third argument; about 40 minutes):
#   benchmarks/h200_graphs.sh TARGET_DIR OUT_DIR [smollm2 timeline qwen3-8b qwen3-14b kernels ids load tests]
# The machine should do nothing else meanwhile: small models wait for the host.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=$1 out=$2
shift 2
draft=examples/smollm2-135m-dspark
pair=(--target "$target" --draft "$draft")
mkdir -p "$out"

run() { # name command...
    echo "== $1"
    "${@:2}" 2>"$out/$1.err" | tee "$out/$1.log" | grep -v '^{' | tail -n 40
}

shapes() { # full windows are pinned: the built-in estimate may trim compact mode
    run "$1" python3 -m benchmarks.step --model "$1" --arms none,builtin,dspark,dspark-compact --tokens 40 --profile 20 \
        --batches 1,16,32,64,128 --rows "1:1,2,4,8;32:256;128:256,1024" --out "$out/$1.json"
}

for part in "${@:-smollm2 timeline qwen3-8b qwen3-14b kernels ids load tests}"; do
    for name in $part; do
        case $name in
        smollm2) run smollm2 python3 -m benchmarks.step "${pair[@]}" --arms none,builtin,dspark,dspark-compact --tokens 256 \
            --repeats 7 --profile 40 --rows "1:8;32:256" --out "$out/smollm2.json" ;;
        timeline) run timeline python3 -m benchmarks.timeline "${pair[@]}" --repeats 5 --tokens 256 --out "$out/timeline.png" ;;
        qwen3-8b | qwen3-14b) shapes "$name" ;;
        kernels) run kernels python3 -m benchmarks.kernels --bars --out "$out/kernels.json" ;;
        ids) run ids python3 -m benchmarks.opaque_ids "${pair[@]}" --parallel 7 --out "$out/ids.json" ;;
        load) run load python3 -m benchmarks.mixed_load "${pair[@]}" --minutes 8 --out "$out/load.json" ;;
        tests) run tests python3 -m pytest -q -m gpu tests/gpu ;;
        *) echo "no part $name" >&2; exit 2 ;;
        esac
    done
done
