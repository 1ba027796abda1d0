"""Causal language models: GPT-2, Llama and related architectures, selected by a configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention import Attention
from regard.engines.packed_linear import project
from regard.geometry import format_shape
from regard.masks import causal, window
from regard.models.components import ARRANGEMENTS, choose, embed_tokens, make_embedding, norm_factory
from regard.models.config_fields import computed_field, cycle, optional_count, per_layer, same_as
from regard.models.inputs import Inputs, prepare_inputs
from regard.models.position_embeddings import table_length
from regard.nn import (
    ACTIVATIONS,
    Block,
    Encoder,
    Experts,
    FeedForward,
    GatedDeltaNet,
    GatedFeedForward,
    LatentAttention,
    LayerContext,
    LogitsProcessor,
    MultiHeadAttention,
    OutputGate,
    Packed,
    Rotary,
    Routing,
    TokenNorm,
    linear,
)
from regard.nn.dropout import dropout
from regard.nn.experts import CHOSEN
from regard.nn.generate import GenerationState, Greedy, Sample, Strategy, generate, generate_steps, stop_tokens
from regard.nn.loss import token_loss
from regard.nn.recurrent import LayerCache
from regard.scores import Dot


@dataclass(frozen=True)
class LatentSizes:
    """Sizes of `nn.LatentAttention` in a language model; d_head is that of the model.

    >>> from regard.models import LanguageConfig, LanguageModel, LatentSizes
    >>> latent = LatentSizes(d_latent=16, d_rotary=4, d_value=8)
    >>> config = LanguageConfig(vocabulary=100, d_model=32, layers=2, heads=4, d_hidden=64, bias=False, latent=latent)
    >>> type(LanguageModel(config).stack.layers[0].attention).__name__
    'LatentAttention'
    """

    d_latent: int
    d_rotary: int
    d_value: int
    d_query_latent: int | None = None


@dataclass(frozen=True)
class DeltaSizes:
    """Sizes of `nn.GatedDeltaNet` in a language model.

    >>> from regard.models import DeltaSizes, LanguageConfig, LanguageModel
    >>> delta = DeltaSizes(heads=2, value_heads=4, d_head=8, d_value=8)
    >>> sizes = {"vocabulary": 100, "d_model": 32, "layers": 4, "heads": 4, "d_hidden": 64}
    >>> model = LanguageModel(LanguageConfig(**sizes, delta=delta, delta_layers=(True, True, True, False)))
    >>> [type(layer.attention).__name__ for layer in model.stack.layers[2:]]
    ['GatedDeltaNet', 'MultiHeadAttention']
    """

    heads: int
    value_heads: int
    d_head: int
    d_value: int
    kernel_size: int = 4


@dataclass(frozen=True)
class LanguageConfig:
    """Configuration of a causal language model. The defaults are GPT-2's.

    Models like Llama set `rotary`, `norm="rms"`, `gated=True` and `bias=False`.

    kv_heads: number of key/value heads, `heads` by default. d_head: d_model / heads by default.
    rotary: rotary embedding of q and k; None means a learned table of `positions` rows.
    layer_rotary: rotary embeddings, cycled over the layers, instead of `rotary`; None is a layer without positions.
    arrangement: "pre", "post", "sandwich" or "output". norm: "layer", "rms", or "unit_rms" (1 + weight).
    bias: of all projections, unless `qkv_bias` or `output_bias` are given for those of the attention.
    qk_norm: whether to normalise q and k; qk_norm_span: each "head", or all heads of a "token" together.
    windows: sliding-window sizes, cycled over the layers; None is no limit: (4096, None) alternates between the two.
    sinks: whether each head has a learned sink logit, which takes weight and gives no value (gpt-oss).
    experts: number of `nn.Experts` per layer, 0 for a feed-forward layer; each token uses `experts_per_token`.
    gate_limit: `limit` of the experts. routing: how they are chosen. d_expert: width of an expert, d_hidden by default.
    d_shared: width of the feed-forward layer that all tokens use in addition, 0 for none; `shared_gate` gates it.
    dense_layers: which layers have a feed-forward layer instead of experts, cycled over the layers.
    latent: sizes of a multi-head latent attention (DeepSeek). output_gate: a gate on the heads' outputs (Qwen3-Next).
    delta, delta_layers: sizes of a gated DeltaNet, and which layers have it instead of attention, cycled.
    scale, softcap: of the scores. final_softcap: of the logits. embedding_scale: factor of the token embeddings.
    attention_dropout: dropout of attention weights, `dropout` by default.

    >>> from regard.models.language import LanguageConfig
    >>> LanguageConfig(vocabulary=100, d_model=32, layers=2, heads=4, d_hidden=64).norm
    'layer'
    """

    vocabulary: int
    d_model: int
    layers: int
    heads: int
    d_hidden: int
    kv_heads: int | None = same_as("heads")
    d_head: int | None = computed_field(lambda config: config.d_model // config.heads)
    positions: int = 1024
    rotary: Rotary | None = None
    layer_rotary: tuple[Rotary | None, ...] = per_layer(())
    arrangement: str = "pre"
    norm: str = "layer"
    eps: float = 1e-5
    activation: str = "gelu_tanh"
    gated: bool = False
    bias: bool = True
    qkv_bias: bool | None = same_as("bias")
    output_bias: bool | None = same_as("bias")
    qk_norm: bool = False
    qk_norm_span: str = "head"
    windows: tuple[int | None, ...] = per_layer(())
    sinks: bool = False
    experts: int = optional_count(0)
    experts_per_token: int = 1
    gate_limit: float | None = None
    routing: Routing = CHOSEN
    d_expert: int | None = same_as("d_hidden")
    d_shared: int = optional_count(0)
    shared_gate: bool = False
    dense_layers: tuple[bool, ...] = per_layer(())
    latent: LatentSizes | None = None
    output_gate: bool = False
    delta: DeltaSizes | None = None
    delta_layers: tuple[bool, ...] = per_layer(())
    scale: float | None = None
    softcap: float | None = None
    final_softcap: float | None = None
    embedding_scale: float = 1.0
    tied: bool = True
    dropout: float = 0.0
    attention_dropout: float | None = same_as("dropout")

    @property
    def rotaries(self) -> tuple[Rotary | None, ...]:
        """The rotary embedding of every layer."""
        return cycle(self.layer_rotary or (self.rotary,), self.layers)


class LanguageModel(nn.Module):
    """Next-token logits: ids (B, N) to (B, N, vocabulary).

    Inputs are ids (B, N) with a (B, N) bool mask, packed ids, or a list of ids; the logits have the same form.
    Embeddings start from N(0, 0.02^2), an untied head from N(0, 1 / d_model).

    >>> import torch
    >>> from regard.models.language import LanguageConfig, LanguageModel
    >>> model = LanguageModel(LanguageConfig(vocabulary=100, d_model=32, layers=2, heads=4, d_hidden=64)).eval()
    >>> model(torch.tensor([[5, 6, 7]])).shape
    torch.Size([1, 3, 100])
    >>> [len(tokens) for tokens in model.generate([torch.tensor([5, 6, 7]), torch.tensor([8])], max_new_tokens=4)]
    [4, 4]
    """

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = make_embedding(config.vocabulary, config.d_model)
        learned_positions = config.rotary is None and not config.layer_rotary
        self.position = make_embedding(config.positions, config.d_model) if learned_positions else None
        norm = norm_factory(config.norm, config.eps)
        self.stack = Encoder(_build_blocks(config), norm=None if config.arrangement == "post" else norm(config.d_model))
        self.head = None if config.tied else linear(config.d_model, config.vocabulary, bias=False)

    def forward(self, inputs: Inputs, mask: Tensor | None = None) -> Tensor | Packed | list[Tensor]:
        """Return logits (B, N, vocabulary), in the form of the inputs."""
        rows = prepare_inputs(inputs, mask).to_local()
        return rows.to_input_form(self.logits(self.hidden(rows.values, rows.positions, rows.context)))

    def hidden(
        self, ids: Tensor, positions: Tensor, context: LayerContext, cache: Sequence[LayerCache] | None = None
    ) -> Tensor:
        """Map ids (B, N) to hidden states (B, N, d_model)."""
        x = embed_tokens(ids, self.embedding)
        if self.config.embedding_scale != 1:
            x = x * self.config.embedding_scale
        if self.position is not None:
            if not torch.compiler.is_compiling() and table_length(positions) > self.config.positions:
                raise ValueError(
                    f"the model has {self.config.positions} positions, but the sequence has "
                    f"{table_length(positions)} tokens; shorten the prompt or lower max_new_tokens"
                )
            x = x + F.embedding(positions, self.position.weight)
        if self.config.dropout and self.training:
            x = dropout(x, self.config.dropout)
        return self.stack(x, context=context, cache=cache)

    @property
    def output_layer(self) -> nn.Embedding | nn.Linear:
        """The module whose weight computes the logits: the embedding if tied."""
        return self.embedding if self.head is None else self.head

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states (..., d_model) to logits (..., vocabulary)."""
        return self.apply_softcap(project(hidden, self.output_layer.weight))

    def apply_softcap(self, logits: Tensor) -> Tensor:
        """Apply `final_softcap` to logits, if configured."""
        cap = self.config.final_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def loss(self, inputs: Packed, labels: Tensor, *, smoothing: float = 0.0) -> Tensor:
        """Sum of the cross entropies of the labels (N,), the next token of each input token.

        When sequences are sharded, the sum is over the local tokens.
        """
        full = prepare_inputs(inputs, batched=True)
        rows = full.to_local()
        labels = rows.shard_like(labels.view(full.values.shape)).flatten()
        return self.token_loss(self.hidden(rows.values, rows.positions, rows.context).flatten(0, -2), labels, smoothing)

    def token_loss(self, hidden: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        """Sum of the cross entropies of the labels (N,), given hidden states (N, d_model)."""
        weight = self.output_layer.weight
        return token_loss(hidden, weight, labels, smoothing=smoothing, softcap=self.config.final_softcap)

    def start_generation(
        self, prompts: Tensor | Sequence[Tensor], *, cache_dtype: torch.dtype | None = None
    ) -> tuple[GenerationState, Tensor]:
        """Return a state to generate from, and the prompts as one left-padded tensor (R, n)."""
        rows = list(prompts)
        if not rows or any(row.dim() != 1 or not len(row) for row in rows):
            given = ", ".join(format_shape(row) for row in rows[:4]) or "none"
            raise ValueError(f"prompts must be ids (B, N), or a list of ids (n,) of at least one token, got {given}")
        longest = max(map(len, rows))
        left_padding = torch.tensor([longest - len(row) for row in rows], device=rows[0].device)
        first = torch.stack([F.pad(row, (longest - len(row), 0)) for row in rows])
        cache = self.stack.cache(dtype=cache_dtype)

        def forward(ids: Tensor, context: LayerContext) -> Tensor:
            assert context.positions is not None
            return self.logits(self.hidden(ids, context.positions, context, cache)[:, -1])

        return GenerationState(forward, cache, left_padding if bool(left_padding.any()) else None), first

    def generate(
        self, prompts: Tensor | Sequence[Tensor], *, max_new_tokens: int = 64, strategy: Strategy | None = None,
        stop: int | Sequence[int] = (), processor: LogitsProcessor | None = None,
        cache_dtype: torch.dtype | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """Generate at most `max_new_tokens` tokens after each prompt, up to a stop token; greedy by default.

        prompts: ids (B, N), or a list of ids of different lengths. processor: changes the logits in every step.
        cache_dtype: `torch.bfloat16`, `torch.float16` or `torch.int8` to keep keys and values in fewer bytes, see
            `nn.Cache`.
        """
        with torch.inference_mode():
            state, first = self.start_generation(prompts, cache_dtype=cache_dtype)
            return generate(
                state, first, strategy=strategy or Greedy(), max_new_tokens=max_new_tokens, stop=stop,
                processor=processor,
            )  # fmt: skip

    def stream(
        self,
        prompt: Tensor,
        *,
        max_new_tokens: int = 64,
        strategy: Greedy | Sample | None = None,
        stop: int | Sequence[int] = (),
        processor: LogitsProcessor | None = None,
        cache_dtype: torch.dtype | None = None,
    ) -> Iterator[int]:
        """Yield the tokens that follow one prompt (n,) as they are generated, up to a stop token, as in `generate`."""
        state, first = self.start_generation([prompt], cache_dtype=cache_dtype)
        stop = stop_tokens(stop)
        for token in generate_steps(
            state, first, strategy or Greedy(), max_new_tokens=max_new_tokens, stop=stop, processor=processor
        ):
            if int(token) in stop:
                return
            yield int(token)


def _build_blocks(config: LanguageConfig) -> list[Block]:
    windows, rotaries = config.windows or (None,), config.layer_rotary or (config.rotary,)  # cycled over the layers
    norm = norm_factory(config.norm, config.eps)
    arrangement = choose("arrangement", config.arrangement, ARRANGEMENTS)
    if config.layer_rotary and config.rotary is not None:
        raise ValueError("rotary and layer_rotary are alternatives; pass one of them")
    # Layers with the same window share one description and its plans, unless they have sinks of their own.
    shared = {width: _build_attention(config, width) for width in {*(config.windows or (None,))}}

    def attention(n: int) -> nn.Module:
        if delta[n]:
            return _build_delta(config)
        width, rotary = windows[n % len(windows)], rotaries[n % len(rotaries)]
        attend = _build_attention(config, width) if config.sinks else shared[width]
        if config.latent is not None:
            return _build_latent(config, attend, rotary)
        d_head = config.d_head or config.d_model // config.heads
        return MultiHeadAttention(
            config.d_model,
            config.heads,
            kv_heads=config.kv_heads,
            d_head=config.d_head,
            attend=attend,
            rotary=rotary,
            query_norm=_build_qk_norm(config, config.heads),
            key_norm=_build_qk_norm(config, config.kv_heads or config.heads),
            gate=OutputGate(config.d_model, config.heads * d_head, bias=_qkv_bias(config))
            if config.output_gate
            else None,
            bias=_qkv_bias(config),
            output_bias=_output_bias(config),
        )

    dense = cycle(config.dense_layers or (not config.experts,), config.layers)
    delta = cycle(config.delta_layers or (False,), config.layers)
    return [
        Block(
            attention(n),
            _build_feedforward(config, dense=dense[n]),
            residual=lambda: arrangement(config.d_model, norm, dropout=config.dropout),
        )
        for n in range(config.layers)
    ]


def _qkv_bias(config: LanguageConfig) -> bool:
    return config.bias if config.qkv_bias is None else config.qkv_bias


def _output_bias(config: LanguageConfig) -> bool:
    return config.bias if config.output_bias is None else config.output_bias


def _build_delta(config: LanguageConfig) -> nn.Module:
    if config.delta is None:
        raise ValueError("delta_layers needs the sizes of the layers; set `delta`")
    sizes = config.delta
    return GatedDeltaNet(
        config.d_model, sizes.heads, value_heads=sizes.value_heads, d_head=sizes.d_head, d_value=sizes.d_value,
        kernel_size=sizes.kernel_size, eps=config.eps,
    )  # fmt: skip


def _build_latent(config: LanguageConfig, attend: Attention, rotary: Rotary | None) -> nn.Module:
    sizes = config.latent
    assert sizes is not None
    others = {"qk_norm": config.qk_norm, "output_gate": config.output_gate}
    if any(others.values()) or config.kv_heads not in (None, config.heads) or _qkv_bias(config) != _output_bias(config):
        raise ValueError(
            "latent attention has as many key/value heads as heads, one bias setting, no qk_norm and no output_gate"
        )
    return LatentAttention(
        config.d_model, config.heads, d_latent=sizes.d_latent, d_query_latent=sizes.d_query_latent,
        d_head=config.d_head, d_rotary=sizes.d_rotary, d_value=sizes.d_value, attend=attend, rotary=rotary,
        bias=_qkv_bias(config),
    )  # fmt: skip


def _build_attention(config: LanguageConfig, width: int | None) -> Attention:
    return Attention(
        Dot(config.scale, config.softcap),
        causal() if width is None else causal() & window(width - 1, 0),
        sink=nn.Parameter(torch.zeros(config.heads)) if config.sinks else None,
        dropout=config.dropout if config.attention_dropout is None else config.attention_dropout,
    )


def _build_qk_norm(config: LanguageConfig, heads: int) -> nn.Module | None:
    if not config.qk_norm:
        return None
    norm, d_head = norm_factory(config.norm, config.eps), config.d_head or config.d_model // config.heads
    spans = {"head": lambda: norm(d_head), "token": lambda: TokenNorm(norm(heads * d_head))}
    return choose("qk_norm_span", config.qk_norm_span, spans)()


def _build_feedforward(config: LanguageConfig, *, dense: bool) -> nn.Module:
    d_model, d_hidden, bias = config.d_model, config.d_hidden, config.bias
    activation = choose("activation", config.activation, ACTIVATIONS)
    if not config.experts:
        named = {
            "gate_limit": config.gate_limit, "d_expert": config.d_expert, "d_shared": config.d_shared,
            "shared_gate": config.shared_gate, "dense_layers": config.dense_layers,
        }  # fmt: skip
        if given := [name for name, value in named.items() if value] + ["routing"] * (config.routing != CHOSEN):
            raise ValueError(f"{' and '.join(given)} is an option of experts; set `experts`")
    if dense:
        kind = GatedFeedForward if config.gated else FeedForward
        return kind(d_model, d_hidden, activation=activation, bias=bias)
    if not config.gated:
        raise ValueError("experts are gated feed-forward layers; set gated=True")
    d_shared = config.d_shared
    return Experts(
        d_model, d_hidden if config.d_expert is None else config.d_expert, count=config.experts,
        per_token=config.experts_per_token, activation=activation, limit=config.gate_limit, bias=bias,
        routing=config.routing, shared_gate=config.shared_gate,
        shared=GatedFeedForward(d_model, d_shared, activation=activation, bias=bias) if d_shared else None,
    )  # fmt: skip
