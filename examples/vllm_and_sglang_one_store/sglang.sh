#!/usr/bin/env bash
# SGLang, from its own environment. Further flags of sglang serve may follow.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/models.env"

export CUDA_VISIBLE_DEVICES=$SGLANG_GPU
exec sglang serve --model-path "$MODEL" --dtype "$DTYPE" --port "$SGLANG_PORT" --enable-cornplug --cornplug-app on-sglang "$@"
