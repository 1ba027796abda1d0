"""Small GGUF files, written with the `gguf` package from models of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from tests.models.transformers_models import randomize

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 64, "rms_norm_eps": 0.03, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
GEMMA = {"head_dim": 32, "sliding_window": 4, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 2.0,
         "final_logit_softcapping": 3.0}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", SIZES),
    "llama-tied": ("LlamaForCausalLM", SIZES | {"tie_word_embeddings": True, "head_dim": 32}),
    "llama-bias": ("LlamaForCausalLM", SIZES | {"attention_bias": True, "mlp_bias": True}),
    "llama-3.1": ("LlamaForCausalLM", SIZES | {"rope_parameters": LLAMA3}),
    "qwen2": ("Qwen2ForCausalLM", SIZES),
    "qwen3": ("Qwen3ForCausalLM", SIZES | {"head_dim": 32}),
    "smollm3": ("SmolLM3ForCausalLM", SIZES | {"num_hidden_layers": 4}),
    "olmo2": ("Olmo2ForCausalLM", SIZES),
    "gemma2": ("Gemma2ForCausalLM", SIZES | GEMMA),
}
CHAT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<assistant>"
TOKENS = ["<unk>", "<s>", "</s>", *map(chr, range(33, 122)), "Ġ", "Ċ", "ab", "cd", "<|user|>"]


def write_gguf(path: Path, name: str = "llama", kind: str = "F32", changed: dict[str, Any] | None = None) -> Any:
    """Write a model of transformers as a GGUF file with matrices of this type; return the model with rounded weights.

    changed: metadata to add, replace or, if None, leave out.
    """
    theirs, quantization = _their_model(name), gguf.GGMLQuantizationType[kind]
    config = theirs.config
    architecture = config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    numbers = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim if getattr(config, "head_dim", None) else None,
    }  # fmt: skip
    values: dict[str, Any] = {f"{architecture}.{key}": value for key, value in numbers.items()}
    values[f"{architecture}.attention.layer_norm_rms_epsilon"] = float(config.rms_norm_eps)
    values[f"{architecture}.rope.freq_base"] = float(config.rope_parameters["rope_theta"])
    if config.model_type == "gemma2":
        values |= {
            f"gemma2.{key}": getattr(config, key) for key in ("attn_logit_softcapping", "final_logit_softcapping")
        }
        values["gemma2.attention.sliding_window"] = config.sliding_window
    values |= {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [2, 3, 3, *[1] * (len(TOKENS) - 4), 4], "tokenizer.ggml.merges": ["a b", "c d"],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.chat_template": CHAT,
    }  # fmt: skip
    for key, value in (values | (changed or {})).items():
        if value is not None:
            _add(writer, key, value)
    names = gguf.get_tensor_name_map(_architecture(architecture), config.num_hidden_layers)
    for name, weight in theirs.state_dict().items():
        module, suffix = name.rsplit(".", 1)
        if module == "lm_head" and config.tie_word_embeddings:
            continue
        stored = weight.float().numpy()
        if stored.ndim == 2:
            stored = gguf.quants.dequantize(gguf.quants.quantize(stored, quantization), quantization)
            weight.copy_(torch.from_numpy(stored.copy()))
        if architecture in ("llama", "smollm3") and module.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if module.endswith("q_proj") else config.num_key_value_heads
            halves = stored.reshape(heads, 2, len(stored) // heads // 2, *stored.shape[1:])
            stored = halves.swapaxes(1, 2).reshape(stored.shape)
        if architecture == "gemma2" and name.endswith("norm.weight"):
            stored = stored + 1
        data = stored if stored.ndim == 1 else gguf.quants.quantize(np.ascontiguousarray(stored), quantization)
        raw = None if stored.ndim == 1 else quantization
        writer.add_tensor(f"{names.get_name(module)}.{suffix}", data, raw_dtype=raw)
    if config.rope_parameters["rope_type"] == "llama3":
        frequencies = theirs.model.rotary_emb.inv_freq.numpy()
        d_head = 2 * len(frequencies)
        unscaled = config.rope_parameters["rope_theta"] ** (-np.arange(0, d_head, 2) / d_head)
        writer.add_tensor("rope_freqs.weight", (unscaled / frequencies).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return theirs


def _their_model(name: str) -> Any:
    kind = getattr(transformers, MODELS[name][0])
    return randomize(kind._from_config(kind.config_class(**MODELS[name][1]), attn_implementation="eager"))


def _architecture(name: str) -> Any:
    return next(number for number, known in gguf.MODEL_ARCH_NAMES.items() if known == name)


def _add(writer: Any, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add.get(type(value), writer.add_array)(key, value)
