#!/usr/bin/env bash
# Whole servers, calibration, load and kernel tests on two H200 of one host in half an hour, what matters most first:
#   benchmarks/h200_two_gpus.sh TARGET_DIR OUT_DIR PROMPTS
# Parts that only need a GPU of their own run on both at a time; then, with nothing beside them, those that wait for the
# host; then the rest. Each part has a limit, so that one that hangs does not cost the others; a second call goes on.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=$1 out=$2 prompts=$3

part() { # GPU seconds script part...
    local gpu=$1 limit=$2 script=$3
    shift 3
    local arguments=("$target" "$out")
    if [ "$script" = h200_serve.sh ]; then arguments+=("$prompts"); fi
    CUDA_VISIBLE_DEVICES=$gpu timeout --kill-after 30 "$limit" bash "benchmarks/$script" "${arguments[@]}" "$@"
}

part 0 960 h200_serve.sh qwen3-8b &
(
    part 1 660 h200_graphs.sh load
    part 1 300 h200_serve.sh calibrate
) &
wait
part 0 180 h200_serve.sh overhead
part 0 300 h200_serve.sh smollm2
part 0 240 h200_serve.sh prediction &
(
    part 1 300 h200_graphs.sh tests
    part 1 240 h200_serve.sh mixed
) &
wait
part 0 60 h200_serve.sh pictures
