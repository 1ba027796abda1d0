"""The engines of this installation as targets, and the engine that a call selects."""

from __future__ import annotations

from torch import Tensor

from regard.attention import Attention
from regard.check.targets.target import Alignment, NotSupported, Target
from regard.engines.select import ENGINES, CannotCompute
from regard.masks import causal as causal_mask
from regard.masks import dense
from regard.scores import Dot

DENSE = {"reference", "flex"}  # these materialise the weights on a CPU

MAX_CASES = {"flex": 3}  # it is traced again for every shape
SELECTED = "selected"
UNSUPPORTED = {
    "sdpa": {
        "double-backward": "torch's fused kernel for CPUs cannot be differentiated twice",
        "forward-mode": "torch's fused kernel for CPUs has no forward mode",
    },
}


def engine(name: str, alignment: Alignment = "bottom-right") -> Target:
    """The target of one engine, or of the engine that a call selects ("selected").

    Calls that the engine cannot compute are not applicable.
    """
    chosen = None if name == SELECTED else name

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        scale: float | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        offset = 0 if alignment == "top-left" else None
        combined = None if mask is None else dense(mask)
        if causal:
            combined = causal_mask() if combined is None else combined & causal_mask()
        try:
            attend = Attention(score=Dot(scale=scale), mask=combined, dropout=dropout, offset=offset)
            return attend(q, k, v, engine=chosen)
        except CannotCompute as error:
            raise NotSupported("; ".join(error.reasons)) from None

    growth, setup = 2 if name in DENSE else 1, SETUP.format(name=chosen)
    return Target(
        name, attention, UNSUPPORTED.get(name, {}), alignment, growth, setup=setup, max_cases=MAX_CASES.get(name)
    )


SETUP = """\
import regard as rg

def attend(q, k, v, *, mask=None, causal=False, scale=None, dropout=0.0):
    combined = None if mask is None else rg.dense(mask)
    if causal:
        combined = rg.causal() if combined is None else combined & rg.causal()
    return rg.attention(q, k, v, score=rg.Dot(scale=scale), mask=combined, dropout=dropout, engine={name!r})"""


def installed_engines(device: str = "cpu") -> list[Target]:
    """Targets of the engine that a call selects and of the engines for a type of device."""
    other = "triton" if device == "cpu" else "native"
    return [engine(name) for name in (SELECTED, *ENGINES) if name != other]
