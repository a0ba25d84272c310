# Source this in bash: the engines of this archive, and its cornplug. A checkout goes in front: PYTHONPATH=$PWD:$PYTHONPATH
engines=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PYTHONPATH=$engines/tree:$engines/site PATH=$engines/bin:$PATH
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 TOKENIZERS_PARALLELISM=false
export VLLM_USE_FLASHINFER_SAMPLER=0 # FlashInfer is not in the archive
CORNPLUG_SGLANG_PYTHON=$(command -v python3)
export CORNPLUG_SGLANG_PYTHON
