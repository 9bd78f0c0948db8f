#!/usr/bin/env bash
# What is measured of whole servers on H200 GPUs, part by part; parts that run at the same time need a GPU each:
#   benchmarks/h200_serve.sh TARGET_DIR OUT_DIR [smollm2 qwen3-8b qwen3-14b mixed pictures]
#   (CUDA_VISIBLE_DEVICES=0 benchmarks/h200_serve.sh T OUT smollm2 mixed &
#    CUDA_VISIBLE_DEVICES=1 benchmarks/h200_serve.sh T OUT qwen3-8b; wait; benchmarks/h200_serve.sh T OUT pictures)
# Results are written after every cell, and a second call goes on where the first one ended. About 9 minutes for smollm2,
# 12 for a Qwen3 shape (half of that are server starts), 4 for mixed. An arm is the same model on the same GPU as the
# arms it is compared with, so the two halves may share a host, but not a GPU.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=$1 out=$2
shift 2
draft=examples/smollm2-135m-dspark
mkdir -p "$out"

run() { # name command...
    echo "== $1"
    "${@:2}" 2>"$out/$1.err" | tee -a "$out/$1.log" | grep -v '^{' | tail -n 60
}

for part in "${@:-smollm2 qwen3-8b mixed pictures}"; do
    for name in $part; do
        case $name in
        smollm2) run smollm2 python3 -m benchmarks.serve --target "$target" --draft "$draft" --log-interval 16 \
            --cross-check 32 --out "$out/serve_smollm2.json" ;;
        qwen3-8b | qwen3-14b) run "$name" python3 -m benchmarks.serve --model "$name" --tokens 192 --log-interval 4 \
            --batches 1,8,16,32,64,128,256 --out "$out/serve_$name.json" ;;
        mixed) run mixed python3 -m benchmarks.mixed --target "$target" --draft "$draft" --out "$out/mixed_h200.png" ;;
        pictures)
            files=("$out"/serve_smollm2.json "$out"/serve_qwen3-*.json)
            present=()
            for file in "${files[@]}"; do [ -f "$file" ] && present+=("$file"); done
            run verdict python3 -m benchmarks.serve --verdict "${present[@]}" --out "$out/serve_h200.json"
            run frontier python3 -m benchmarks.frontier "$out/serve_h200.json" --out "$out/frontier_h200.png"
            run trim python3 -m benchmarks.frontier "$out/serve_h200.json" --trim high,low --out "$out/trim_h200.png"
            ;;
        *) echo "no part $name" >&2; exit 2 ;;
        esac
    done
done
