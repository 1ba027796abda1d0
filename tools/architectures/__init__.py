"""Tiny random models of all architectures of Transformers: `regard` compared with `eager` and `sdpa`."""
