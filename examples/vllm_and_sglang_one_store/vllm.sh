#!/usr/bin/env bash
# vLLM. Further flags of vllm serve may follow.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/models.env"

export CUDA_VISIBLE_DEVICES=$VLLM_GPU
exec vllm serve "$MODEL" --dtype "$DTYPE" --port "$VLLM_PORT" --kv-connector cornplug --cornplug-app on-vllm "$@"
