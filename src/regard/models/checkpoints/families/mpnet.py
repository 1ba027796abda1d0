"""MPNet: BERT with a relative position bias, and with positions like RoBERTa's."""

from __future__ import annotations

from regard.models.checkpoints.families.text import SIZES, roberta_architectures
from regard.models.checkpoints.family import Family, Field, activation, classes, labels
from regard.models.text import TextConfig

BASE = """
    embedding                                 embeddings.word_embeddings
    position                                  embeddings.position_embeddings
    embedding_norm                            embeddings.LayerNorm
    stack.bias.table                          encoder.relative_attention_bias.weight
    stack.layers.*.attention.qkv              encoder.layer.*.attention.attn.{q,k,v}
    stack.layers.*.attention.output           encoder.layer.*.attention.attn.o
    stack.layers.*.attention_residual.norm    encoder.layer.*.attention.LayerNorm
    stack.layers.*.feedforward.up             encoder.layer.*.intermediate.dense
    stack.layers.*.feedforward.output         encoder.layer.*.output.dense
    stack.layers.*.feedforward_residual.norm  encoder.layer.*.output.LayerNorm
"""

MPNET = Family(
    "mpnet",
    "MPNet",
    TextConfig,
    roberta_architectures("MPNet", BASE, "mpnet."),
    (
        *(entry for entry in SIZES if entry.ours != "segments"),
        activation("activation", "hidden_act", "gelu"),
        Field("buckets", "relative_attention_num_buckets", 32),
    ),
    # the first position and the number of buckets are constants in transformers
    fixed={"segments": 0, "first_position": 2, "max_distance": 128, "mask_activation": "gelu"},
    only={"relative_attention_num_buckets": (32,), "tie_word_embeddings": (True,)},
    read=lambda theirs: {"classes": classes(theirs)},
    write=labels,
)

FAMILIES = (MPNET,)
