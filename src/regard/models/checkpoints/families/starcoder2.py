"""StarCoder2: Llama with layer norms, biases and feed-forward layers without gates."""

from __future__ import annotations

from regard.models.checkpoints.families import rope
from regard.models.checkpoints.families.language import PRE_NORMS, causal, read_mistral, sizes, write_mistral
from regard.models.checkpoints.family import Family, Field, Values, activation
from regard.models.language import LanguageConfig

FEEDFORWARD = """
    stack.layers.*.feedforward.up      model.layers.*.mlp.c_fc
    stack.layers.*.feedforward.output  model.layers.*.mlp.c_proj
"""


def read_starcoder2(theirs: Values) -> Values:
    return read_mistral({"sliding_window": None} | theirs)


def write_starcoder2(config: LanguageConfig) -> Values:
    return write_mistral(config) | {"embedding_dropout": config.dropout}


STARCODER2 = Family(
    "starcoder2",
    "StarCoder2",
    LanguageConfig,
    {"Starcoder2ForCausalLM": causal(PRE_NORMS, feedforward=FEEDFORWARD)},
    (
        *(entry for entry in sizes(positions=4096) if entry.ours not in ("eps", "d_head")),
        Field("eps", "norm_epsilon", 1e-5),
        Field("bias", "use_bias", True),
        Field("kv_heads", "num_key_value_heads", 2),
        Field("tied", "tie_word_embeddings", True),
        Field("dropout", "residual_dropout", 0.0),
        activation("activation", "hidden_act", "gelu_pytorch_tanh"),
    ),
    fixed={"arrangement": "pre", "norm": "layer"},
    read=read_starcoder2,
    types=rope.TYPES | {"sliding_window": int},
    write=write_starcoder2,
    dropped=rope.NAMES,
)

FAMILIES = (STARCODER2,)
