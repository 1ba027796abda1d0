"""Position schemes: biases, tables and rotary embeddings."""

from regard.positions.biases import Bias, alibi, dense_bias, relative, shaw, t5
from regard.positions.encodings import learned, sinusoidal
from regard.positions.rotary import Dynamic, Linear, Llama3, LongRope, Scaling, Yarn, rotary

__all__ = [
    "Bias",
    "Dynamic",
    "Linear",
    "Llama3",
    "LongRope",
    "Scaling",
    "Yarn",
    "alibi",
    "dense_bias",
    "learned",
    "relative",
    "rotary",
    "shaw",
    "sinusoidal",
    "t5",
]
