#!/usr/bin/env bash
# The part on HOST_3 of the plan hand-made, made by `cornplug plan`. Ends what it started when it is stopped.
set -euo pipefail

RUN_DIR=${RUN_DIR:-${XDG_RUNTIME_DIR:-/tmp}/cornplug-$(id -u)}

VLLM=${VLLM:-vllm}

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

start chat-vlm-pro-llm-chat-vlm-pro-siglip-EPD-h100-vllm-tp1-online-t0-6 env \
    CUDA_VISIBLE_DEVICES=0 \
    "$VLLM" serve google/gemma-3-27b-it \
    --host 0.0.0.0 \
    --port 8000 \
    --max-model-len 16384 \
    --max-num-seqs 256 \
    --max-num-batched-tokens 4096 \
    --gpu-memory-utilization 0.92 \
    --performance-mode interactivity \
    --max-num-queued-tokens 16384 \
    --shutdown-timeout 30

start chat-vlm-pro-llm-chat-vlm-pro-siglip-EPD-h100-vllm-tp1-online-t0-7 env \
    CUDA_VISIBLE_DEVICES=1 \
    "$VLLM" serve google/gemma-3-27b-it \
    --host 0.0.0.0 \
    --port 8001 \
    --max-model-len 16384 \
    --max-num-seqs 256 \
    --max-num-batched-tokens 4096 \
    --gpu-memory-utilization 0.92 \
    --performance-mode interactivity \
    --max-num-queued-tokens 16384 \
    --shutdown-timeout 30

start chat-vlm-pro-llm-chat-vlm-pro-siglip-EPD-h100-vllm-tp1-online-t0-8 env \
    CUDA_VISIBLE_DEVICES=2 \
    "$VLLM" serve google/gemma-3-27b-it \
    --host 0.0.0.0 \
    --port 8002 \
    --max-model-len 16384 \
    --max-num-seqs 256 \
    --max-num-batched-tokens 4096 \
    --gpu-memory-utilization 0.92 \
    --performance-mode interactivity \
    --max-num-queued-tokens 16384 \
    --shutdown-timeout 30

start doc-qa-llm-doc-qa-siglip-EPD-h100-vllm-tp1-semi-online-t1-0 env \
    CUDA_VISIBLE_DEVICES=3 \
    "$VLLM" serve google/gemma-3-12b-it \
    --host 0.0.0.0 \
    --port 8003 \
    --max-model-len 16384 \
    --max-num-seqs 256 \
    --max-num-batched-tokens 8192 \
    --gpu-memory-utilization 0.92 \
    --shutdown-timeout 30

start doc-qa-llm-doc-qa-siglip-EPD-h100-vllm-tp1-semi-online-t1-1 env \
    CUDA_VISIBLE_DEVICES=4 \
    "$VLLM" serve google/gemma-3-12b-it \
    --host 0.0.0.0 \
    --port 8004 \
    --max-model-len 16384 \
    --max-num-seqs 256 \
    --max-num-batched-tokens 8192 \
    --gpu-memory-utilization 0.92 \
    --shutdown-timeout 30

start doc-qa-llm-doc-qa-siglip-EPD-h100-vllm-tp1-semi-online-t1-2 env \
    CUDA_VISIBLE_DEVICES=5 \
    "$VLLM" serve google/gemma-3-12b-it \
    --host 0.0.0.0 \
    --port 8005 \
    --max-model-len 16384 \
    --max-num-seqs 256 \
    --max-num-batched-tokens 8192 \
    --gpu-memory-utilization 0.92 \
    --shutdown-timeout 30

start doc-qa-llm-doc-qa-siglip-EPD-h100-vllm-tp1-semi-online-t1-3 env \
    CUDA_VISIBLE_DEVICES=6 \
    "$VLLM" serve google/gemma-3-12b-it \
    --host 0.0.0.0 \
    --port 8006 \
    --max-model-len 16384 \
    --max-num-seqs 256 \
    --max-num-batched-tokens 8192 \
    --gpu-memory-utilization 0.92 \
    --shutdown-timeout 30

start tts-llm-PD-h100-vllm-tp1-online-t2-0 env \
    CUDA_VISIBLE_DEVICES=7 \
    "$VLLM" serve google/gemma-3-12b-it \
    --host 0.0.0.0 \
    --port 8007 \
    --max-model-len 16384 \
    --max-num-seqs 256 \
    --max-num-batched-tokens 4096 \
    --gpu-memory-utilization 0.92 \
    --performance-mode interactivity \
    --shutdown-timeout 30

ready chat-vlm-pro-llm-chat-vlm-pro-siglip-EPD-h100-vllm-tp1-online-t0-6 answers http://127.0.0.1:8000/health
ready chat-vlm-pro-llm-chat-vlm-pro-siglip-EPD-h100-vllm-tp1-online-t0-7 answers http://127.0.0.1:8001/health
ready chat-vlm-pro-llm-chat-vlm-pro-siglip-EPD-h100-vllm-tp1-online-t0-8 answers http://127.0.0.1:8002/health
ready doc-qa-llm-doc-qa-siglip-EPD-h100-vllm-tp1-semi-online-t1-0 answers http://127.0.0.1:8003/health
ready doc-qa-llm-doc-qa-siglip-EPD-h100-vllm-tp1-semi-online-t1-1 answers http://127.0.0.1:8004/health
ready doc-qa-llm-doc-qa-siglip-EPD-h100-vllm-tp1-semi-online-t1-2 answers http://127.0.0.1:8005/health
ready doc-qa-llm-doc-qa-siglip-EPD-h100-vllm-tp1-semi-online-t1-3 answers http://127.0.0.1:8006/health
ready tts-llm-PD-h100-vllm-tp1-online-t2-0 answers http://127.0.0.1:8007/health

echo "all of this host runs; Ctrl-C ends it"
while true; do
    for name in "${names[@]}"; do
        still_running "$name" || exit 1
    done
    sleep 2
done
