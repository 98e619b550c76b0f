"""The proof of the vLLM plugin on real engines: `python -m tests.e2e.vllm_cases`, `make e2e-vllm`."""
