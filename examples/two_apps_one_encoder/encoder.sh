#!/usr/bin/env bash
# One encoder service for both apps' models. Engines find it at its default socket.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/models.env"

exec cornplug encoder --model "$MODEL_A" --model "$MODEL_B" --dtype "$DTYPE"
