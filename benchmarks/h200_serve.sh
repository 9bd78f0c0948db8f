#!/usr/bin/env bash
# What is measured of whole servers on H200 GPUs, part by part; parts that run at the same time need a GPU each:
#   benchmarks/h200_serve.sh TARGET_DIR OUT_DIR PROMPTS [PART...], parts as below
#   (CUDA_VISIBLE_DEVICES=0 benchmarks/h200_serve.sh T OUT P qwen3-8b qwen3-14b &
#    CUDA_VISIBLE_DEVICES=1 benchmarks/h200_serve.sh T OUT P calibrate mixed; wait
#    benchmarks/h200_serve.sh T OUT P smollm2 overhead pictures)
# Servers of a part stay on the GPU together (about 125 GiB for qwen3-8b). Results are written after every cell, and a second
# call goes on where the first one ended. Minutes with compiled kernels at hand: smollm2 5, qwen3-8b 12, qwen3-14b 5, mixed 3,
# overhead 2, prediction 3, calibrate 4; the first start of a machine compiles for two more. smollm2 and overhead wait for the
# host, so nothing else should run then; the others only need a GPU of their own.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=$1 out=$2 prompts=$3
shift 3
pair=(--target "$target" --draft examples/smollm2-135m-dspark)
mkdir -p "$out"
# SGLang's own prefill graphs take a minute of every start, and no prefill is timed here.
memory() { echo "--disable-prefill-cuda-graph --max-total-tokens $1"; }

run() { # name command...
    echo "== $1"
    "${@:2}" 2>"$out/$1.err" | tee -a "$out/$1.log" | grep -v '^{' | tail -n 60
}

serve() { run "$1" python3 -m benchmarks.serve "${@:2}" --out "$out/serve_$1.json"; }

for part in "${@:-smollm2 qwen3-8b mixed overhead pictures}"; do
    for name in $part; do
        case $name in
        smollm2) serve smollm2 "${pair[@]}" --resident 5 --own-static --log-interval 16 --server-args "$(memory 150000)" ;;
        qwen3-8b) serve qwen3-8b --model qwen3-8b --resident 4 --own-static --tokens 128 --input-len 32 --log-interval 4 \
            --levels middle,hopeless,low,high --batches 1,8,16,32,64,128,256 --server-args "$(memory 52000)" ;;
        qwen3-14b) serve qwen3-14b --model qwen3-14b --resident 3 --arms none,builtin-static,dspark-static,dspark-compact \
            --tokens 128 --input-len 32 --log-interval 4 --batches 32,64 --levels middle,low --server-args "$(memory 20000)" ;;
        mixed) run mixed python3 -m benchmarks.mixed "${pair[@]}" --costs 8 --passes 4 --tokens 128 --out "$out/mixed_h200.png" ;;
        overhead) run overhead python3 -m benchmarks.overhead "${pair[@]}" --batches 1,64 --repeats 15 --tokens 512 \
            --log-interval 16 --server-args "$(memory 150000)" --out "$out/overhead.json" ;;
        prediction) run prediction python3 -m benchmarks.prediction --model qwen3-8b --contexts 1024,8192,32768 --batches 1,4 \
            --tokens 128 --simulate middle --server-args "$(memory 140000)" --out "$out/prediction.json" ;;
        calibrate) run calibrate python3 -m dspark calibrate "${pair[@]}" --prompts "$prompts" --blocks 220000 \
            --concurrency 256 --server-args "$(memory 160000)" --out "$out/sts.json" ;;
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
