"""Drop-in replacements: `integrations.torch` for `nn.MultiheadAttention`, `integrations.transformers` for Hugging Face.

Import them by name; `import regard` does not depend on them.
"""
