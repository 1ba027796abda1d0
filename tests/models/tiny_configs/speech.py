"""Whisper and Wav2Vec2."""

from __future__ import annotations

from tests.models.tiny_configs.case import Case

WHISPER = {"vocab_size": 99, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
           "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 20,
           "max_source_positions": 25, "max_target_positions": 40, "pad_token_id": 98, "decoder_start_token_id": 97,
           "bos_token_id": 98, "eos_token_id": 98, "suppress_tokens": [7, 8],
           "begin_suppress_tokens": [5, 98]}  # fmt: skip
WAV2VEC2 = {"vocab_size": 12, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
            "intermediate_size": 48, "layer_norm_eps": 0.02, "conv_dim": [16, 16, 24], "conv_kernel": [10, 3, 2],
            "conv_stride": [5, 2, 2], "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4,
            "mask_time_prob": 0.0}  # fmt: skip

CASES = {
    "whisper": Case("WhisperForConditionalGeneration", WHISPER),
    "wav2vec2": Case("Wav2Vec2ForCTC", WAV2VEC2),
    "wav2vec2-large": Case(
        "Wav2Vec2ForCTC",
        WAV2VEC2 | {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True,
                    "num_conv_pos_embeddings": 7, "hidden_act": "relu"},
    ),
}  # fmt: skip
