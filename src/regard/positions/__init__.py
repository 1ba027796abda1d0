"""Where things are."""

from regard.positions.biases import Bias, alibi, dense_bias, relative, shaw, t5
