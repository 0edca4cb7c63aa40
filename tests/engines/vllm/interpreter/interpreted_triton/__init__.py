"""A Triton backend named "cpu" that compiles nothing: with TRITON_INTERPRET=1 every kernel is interpreted.

On the path of vLLM's processes (tests/engines/vllm/test_runner_v2.py), it lets vLLM's second model runner, which wants Triton,
run where there is no GPU and no Triton for CPUs: all of that runner's own code, its kernels as Triton's interpreter runs them.
"""
