"""Kernels in Triton. Importing them imports triton."""
