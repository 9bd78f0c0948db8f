#!/usr/bin/env bash
# Everything that the foundation measures on one GPU: the tests marked gpu, the demo, accept length against the built-in.
#   benchmarks/h200_foundation.sh TARGET_DIR PROMPTS_DIR OUT_DIR
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=$1 prompts=$2 out=$3
draft=examples/smollm2-135m-dspark
mkdir -p "$out"
python3 -m dspark doctor --model-path "$target" --speculative-draft-model-path "$draft" 2>&1 | tail -n 20
python3 -m pytest -q -m gpu tests/gpu 2>&1 | tail -n 5
for graphs in "" "--disable-cuda-graph"; do # with and without CUDA graphs
    python3 -m dspark demo --target "$target" --server-args="--mem-fraction-static 0.5 $graphs" 2>&1 | tee "$out/demo$graphs.log" | tail -n 16
done
python3 -m benchmarks.ab_acceptance --target "$target" --draft "$draft" --prompts "$prompts" --per-set 34 --seeds 3 \
    --server-args="--mem-fraction-static 0.5 --disable-cuda-graph --max-running-requests 64" --out "$out/acceptance_h200.json" 2>"$out/acceptance.err" | tail -n 30
