"""Drop-ins: `integrations.torch` for `nn.MultiheadAttention`, `integrations.transformers` for Hugging Face models.

Each is imported by name, so that `import regard` needs neither.
"""
