"""A Triton backend "cpu". vLLM's CPU build turns Triton on where a backend has this name, and with Triton its
model runner V2 (vllm/triton_utils/importing.py)."""
