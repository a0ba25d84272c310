#!/usr/bin/env bash
# The part on HOST_2 of the plan four-services, made by `cornplug plan`. Ends what it started when it is stopped.
set -euo pipefail

RUN_DIR=${RUN_DIR:-${XDG_RUNTIME_DIR:-/tmp}/cornplug-$(id -u)}

PLAN_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
CORNPLUG=${CORNPLUG:-cornplug}
VLLM=${VLLM:-vllm}
HOST_2=${HOST_2:?address of host 2 of the plan}

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

start store "$CORNPLUG" serve-store \
    --socket "${RUN_DIR}/store.sock" \
    --size 64GiB
ready store test -S "${RUN_DIR}/store.sock"

# 3 of its 5 replicas share a device with another: one process
start siglip-of-12b-E-h100-cornplug-tp1x0.25-online-t1-0 env \
    CORNPLUG_CONFIG="${PLAN_DIR}/qos.toml" \
    CUDA_VISIBLE_DEVICES=5,6 \
    "$CORNPLUG" encoder \
    --model google/gemma-3-12b-it \
    --model google/gemma-3-27b-it \
    --device cuda \
    --host 0.0.0.0 \
    --port 8750 \
    --allow-anonymous \
    --names "${HOST_2}" \
    --socket "${RUN_DIR}/encoder-8750.sock" \
    --replicas 2 \
    --store-socket "${RUN_DIR}/store.sock"
ready siglip-of-12b-E-h100-cornplug-tp1x0.25-online-t1-0 answers http://127.0.0.1:8750/health

# Its encoders are on other hosts: clients ask those of routes.json, and send the rows (EncoderClient, as_vllm_part(by_value=True)).
start gemma-12b-PD-h100-vllm-tp1-fp8-semi-online-t0-6 env \
    CORNPLUG_CONFIG="${PLAN_DIR}/qos.toml" \
    CORNPLUG_ENGINE_SHARE_KV=false \
    CUDA_VISIBLE_DEVICES=0 \
    "$VLLM" serve google/gemma-3-12b-it \
    --host 0.0.0.0 \
    --port 8000 \
    --max-model-len 16384 \
    --max-num-seqs 256 \
    --max-num-batched-tokens 8192 \
    --gpu-memory-utilization 0.92 \
    --quantization fp8 \
    --dtype bfloat16 \
    --performance-mode interactivity \
    --scheduling-policy priority \
    --max-num-queued-tokens 40854 \
    --middleware cornplug.vllm_connector.admission.Admission \
    --kv-connector cornplug \
    --cornplug-app chat-vlm \
    --cornplug-store "${RUN_DIR}/store.sock" \
    --cornplug-encoder "${RUN_DIR}/encoder-8750.sock" \
    --enable-mm-embeds \
    --shutdown-timeout 30

start gemma-27b-PD-h100-vllm-tp1-fp8-online-t0-0 env \
    CORNPLUG_CONFIG="${PLAN_DIR}/qos.toml" \
    CORNPLUG_ENGINE_SHARE_KV=false \
    CUDA_VISIBLE_DEVICES=1 \
    "$VLLM" serve google/gemma-3-27b-it \
    --host 0.0.0.0 \
    --port 8001 \
    --max-model-len 16384 \
    --max-num-seqs 256 \
    --max-num-batched-tokens 4096 \
    --gpu-memory-utilization 0.92 \
    --quantization fp8 \
    --dtype bfloat16 \
    --performance-mode interactivity \
    --max-num-queued-tokens 16384 \
    --middleware cornplug.vllm_connector.admission.Admission \
    --kv-connector cornplug \
    --cornplug-app chat-vlm-pro \
    --cornplug-store "${RUN_DIR}/store.sock" \
    --cornplug-encoder "${RUN_DIR}/encoder-8750.sock" \
    --shutdown-timeout 30

start gemma-27b-PD-h100-vllm-tp1-fp8-online-t0-1 env \
    CORNPLUG_CONFIG="${PLAN_DIR}/qos.toml" \
    CORNPLUG_ENGINE_SHARE_KV=false \
    CUDA_VISIBLE_DEVICES=2 \
    "$VLLM" serve google/gemma-3-27b-it \
    --host 0.0.0.0 \
    --port 8002 \
    --max-model-len 16384 \
    --max-num-seqs 256 \
    --max-num-batched-tokens 4096 \
    --gpu-memory-utilization 0.92 \
    --quantization fp8 \
    --dtype bfloat16 \
    --performance-mode interactivity \
    --max-num-queued-tokens 16384 \
    --middleware cornplug.vllm_connector.admission.Admission \
    --kv-connector cornplug \
    --cornplug-app chat-vlm-pro \
    --cornplug-store "${RUN_DIR}/store.sock" \
    --cornplug-encoder "${RUN_DIR}/encoder-8750.sock" \
    --shutdown-timeout 30

start gemma-27b-PD-h100-vllm-tp1-fp8-online-t0-2 env \
    CORNPLUG_CONFIG="${PLAN_DIR}/qos.toml" \
    CORNPLUG_ENGINE_SHARE_KV=false \
    CUDA_VISIBLE_DEVICES=3 \
    "$VLLM" serve google/gemma-3-27b-it \
    --host 0.0.0.0 \
    --port 8003 \
    --max-model-len 16384 \
    --max-num-seqs 256 \
    --max-num-batched-tokens 4096 \
    --gpu-memory-utilization 0.92 \
    --quantization fp8 \
    --dtype bfloat16 \
    --performance-mode interactivity \
    --max-num-queued-tokens 16384 \
    --middleware cornplug.vllm_connector.admission.Admission \
    --kv-connector cornplug \
    --cornplug-app chat-vlm-pro \
    --cornplug-store "${RUN_DIR}/store.sock" \
    --cornplug-encoder "${RUN_DIR}/encoder-8750.sock" \
    --shutdown-timeout 30

start gemma-27b-PD-h100-vllm-tp1-fp8-online-t0-3 env \
    CORNPLUG_CONFIG="${PLAN_DIR}/qos.toml" \
    CORNPLUG_ENGINE_SHARE_KV=false \
    CUDA_VISIBLE_DEVICES=4 \
    "$VLLM" serve google/gemma-3-27b-it \
    --host 0.0.0.0 \
    --port 8004 \
    --max-model-len 16384 \
    --max-num-seqs 256 \
    --max-num-batched-tokens 4096 \
    --gpu-memory-utilization 0.92 \
    --quantization fp8 \
    --dtype bfloat16 \
    --performance-mode interactivity \
    --max-num-queued-tokens 16384 \
    --middleware cornplug.vllm_connector.admission.Admission \
    --kv-connector cornplug \
    --cornplug-app chat-vlm-pro \
    --cornplug-store "${RUN_DIR}/store.sock" \
    --cornplug-encoder "${RUN_DIR}/encoder-8750.sock" \
    --shutdown-timeout 30

# Start your own server of a speech server of yours here; it is planned for port 8005.

# Start your own server of a speech server of yours here; it is planned for port 8006.

ready gemma-12b-PD-h100-vllm-tp1-fp8-semi-online-t0-6 answers http://127.0.0.1:8000/health
ready gemma-27b-PD-h100-vllm-tp1-fp8-online-t0-0 answers http://127.0.0.1:8001/health
ready gemma-27b-PD-h100-vllm-tp1-fp8-online-t0-1 answers http://127.0.0.1:8002/health
ready gemma-27b-PD-h100-vllm-tp1-fp8-online-t0-2 answers http://127.0.0.1:8003/health
ready gemma-27b-PD-h100-vllm-tp1-fp8-online-t0-3 answers http://127.0.0.1:8004/health

echo "all of this host runs; Ctrl-C ends it"
while true; do
    for name in "${names[@]}"; do
        still_running "$name" || exit 1
    done
    sleep 2
done
