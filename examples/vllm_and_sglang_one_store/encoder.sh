#!/usr/bin/env bash
# One encoder service for both engines, which find it at its default socket.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/models.env"

exec cornplug encoder --model "$MODEL" --dtype "$DTYPE"
