#!/usr/bin/env bash
# One app's engine: engine.sh a | engine.sh b
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/models.env"

case ${1:-} in
a) model=$MODEL_A app=$APP_A port=$PORT_A gpu=$GPU_A ;;
b) model=$MODEL_B app=$APP_B port=$PORT_B gpu=$GPU_B ;;
*) echo "usage: engine.sh a|b [further flags of vllm serve]" >&2; exit 2 ;;
esac
shift
export CUDA_VISIBLE_DEVICES=$gpu
exec vllm serve "$model" --dtype "$DTYPE" --port "$port" --kv-connector cornplug --cornplug-app "$app" "$@"
