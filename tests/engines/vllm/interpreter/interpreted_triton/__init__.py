"""A Triton backend named "cpu" that compiles nothing: with TRITON_INTERPRET=1 every kernel is interpreted.

On the path of vLLM's processes (tests/engines/vllm/test_runner_v2.py), it lets vLLM's second model runner, which needs Triton,
run without a GPU and without Triton for CPUs. All of the runner's code runs, and Triton's interpreter runs its kernels.
"""
