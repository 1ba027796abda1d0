"""Small transformers models with random weights, and calls of their models and ours on the same inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from regard.attention import Attention
from regard.nn import Block, Encoder

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

TEXT: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 40, "type_vocab_size": 2, "layer_norm_eps": 0.02,
}  # fmt: skip
DISTIL = {"vocab_size": 99, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 40}
ALBERT = TEXT | {"embedding_size": 16}
GPT2 = {"vocab_size": 99, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 40, "n_inner": 56,
        "layer_norm_epsilon": 0.02, "bos_token_id": None, "eos_token_id": None}  # fmt: skip
LLAMA = TEXT | {
    "rms_norm_eps": 0.03,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 6, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4,
      "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "layer_norm_epsilon": 0.02,
      "decoder_start_token_id": 0}  # fmt: skip
MARIAN = {"vocab_size": 99, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
          "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 40,
          "pad_token_id": 98, "decoder_start_token_id": 98, "eos_token_id": 0, "forced_eos_token_id": None,
          "activation_function": "swish", "scale_embedding": True}  # fmt: skip
VIT = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 32,
       "patch_size": 8, "layer_norm_eps": 0.02}  # fmt: skip
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 2, 1], "layer_type": "bottleneck"}
DETR = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_queries": 5,
        "use_timm_backbone": False, "use_pretrained_backbone": False, "num_labels": 4}  # fmt: skip

WHISPER = {"vocab_size": 99, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
           "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 20,
           "max_source_positions": 25, "max_target_positions": 40, "pad_token_id": 98, "decoder_start_token_id": 97,
           "bos_token_id": 98, "eos_token_id": 98, "suppress_tokens": [7, 8],
           "begin_suppress_tokens": [5, 98]}  # fmt: skip
WAV2VEC2 = {"vocab_size": 12, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
            "intermediate_size": 48, "layer_norm_eps": 0.02, "conv_dim": [16, 16, 24], "conv_kernel": [10, 3, 2],
            "conv_stride": [5, 2, 2], "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4,
            "mask_time_prob": 0.0}  # fmt: skip


def rope(**scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 1000.0, **scaling}}


CASES: dict[str, tuple[str, str, dict[str, Any]]] = {  # name: model, configuration, its values
    "bert": ("BertModel", "BertConfig", TEXT),
    "bert-mlm": ("BertForMaskedLM", "BertConfig", TEXT | {"hidden_act": "relu"}),
    "bert-pretraining": ("BertForPreTraining", "BertConfig", TEXT),
    "bert-sequence": ("BertForSequenceClassification", "BertConfig", TEXT | {"num_labels": 5}),
    "bert-token": ("BertForTokenClassification", "BertConfig", TEXT | {"num_labels": 3, "hidden_act": "gelu_new"}),
    "bert-answer": ("BertForQuestionAnswering", "BertConfig", TEXT),
    "roberta": ("RobertaModel", "RobertaConfig", TEXT),
    "roberta-mlm": ("RobertaForMaskedLM", "RobertaConfig", TEXT | {"layer_norm_eps": 1e-5}),
    "roberta-sequence": ("RobertaForSequenceClassification", "RobertaConfig", TEXT | {"num_labels": 3}),
    "roberta-token": ("RobertaForTokenClassification", "RobertaConfig", TEXT | {"type_vocab_size": 1}),
    "xlm-roberta": ("XLMRobertaForMaskedLM", "XLMRobertaConfig", TEXT),
    "distilbert": ("DistilBertModel", "DistilBertConfig", DISTIL),
    "distilbert-mlm": ("DistilBertForMaskedLM", "DistilBertConfig", DISTIL | {"activation": "relu"}),
    "distilbert-sequence": ("DistilBertForSequenceClassification", "DistilBertConfig", DISTIL),
    "distilbert-answer": ("DistilBertForQuestionAnswering", "DistilBertConfig", DISTIL),
    "albert": ("AlbertModel", "AlbertConfig", ALBERT),
    "albert-mlm": (
        "AlbertForMaskedLM", "AlbertConfig",
        ALBERT | {"num_hidden_layers": 4, "num_hidden_groups": 2, "hidden_act": "relu"},
    ),
    "albert-sequence": ("AlbertForSequenceClassification", "AlbertConfig", ALBERT | {"num_labels": 4}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "gpt2-untied": (
        "GPT2LMHeadModel", "GPT2Config",
        GPT2 | {"tie_word_embeddings": False, "n_inner": None, "activation_function": "silu"},
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "llama-tied": ("LlamaForCausalLM", "LlamaConfig", LLAMA | {"tie_word_embeddings": True, "head_dim": 12}),
    "llama-bias": ("LlamaForCausalLM", "LlamaConfig", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("LlamaForCausalLM", "LlamaConfig", LLAMA | rope(rope_type="linear", factor=3.0)),
    "llama-dynamic": (
        "LlamaForCausalLM", "LlamaConfig",
        LLAMA | rope(rope_type="dynamic", factor=3.0) | {"max_position_embeddings": 6},
    ),
    "llama-yarn": (
        "LlamaForCausalLM", "LlamaConfig",
        LLAMA | rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=10),
    ),
    "llama-llama3": (
        "LlamaForCausalLM", "LlamaConfig",
        LLAMA | rope(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                     original_max_position_embeddings=16),
    ),
    "mistral": ("MistralForCausalLM", "MistralConfig", LLAMA | {"sliding_window": 4}),
    "mistral-full": ("MistralForCausalLM", "MistralConfig", LLAMA | {"sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", LLAMA),
    "qwen2-window": (
        "Qwen2ForCausalLM", "Qwen2Config",
        LLAMA | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "gemma2": (
        "Gemma2ForCausalLM", "Gemma2Config",
        LLAMA | {"head_dim": 12, "sliding_window": 4, "query_pre_attn_scalar": 10, "attn_logit_softcapping": 2.0,
                 "final_logit_softcapping": 3.0},
    ),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "t5-1.1": (
        "T5ForConditionalGeneration", "T5Config",
        T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "t5-tied": ("T5ForConditionalGeneration", "T5Config", T5 | {"tie_word_embeddings": False}),
    "marian": ("MarianMTModel", "MarianConfig", MARIAN),
    "marian-apart": (
        "MarianMTModel", "MarianConfig",
        MARIAN | {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 99},
    ),
    "vit": ("ViTModel", "ViTConfig", VIT),
    "vit-classifier": (
        "ViTForImageClassification", "ViTConfig",
        VIT | {"qkv_bias": False, "hidden_act": "relu", "num_labels": 7, "image_size": (32, 48)},
    ),
    "detr": ("DetrForObjectDetection", "DetrConfig", DETR),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", WHISPER),
    "wav2vec2": ("Wav2Vec2ForCTC", "Wav2Vec2Config", WAV2VEC2),
    "wav2vec2-large": (
        "Wav2Vec2ForCTC", "Wav2Vec2Config",
        WAV2VEC2 | {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True,
                    "num_conv_pos_embeddings": 7, "hidden_act": "relu"},
    ),
}  # fmt: skip
DECODERS = [name for name in CASES if name.startswith(("gpt2", "llama", "mistral", "qwen2", "gemma2"))]
PAIRS = [name for name in CASES if name.startswith(("t5", "marian"))]
PICTURES = [name for name in CASES if name.startswith(("vit", "detr"))]
SOUNDS = [name for name in CASES if name.startswith(("whisper", "wav2vec2"))]
TEXTS = [name for name in CASES if name not in DECODERS + PAIRS + PICTURES + SOUNDS]

_draw = torch.Generator().manual_seed(0)
IDS = torch.randint(3, 97, (3, 11), generator=_draw)
TARGETS = torch.randint(3, 97, (3, 6), generator=_draw)
RIGHT = torch.arange(11) < torch.tensor([11, 7, 2])[:, None]
LEFT = RIGHT.flip(1)
PIXELS = torch.randn(2, 3, 32, 48, generator=_draw)
PICTURE = torch.randn(2, 3, 96, 64, generator=_draw)
FEATURES = torch.randn(3, 50, 20, generator=_draw)
WAVES = torch.randn(3, 400, generator=_draw)
SAMPLES = torch.arange(400) < torch.tensor([400, 260, 77])[:, None]
PIXEL_MASK = torch.ones(2, 96, 64, dtype=torch.bool)
PIXEL_MASK[1, 60:] = PIXEL_MASK[1, :, 50:] = False


@cache
def their_model(name: str) -> Any:
    """Return their model, with weights that make attention uneven."""
    model, config, values = CASES[name]
    if name == "detr":
        values = values | {"backbone_config": transformers.ResNetConfig(**RESNET, out_features=["stage4"])}
    torch.manual_seed(0)
    built = getattr(transformers, model)._from_config(
        getattr(transformers, config)(**values), attn_implementation="eager"
    )
    if name == "t5-1.1":  # transformers ties new models, but keeps loaded weights untied
        built.lm_head.weight = nn.Parameter(built.lm_head.weight.detach().clone())
    return randomize(built)


def randomize(model: nn.Module) -> Any:
    """Set variance-preserving random weights, and biases and norms that differ from their defaults."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("running_var"):
                tensor.uniform_(0.5, 1.5, generator=draw)
            elif tensor.is_floating_point() and "embed_positions" not in name:  # Marian's are sinusoidal and not stored
                table = "embed" in name or "shared" in name or "wte" in name or "wpe" in name
                scale = 0.2 if tensor.dim() < 2 else 0.7 if table else 1.5 / math.sqrt(tensor[0].numel())
                tensor.copy_(torch.randn(tensor.shape, generator=draw) * scale + (1 if _is_norm(name, tensor) else 0))
    return model.eval()


def _is_norm(name: str, tensor: Tensor) -> bool:
    return tensor.dim() == 1 and name.endswith("weight")


def save_their_model(name: str, folder: Path) -> Path:
    their_model(name).save_pretrained(folder)
    return folder


@dataclass
class Recording:
    """Recorded call of a model: its result, the outputs of its blocks and stacks, and attention weights."""

    result: Any
    hidden: list[Tensor]
    last: list[Tensor]
    weights: list[Tensor]


@contextmanager
def recording(model: nn.Module) -> Iterator[Recording]:
    """Record the outputs of blocks and stacks and all attention weights of our model."""
    record = Recording(None, [], [], [])
    call = Attention.__call__

    def attend(self: Attention, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Any:
        record.weights.append(self.weights(query, key))
        return call(self, query, key, value, **kwargs)

    hooks = []
    for module in model.modules():
        if isinstance(module, (Block, Encoder)):
            outputs = record.hidden if isinstance(module, Block) else record.last
            hooks.append(module.register_forward_hook(lambda _, __, out, outputs=outputs: outputs.append(out)))
    Attention.__call__ = attend  # type: ignore[method-assign]
    try:
        yield record
    finally:
        Attention.__call__ = call  # type: ignore[method-assign]
        for hook in hooks:
            hook.remove()


def mask_of(name: str) -> Tensor:
    """The real tokens; all, where in Transformers the longest row of a batch changes the others."""
    if name == "llama-dynamic":
        return torch.ones_like(LEFT)
    return LEFT if name in DECODERS else RIGHT


def ours(name: str, model: Any) -> Any:
    """Return the result of our model."""
    if name in PICTURES:
        return model(PICTURE, PIXEL_MASK) if name == "detr" else model(_pixels(name))
    if name in SOUNDS:
        return model(FEATURES, TARGETS) if name == "whisper" else model(WAVES, SAMPLES)
    if name in PAIRS:
        return model(IDS, TARGETS, RIGHT)
    return model(IDS, mask_of(name))


def theirs(name: str, model: Any, **options: bool) -> Any:
    """Return the outputs of their model."""
    if name == "detr":
        return model(PICTURE, pixel_mask=PIXEL_MASK.long(), **options)
    if name in PICTURES:
        return model(_pixels(name), **options)
    if name == "whisper":
        return model(input_features=FEATURES.mT, decoder_input_ids=TARGETS, **options)
    if name in SOUNDS:
        return model(WAVES, attention_mask=SAMPLES.long(), **options)
    if name in PAIRS:
        return model(input_ids=IDS, attention_mask=RIGHT.long(), decoder_input_ids=TARGETS, **options)
    mask = mask_of(name)
    positions = {"position_ids": (mask.long().cumsum(1) - 1).clamp(min=0)} if name in DECODERS else {}
    return model(input_ids=IDS, attention_mask=mask.long(), **positions, **options)


def _pixels(name: str) -> Tensor:
    return PIXELS if name == "vit-classifier" else PIXELS[..., :32]


def result(outputs: Any) -> Any:
    """Select the tensor of their outputs that our model returns."""
    if "pred_boxes" in outputs:
        return outputs.logits, outputs.pred_boxes
    if "start_logits" in outputs:
        return torch.stack((outputs.start_logits, outputs.end_logits), -1)
    return next(outputs[key] for key in ("logits", "prediction_logits", "last_hidden_state") if key in outputs)


def real(name: str, tensor: Tensor) -> Tensor:
    """Select the values of real tokens, without padding."""
    if name in SOUNDS and name != "whisper":
        frames = torch.arange(tensor.shape[1]) < torch.tensor([19, 12, 3])[:, None]
        return tensor[frames]
    if name in PICTURES or name in PAIRS or name in SOUNDS or tensor.dim() != 3:
        return tensor
    return tensor[mask_of(name)]
