"""Perplexity of a language model with weights of every format: what rounding costs.

    python -m tools.perplexity MODEL TEXT.gz [--tokens 50000] [--formats float32 int8 int4]

The first tokens of the text are split into windows, and every token of a window but the first is predicted from those
before it in the window. The figures of docs/how-to/freeze.md are those of SmolLM2-135M and the test split of
WikiText-2, in windows of 1,024 tokens.
"""

from __future__ import annotations

import argparse
import gzip
import math
import sys

import torch
import torch.nn.functional as F
from torch import Tensor

import regard as rg

CHARACTERS = 16  # at most so many per token are encoded


def read_ids(model: str, path: str, count: int) -> Tensor:
    """Return the first tokens of a text, plain or compressed."""
    with gzip.open(path, "rt", encoding="utf-8") if path.endswith(".gz") else open(path, encoding="utf-8") as file:
        ids = rg.models.tokenizer(model).encode(file.read(count * CHARACTERS), add_special_tokens=False).ids
    return torch.tensor(ids[:count])


@torch.inference_mode()
def perplexity(model: rg.models.LanguageModel, ids: Tensor, window: int) -> float:
    total, count = 0.0, 0
    for part in ids.split(window):
        logits = model(part[None])
        assert isinstance(logits, Tensor)
        total += F.cross_entropy(logits[0, :-1], part[1:], reduction="sum").item()
        count += len(part) - 1
    return math.exp(total / count)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.perplexity", description=__doc__)
    parser.add_argument("model", help="a folder or a GGUF file")
    parser.add_argument("text")
    parser.add_argument("--tokens", type=int, default=50_000)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--formats", nargs="+", default=["float32", "bfloat16", "int8", "int4"])
    options = parser.parse_args()
    ids, first = read_ids(options.model, options.text, options.tokens), None
    print(f"| weights | perplexity on {len(ids):,} tokens | change |\n| --- | ---: | ---: |")
    for weights in options.formats:
        model = rg.load(options.model, weights=weights)
        if not isinstance(model, rg.models.LanguageModel):
            parser.error(f"{options.model} is a {type(model).__name__}, not a LanguageModel")
        value = perplexity(model, ids, options.window)
        first = value if first is None else first
        print(f"| {weights} | {value:.3f} | {100 * (value / first - 1):+.2f} % |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
