"""Language models that read from left to right: GPT-2, Llama and their kin, by the parts that a configuration names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention import Attention
from regard.engines.packed_linear import project
from regard.geometry import shape_of
from regard.masks import causal, window
from regard.models.parts import ARRANGEMENTS, Inputs, choose, embedded, embedding, norm_named, rows_of
from regard.models.places import reach
from regard.nn import (
    ACTIVATIONS,
    Block,
    Cache,
    Encoder,
    FeedForward,
    GatedFeedForward,
    MultiHeadAttention,
    Packed,
    Rotary,
    Shared,
    linear,
)
from regard.nn.dropout import dropout
from regard.nn.generate import Greedy, Sample, State, Strategy, follow, generate, stop_tokens
from regard.nn.loss import token_loss
from regard.scores import Dot


@dataclass(frozen=True)
class LanguageConfig:
    """A language model. The defaults are GPT-2's; Llama's kin have `rotary`, `norm="rms"`, `gated` and no `bias`.

    groups: key/value heads, as many as heads unless told otherwise. head_width: width / heads unless told otherwise.
    rotary: how q and k are turned by position; none is a learned table of `positions` rows.
    arrangement: "pre", "post" or "sandwich". norm: "layer", "rms", or "unit_rms" (1 + weight).
    windows: how many tokens the layers see, in turn, none for all: (4096, None) alternates, (4096,) is every layer.
    scale, softcap: of the scores. final_softcap: of the logits. embedding_scale: of the embedded tokens.
    attention_dropout: of the weights, dropout unless told otherwise.

    >>> from regard.models.language import LanguageConfig
    >>> LanguageConfig(vocabulary=100, width=32, layers=2, heads=4, hidden=64).norm
    'layer'
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    hidden: int
    groups: int | None = None
    head_width: int | None = None
    positions: int = 1024
    rotary: Rotary | None = None
    arrangement: str = "pre"
    norm: str = "layer"
    eps: float = 1e-5
    activation: str = "gelu_tanh"
    gated: bool = False
    bias: bool = True
    qkv_bias: bool | None = None
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    scale: float | None = None
    softcap: float | None = None
    final_softcap: float | None = None
    embedding_scale: float = 1.0
    tied: bool = True
    dropout: float = 0.0
    attention_dropout: float | None = None


class LanguageModel(nn.Module):
    """Token ids to the logits of the token that follows each: (B, N) to (B, N, vocabulary).

    Inputs are ids (B, N) with a (B, N) bool mask, packed ids, or a list of ids, whose logits come in the same form.
    Embeddings start from N(0, 0.02^2); a head that is not tied from N(0, 1 / width).

    >>> import torch
    >>> from regard.models.language import LanguageConfig, LanguageModel
    >>> model = LanguageModel(LanguageConfig(vocabulary=100, width=32, layers=2, heads=4, hidden=64)).eval()
    >>> model(torch.tensor([[5, 6, 7]])).shape
    torch.Size([1, 3, 100])
    >>> [len(tokens) for tokens in model.generate([torch.tensor([5, 6, 7]), torch.tensor([8])], limit=4)]
    [4, 4]
    """

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = embedding(config.vocabulary, config.width)
        self.position = None if config.rotary is not None else embedding(config.positions, config.width)
        norm = norm_named(config.norm, config.eps)
        self.stack = Encoder(_blocks(config), norm=None if config.arrangement == "post" else norm(config.width))
        self.head = None if config.tied else linear(config.width, config.vocabulary, bias=False)

    def forward(self, inputs: Inputs, mask: Tensor | None = None) -> Tensor | Packed | list[Tensor]:
        """Logits (B, N, vocabulary); of packed inputs packed, of a list a list."""
        rows = rows_of(inputs, mask).own()
        return rows.back(self.logits(self.hidden(rows.values, rows.positions, rows.shared)))

    def hidden(self, ids: Tensor, positions: Tensor, shared: Shared, caches: Sequence[Cache] | None = None) -> Tensor:
        """Ids (B, N) to hidden states (B, N, width)."""
        x = embedded(ids, self.embedding)
        if self.config.embedding_scale != 1:
            x = x * self.config.embedding_scale
        if self.position is not None:
            if not torch.compiler.is_compiling() and reach(positions) > self.config.positions:
                raise ValueError(
                    f"the model knows {self.config.positions} positions, but token {reach(positions)} came; "
                    "shorten the prompt or lower limit"
                )
            x = x + F.embedding(positions, self.position.weight)
        if self.config.dropout and self.training:
            x = dropout(x, self.config.dropout)
        return self.stack(x, shared=shared, caches=caches)

    @property
    def output_layer(self) -> nn.Embedding | nn.Linear:
        """The module whose weight gives the logits: the embedding, where that is tied."""
        return self.embedding if self.head is None else self.head

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (..., width) to logits (..., vocabulary)."""
        return self.capped(project(hidden, self.output_layer.weight))

    def capped(self, logits: Tensor) -> Tensor:
        """Logits within `final_softcap`, if there is one."""
        cap = self.config.final_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def loss(self, inputs: Packed, after: Tensor, *, smoothing: float = 0.0) -> Tensor:
        """The sum of the cross entropies of the tokens `after` each of the inputs (N,).

        Where sequences are shared with other processes, it is the sum over the tokens of this one.
        """
        whole = rows_of(inputs, batched=True)
        rows = whole.own()
        after = rows.beside(after.view(whole.values.shape)).flatten()
        return self.token_loss(self.hidden(rows.values, rows.positions, rows.shared).flatten(0, -2), after, smoothing)

    def token_loss(self, hidden: Tensor, after: Tensor, smoothing: float) -> Tensor:
        """The same of hidden states (N, width)."""
        weight = self.output_layer.weight
        return token_loss(hidden, weight, after, smoothing=smoothing, softcap=self.config.final_softcap)

    def begin(self, prompts: Tensor | Sequence[Tensor]) -> tuple[State, Tensor]:
        """A state to generate from, and the prompts as one tensor (R, n), filled up at the front."""
        rows = list(prompts)
        if not rows or any(row.dim() != 1 or not len(row) for row in rows):
            came = ", ".join(shape_of(row) for row in rows[:4]) or "none"
            raise ValueError(f"prompts must be ids (B, N), or a list of ids (n,) of at least one token, but are {came}")
        longest = max(map(len, rows))
        filler = torch.tensor([longest - len(row) for row in rows], device=rows[0].device)
        first = torch.stack([F.pad(row, (longest - len(row), 0)) for row in rows])
        caches = self.stack.caches()

        def forward(ids: Tensor, shared: Shared) -> Tensor:
            assert shared.positions is not None
            return self.logits(self.hidden(ids, shared.positions, shared, caches)[:, -1])

        return State(forward, caches, filler if bool(filler.any()) else None), first

    def generate(
        self, prompts: Tensor | Sequence[Tensor], *, limit: int = 64, strategy: Strategy | None = None,
        stop: int | Sequence[int] = (),
    ) -> list[Tensor]:  # fmt: skip
        """What follows each prompt, at most `limit` tokens, ending before a stop token; greedy unless told otherwise.

        Prompts are ids (B, N), or a list of ids of different lengths.
        """
        with torch.inference_mode():
            state, first = self.begin(prompts)
            return generate(state, first, strategy=strategy or Greedy(), limit=limit, stop=stop)

    def stream(
        self,
        prompt: Tensor,
        *,
        limit: int = 64,
        strategy: Greedy | Sample | None = None,
        stop: int | Sequence[int] = (),
    ) -> Iterator[int]:
        """The tokens that follow one prompt (n,), each as soon as it is there, ending before a stop token."""
        state, first = self.begin([prompt])
        stop = stop_tokens(stop)
        for token in follow(state, first, strategy or Greedy(), limit=limit, stop=stop):
            if (found := int(token)) in stop:
                return
            yield found


def _blocks(config: LanguageConfig) -> list[Block]:
    norm = norm_named(config.norm, config.eps)
    arrangement = choose("arrangement", config.arrangement, ARRANGEMENTS)
    activation = choose("activation", config.activation, ACTIVATIONS)
    feedforward = GatedFeedForward if config.gated else FeedForward
    d_head = config.head_width or config.width // config.heads
    # Layers that look as far share one description, and so its plans.
    described: dict[int | None, Attention] = {}
    dropped = config.dropout if config.attention_dropout is None else config.attention_dropout
    for back in config.windows or (None,):
        mask = causal() if back is None else causal() & window(back - 1, 0)
        described[back] = Attention(Dot(config.scale, config.softcap), mask, dropout=dropped)
    blocks = []
    for n in range(config.layers):
        attention = MultiHeadAttention(
            config.width,
            config.heads,
            groups=config.groups,
            d_head=d_head,
            attend=described[config.windows[n % len(config.windows)] if config.windows else None],
            rotary=config.rotary,
            query_norm=norm(d_head) if config.qk_norm else None,
            key_norm=norm(d_head) if config.qk_norm else None,
            bias=config.bias if config.qkv_bias is None else config.qkv_bias,
            output_bias=config.bias,
        )
        hidden = feedforward(config.width, config.hidden, activation=activation, bias=config.bias)
        blocks.append(
            Block(attention, hidden, residual=lambda: arrangement(config.width, norm, dropout=config.dropout))
        )
    return blocks
