# What script/rehearse-gpu runs in its root: the archive is in /engines, stand-ins for CUDA's libraries in /stubs.
set -euo pipefail
. /engines/env.sh
lab=/engines/tree/devkit/gpu_pack/rehearsal
export LD_LIBRARY_PATH=/stubs
cd /engines/tree

python3 -m compileall -q -j 2 /engines/site || true
if python3 -c 'import socket; socket.create_connection(("192.0.2.1", 80), 2)' 2>/dev/null; then
    echo "rehearse-gpu: there is a network" >&2
    exit 1
fi
echo "rehearse-gpu: no network; $(python3 -c 'import torch, sys; print("Python", sys.version.split()[0], "torch", torch.__version__)')"
PYTHONPATH=$lab/nvml:$PYTHONPATH python3 $lab/vllm_config.py
[ ! -d /engines/site/sglang ] || PYTHONPATH=$lab/cuda:$PYTHONPATH python3 $lab/sglang_config.py

# From here on vLLM takes its CPU platform: by its version, and with packages of dev/ on the path. SGLang's kernels
# for a CPU are not in the archive.
unset CORNPLUG_SGLANG_PYTHON
python3 $lab/cpu_packages.py /tmp/cpu
export PYTHONPATH=/tmp/cpu:$CACHE/interpreter:$PYTHONPATH
export VLLM_USE_V2_MODEL_RUNNER=1 TRITON_INTERPRET=1 TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1
[ $# -gt 0 ] || set -- engines
script/test-gpu --rehearse --out /tmp/out "$@"
