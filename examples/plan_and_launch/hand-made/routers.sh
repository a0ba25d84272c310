#!/usr/bin/env bash
# The routers of the plan hand-made, made by `cornplug plan`. Ends what it started when it is stopped.
set -euo pipefail

RUN_DIR=${RUN_DIR:-${XDG_RUNTIME_DIR:-/tmp}/cornplug-$(id -u)}

VLLM_ROUTER=${VLLM_ROUTER:-vllm-router}
HOST_1=${HOST_1:?address of host 1 of the plan}
HOST_2=${HOST_2:?address of host 2 of the plan}
HOST_3=${HOST_3:?address of host 3 of the plan}

mkdir -p "$RUN_DIR"
chmod 700 "$RUN_DIR"

running=()
names=()

finish() { # in the order opposite to that in which they were started
    trap - EXIT INT TERM
    local i
    for ((i = ${#running[@]} - 1; i >= 0; i--)); do
        kill -TERM "${running[i]}" 2>/dev/null || true
        wait "${running[i]}" 2>/dev/null || true
    done
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

start() { # start NAME COMMAND...
    local name=$1
    shift
    "$@" >"$RUN_DIR/$name.log" 2>&1 &
    running+=("$!")
    names+=("$name")
    echo "$name: process $!, log $RUN_DIR/$name.log"
}

still_running() { # still_running NAME: fails, with the end of its log, when it has ended
    local i
    for i in "${!names[@]}"; do
        if [[ ${names[i]} == "$1" ]] && ! kill -0 "${running[i]}" 2>/dev/null; then
            echo "$1 has ended; the end of its log:" >&2
            tail -n 40 "$RUN_DIR/$1.log" >&2
            return 1
        fi
    done
}

ready() { # ready NAME TEST...: waits until the test holds
    local name=$1 deadline=$((SECONDS + 1800))
    shift
    until "$@" >/dev/null 2>&1; do
        still_running "$name" || exit 1
        if ((SECONDS > deadline)); then
            echo "$name is not ready after 1800 s: see $RUN_DIR/$name.log" >&2
            exit 1
        fi
        sleep 1
    done
    echo "$name: ready"
}

answers() { # answers URL
    curl --fail --silent --max-time 2 "$1"
}

# Planned: chat-vlm-llm-chat-vlm-siglip-EPD-h100-vllm-tp1-online-t0 144/s
start router-1 "$VLLM_ROUTER" \
    --host 0.0.0.0 \
    --port 30000 \
    --prometheus-port 29000 \
    --worker-urls "http://${HOST_1}:8000" "http://${HOST_1}:8001" "http://${HOST_1}:8002" "http://${HOST_1}:8003" "http://${HOST_1}:8004" "http://${HOST_1}:8005" "http://${HOST_1}:8006" "http://${HOST_1}:8007" "http://${HOST_2}:8000" "http://${HOST_2}:8001" \
    --policy power_of_two

# Planned: chat-vlm-pro-llm-chat-vlm-pro-siglip-EPD-h100-vllm-tp1-online-t0 36/s
start router-2 "$VLLM_ROUTER" \
    --host 0.0.0.0 \
    --port 30001 \
    --prometheus-port 29001 \
    --worker-urls "http://${HOST_2}:8002" "http://${HOST_2}:8003" "http://${HOST_2}:8004" "http://${HOST_2}:8005" "http://${HOST_2}:8006" "http://${HOST_2}:8007" "http://${HOST_3}:8000" "http://${HOST_3}:8001" "http://${HOST_3}:8002" \
    --policy power_of_two

# Planned: doc-qa-llm-doc-qa-siglip-EPD-h100-vllm-tp1-semi-online-t1 15/s
start router-3 "$VLLM_ROUTER" \
    --host 0.0.0.0 \
    --port 30002 \
    --prometheus-port 29002 \
    --worker-urls "http://${HOST_3}:8003" "http://${HOST_3}:8004" "http://${HOST_3}:8005" "http://${HOST_3}:8006" \
    --policy power_of_two

ready router-1 answers http://127.0.0.1:30000/health
ready router-2 answers http://127.0.0.1:30001/health
ready router-3 answers http://127.0.0.1:30002/health

echo "all of this host runs; Ctrl-C ends it"
while true; do
    for name in "${names[@]}"; do
        still_running "$name" || exit 1
    done
    sleep 2
done
