"""Pairs that are read into memory, applied to it, or made of it: on the CPU, and on CUDA devices."""
