#!/usr/bin/env bash
# Everything that the foundation measures on one GPU: the tests marked gpu, the demo, accept length against the built-in.
#   benchmarks/h200_foundation.sh TARGET_DIR PROMPTS_DIR OUT_DIR
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=$1 prompts=$2 out=$3
draft=examples/smollm2-135m-dspark
mkdir -p "$out"
python3 -m dspark doctor --model-path "$target" --speculative-draft-model-path "$draft" 2>&1 | tail -n 20
python3 -m dspark demo --target "$target" --server-args="--attention-backend fa3 --mem-fraction-static 0.5 --disable-cuda-graph" 2>&1 | tee "$out/demo.log" | tail -n 40
python3 -m benchmarks.ab_acceptance --target "$target" --draft "$draft" --prompts "$prompts" --per-set 34 --seeds 3 \
    --server-args="--attention-backend fa3 --mem-fraction-static 0.5 --disable-cuda-graph --max-running-requests 64" --out "$out/acceptance_h200.json" 2>"$out/acceptance.err" | tail -n 30
