"""Tensors and configuration of a GGUF file in the terms of a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.field_types import check_value, short_repr
from regard.models.checkpoints.family import MAX_LAYERS
from regard.models.checkpoints.gguf.file import GgufFile
from regard.positions import Llama3

MODULES = ("model.embed_tokens", "model.norm", "lm_head")
LAYER_MODULES = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_norm",
    "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm",
    "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip
FREQUENCY_FACTORS = "rope_freqs.weight"  # divisors of the rotary frequencies, for the scaling of Llama 3.1
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Values of all releases from Llama 3.1 on; a GGUF file has only the divisors that they result in."""

NUMBERS: dict[str, tuple[str, Any, Any]] = {
    "embedding_length": ("hidden_size", int, None),
    "block_count": ("num_hidden_layers", int, None),
    "feed_forward_length": ("intermediate_size", int, None),
    "context_length": ("max_position_embeddings", int, None),
    "attention.head_count": ("num_attention_heads", int, None),
    "attention.head_count_kv": ("num_key_value_heads", int, "attention.head_count"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", float, None),
    "rope.freq_base": ("rope_theta", float, 10000.0),
}
"""Keys after the name of the architecture: name in config.json, type, and default, which may be another key."""
OTHERS = {"vocab_size", "attention.key_length", "attention.value_length", "rope.dimension_count", "rope.scaling.type",
          "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned"}  # fmt: skip


@dataclass(frozen=True)
class GgufArchitecture:
    """How a GGUF architecture differs from the checkpoint it was converted from.

    interleaved: rows of queries and keys are in the order of interleaved rotary pairs.
    offset_norms: weights of norms are stored with 1 added.
    numbers: more keys, as in `NUMBERS`.
    """

    model_type: str
    model: str
    interleaved: bool = False
    offset_norms: bool = False
    numbers: Mapping[str, tuple[str, Any, Any]] | None = None


ARCHITECTURES = {
    "llama": GgufArchitecture("llama", "LlamaForCausalLM", interleaved=True),
    "qwen2": GgufArchitecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": GgufArchitecture("qwen3", "Qwen3ForCausalLM"),
    "smollm3": GgufArchitecture("smollm3", "SmolLM3ForCausalLM", interleaved=True),
    "olmo2": GgufArchitecture("olmo2", "Olmo2ForCausalLM"),
    "gemma2": GgufArchitecture(
        "gemma2", "Gemma2ForCausalLM", offset_norms=True,
        numbers={
            "attention.sliding_window": ("sliding_window", int, 4096),
            "attn_logit_softcapping": ("attn_logit_softcapping", float, 50.0),
            "final_logit_softcapping": ("final_logit_softcapping", float, 30.0),
        },
    ),
}  # fmt: skip


class GgufWeights:
    """The tensors of a GGUF file by their names in a checkpoint, and `config_json`, the content of its config.json.

    `read` dequantises to float32. `blocks` returns the stored blocks as they are, with rows in the same order, to
    compute with them directly; `kind` is their type.
    """

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.folder = file.path
        name = file.metadata.get("general.architecture")
        if name not in ARCHITECTURES:
            supported = ", ".join(ARCHITECTURES)
            raise ValueError(f"general.architecture = {short_repr(name)} is not supported; supported: {supported}")
        self.architecture = ARCHITECTURES[name]
        self.config_json = _config(file, name, self.architecture)
        self._stored = _stored_names(file, name, self.config_json["num_hidden_layers"])

    def names(self) -> Iterable[str]:
        return self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        return self.file.shape(self._stored[name])

    def kind(self, name: str) -> str:
        """Return the storage type of a tensor, such as "Q4_0" or "F32"."""
        return self.file.kind(self._stored[name])

    def blocks(self, name: str) -> Tensor:
        """Return the stored bytes of a matrix: uint8 (rows, bytes per row), whole blocks along each row."""
        if len(self.shape(name)) != 2:
            raise ValueError(f"{name} has the shape {self.shape(name)}, but blocks are those of a matrix; use read")
        return self._restore_order(name, self.file.blocks(self._stored[name]))

    def read(self, name: str) -> Tensor:
        """Return a tensor as float32."""
        values = self.file.read(self._stored[name])
        has_offset = self.architecture.offset_norms and name.endswith("norm.weight")
        return values - 1 if has_offset else self._restore_order(name, values)

    def _restore_order(self, name: str, rows: Tensor) -> Tensor:
        """Reorder rows of queries and keys from interleaved rotary pairs to two halves per head."""
        module = name.rsplit(".", 2)[-2]
        if not self.architecture.interleaved or module not in ("q_proj", "k_proj"):
            return rows
        heads = self.config_json["num_attention_heads" if module == "q_proj" else "num_key_value_heads"]
        if len(rows) % (2 * heads):
            raise ValueError(f"{name} must have a multiple of {2 * heads} rows, got {len(rows)}")
        return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(rows.shape)


def _stored_names(file: GgufFile, architecture: str, layers: int) -> dict[str, str]:
    """Return the names in the file by names of the checkpoint; tensors without counterpart keep their name."""
    import gguf

    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(number, layers)
    modules = (*MODULES, *(f"model.layers.{n}.{module}" for n in range(layers) for module in LAYER_MODULES))
    checkpoint_names = {table.get_name(module): module for module in modules}
    stored_names = {}
    for stored in file.names():
        module, _, suffix = stored.rpartition(".")
        if stored != FREQUENCY_FACTORS:
            stored_names[f"{checkpoint_names[module]}.{suffix}" if module in checkpoint_names else stored] = stored
    return stored_names


def _config(file: GgufFile, name: str, architecture: GgufArchitecture) -> dict[str, Any]:
    """Convert the metadata to the content of config.json."""
    given = {key.removeprefix(f"{name}."): value for key, value in file.metadata.items() if key.startswith(f"{name}.")}
    numbers = NUMBERS | dict(architecture.numbers or {})
    if unknown := set(given) - set(numbers) - OTHERS:
        raise ValueError(f"{name}.{min(unknown)} is not supported")
    config: dict[str, Any] = {"model_type": architecture.model_type, "architectures": [architecture.model]}
    for key, (theirs, kind, default) in numbers.items():
        value = given.get(key, given.get(default) if isinstance(default, str) else default)
        check_value(f"{name}.{key}", value, kind)
        config[theirs] = float(str(np.float32(value))) if kind is float else value  # 1e-05, not 9.99999974e-06
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    if not 0 < heads <= config["hidden_size"] or not 0 < config["num_key_value_heads"] <= heads or layers > MAX_LAYERS:
        raise ValueError(f"{name} has {heads} heads, {config['num_key_value_heads']} key heads and {layers} layers")
    config["head_dim"] = d_head = given.get("attention.key_length", config["hidden_size"] // heads)
    check_value(f"{name}.attention.key_length", d_head, int)
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        if given.get(key, d_head) != d_head:
            raise ValueError(f"{name}.{key} = {short_repr(given[key])} is not supported; expected {short_repr(d_head)}")
    if "token_embd.weight" not in file.names():
        raise ValueError("the file has no token_embd.weight; is it a model?")
    config["vocab_size"] = file.shape("token_embd.weight")[0]
    config["tie_word_embeddings"] = "output.weight" not in file.names()
    if architecture.model_type == "llama":
        config |= {
            "attention_bias": "blk.0.attn_q.bias" in file.names(),
            "mlp_bias": "blk.0.ffn_up.bias" in file.names(),
        }
    if name == "gemma2":  # not in the file: the model of 46 layers divides the width by the heads
        config["query_pre_attn_scalar"] = config["hidden_size"] // heads if layers == 46 else d_head
    if (scaling := _rope_scaling(file, name, given, config)) is not None:
        config["rope_scaling"] = scaling
    return config


def _rope_scaling(file: GgufFile, name: str, given: dict[str, Any], config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the scaling of the rotary embedding as in config.json."""
    kind = given.get("rope.scaling.type", "none")
    if FREQUENCY_FACTORS in file.names():
        if kind != "none":
            raise ValueError(f"{name}.rope.scaling.type = {short_repr(kind)} with {FREQUENCY_FACTORS} is not supported")
        return _llama3_scaling(file.read(FREQUENCY_FACTORS), config)
    factor, original = given.get("rope.scaling.factor"), given.get("rope.scaling.original_context_length")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ValueError(f"{name}.rope.scaling.type = {short_repr(kind)} is not supported; supported: linear, yarn")
    values = {"rope_type": kind, "factor": factor}
    return values | ({"original_max_position_embeddings": original} if kind == "yarn" and original is not None else {})


def _llama3_scaling(divisors: Tensor, config: dict[str, Any]) -> dict[str, Any]:
    """Return the scaling that results in these divisors of the frequencies; raise if it is not that of Llama 3.1."""
    scaling = {"rope_type": "llama3", "factor": float(divisors.max())} | LLAMA3
    rotary = Llama3(scaling["factor"], *LLAMA3.values())  # type: ignore[arg-type]
    unscaled = config["rope_theta"] ** (-torch.arange(0, config["head_dim"], 2).double() / config["head_dim"])
    expected = unscaled / rotary.frequencies(config["rope_theta"], config["head_dim"], torch.arange(1))
    if divisors.shape != expected.shape or not torch.allclose(divisors.double(), expected, rtol=1e-4, atol=0):
        raise ValueError(f"{FREQUENCY_FACTORS} is not the scaling of Llama 3.1; other factors are not supported")
    return scaling
