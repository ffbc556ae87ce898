"""Own CUDA kernels for compute capability 7.0: sources, the workshop that builds and judges them, and their loader.

Nothing here imports torch when it is imported; building, checking and reporting work on a machine without a GPU.
"""
