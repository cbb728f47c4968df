"""Tensors in memory, as the Rust half takes them: NumPy arrays, PyTorch tensors, and slices of both."""
