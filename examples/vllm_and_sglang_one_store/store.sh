#!/usr/bin/env bash
# The host's store, started by hand to choose its size. Without it the first engine starts one.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/models.env"

exec cornplug serve-store --size "$STORE_SIZE"
