"""Encode weights in two bytes each, as the decimal digits that a page prints; `static/digits.js` decodes them.

Weights have four significant digits down to 1e-6 and are multiples of 1e-9 below. Rounding once, to decimals, makes
every printed digit correct; a two-byte binary float would be rounded a second time when it is printed.

    code c < 1000                c e-9
    code c = 1000 + 9000 e + m   (1000 + m) 10^(e - 9),  m < 9000, e < 7
    code 64000                   a positive number below 0.5e-9
"""

from __future__ import annotations

import numpy as np

TINY = 64_000
LARGEST = 9.9994


def encode(numbers: np.ndarray) -> np.ndarray:
    """Encode numbers >= 0 as uint16 codes; return float32 if one of them is too large for a code.

    >>> import numpy as np
    >>> from regard.view.digits import encode
    >>> encode(np.array([0, 1e-12, 2.5e-7, 0.85142, 1])).tolist()
    [0, 64000, 250, 53514, 55000]
    """
    x = np.nan_to_num(numbers.astype(np.float64))
    if x.size == 0 or x.max() > LARGEST or x.min() < 0:
        return x.astype("<f4")
    power = np.floor(np.log10(np.maximum(x, 1e-6))) + 6
    power += np.rint(x * 10 ** (9 - power)) >= 10_000  # 0.99996 rounds to 1.000
    codes = 9000 * power + np.rint(x * 10 ** (9 - power))
    codes = np.where(x < 1e-6, np.rint(x * 1e9), codes)
    return np.where((x > 0) & (codes == 0), TINY, codes).astype("<u2")
