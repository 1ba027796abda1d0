"""The tokenizer and the chat template of a GGUF file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from regard.field_types import check_value, short_repr
from regard.models.checkpoints.gguf.file import GgufFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTROL, USER_DEFINED = 3, 4  # values of token_type
MAX_TOKEN = 1000  # characters
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTIONS, SPACES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
QWEN2 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
DIGIT = r"\p{N}"
PATTERNS = {
    "gpt-2": (GPT2,),
    "smollm": (DIGIT, GPT2),
    "starcoder": (DIGIT, GPT2),
    "refact": (DIGIT, GPT2),
    "command-r": (DIGIT, GPT2),
    "llama-bpe": (LLAMA3,),
    "llama3": (LLAMA3,),
    "llama-v3": (LLAMA3,),
    "dbrx": (LLAMA3,),
    "smaug-bpe": (LLAMA3,),
    "qwen2": (QWEN2,),
}
"""How texts are split before byte-pair encoding, by tokenizer.ggml.pre. A second pattern splits the parts further."""
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3")  # a word of the vocabulary is never built from merges


def tokenizer(file: GgufFile) -> Tokenizer:
    """Build the tokenizer of a GGUF file: byte-level BPE ("gpt2") or SentencePiece BPE ("llama")."""
    try:
        import tokenizers
    except ImportError:
        raise ImportError(
            "reading tokenizers needs the tokenizers library: pip install 'regard[checkpoints]'"
        ) from None
    kind = _value(file, "model", str)
    tokens, types = _value(file, "tokens", list[str]), _types(file)
    if len(set(tokens)) != len(tokens) or len(types) != len(tokens):
        raise ValueError(f"{file.path}: tokenizer.ggml.tokens must be distinct and have a token_type each")
    if max(map(len, tokens), default=0) > MAX_TOKEN:
        raise ValueError(f"{file.path}: tokenizer.ggml.tokens must have at most {MAX_TOKEN} characters each")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise ValueError(
            f"{file.path}: tokenizer.ggml.model = {short_repr(kind)} is not supported; supported: {', '.join(builders)}"
        )
    built = builders[kind](file, tokens)
    for n in np.flatnonzero(np.isin(types, (CONTROL, USER_DEFINED))).tolist():
        token = tokenizers.AddedToken(tokens[n], special=bool(types[n] == CONTROL), normalized=False)
        (built.add_special_tokens if types[n] == CONTROL else built.add_tokens)([token])
    _add_begin_and_end(file, built, tokens)
    return built


def chat_settings(file: GgufFile) -> dict[str, Any]:
    """Return what a GGUF file has of tokenizer_config.json and generation_config.json."""
    tokens = _value(file, "tokens", list[str])
    settings: dict[str, Any] = {}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"), ("unk_token", "unknown")):
        if (token := _token(file, key, len(tokens))) is not None:
            settings[name] = tokens[token]
    if (template := file.metadata.get("tokenizer.chat_template")) is not None:
        if not isinstance(template, str):
            raise ValueError(f"{file.path}: tokenizer.chat_template must be a text, got {short_repr(template)}")
        settings["chat_template"] = template
    stop = (_token(file, key, len(tokens)) for key in ("eos", "eot", "eom"))
    settings["eos_token_id"] = sorted({token for token in stop if token is not None})
    return settings


def _byte_level(file: GgufFile, tokens: list[str]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    split = _value(file, "pre", str)
    if split not in PATTERNS:
        raise ValueError(
            f"{file.path}: tokenizer.ggml.pre = {short_repr(split)} is not supported; supported: {', '.join(PATTERNS)}"
        )
    merges = [tuple(merge.split(" ")) for merge in _value(file, "merges", list[str])]
    vocabulary = {token: n for n, token in enumerate(tokens)}
    if not all(len(merge) == 2 and {*merge, "".join(merge)} <= vocabulary.keys() for merge in merges):
        raise ValueError(f"{file.path}: tokenizer.ggml.merges must be pairs of tokens that join to a token")
    built = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split in WHOLE_WORDS))
    parts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PATTERNS[split]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.pre_tokenizer = pre_tokenizers.Sequence([*parts, byte_level])
    built.decoder = decoders.ByteLevel()
    return built


def _sentencepiece(file: GgufFile, tokens: list[str]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(tokens):
        raise ValueError(f"{file.path}: tokenizer.ggml.scores must have a number for each token")
    vocabulary = {token: n for n, token in enumerate(tokens)}
    unknown = _token(file, "unknown", len(tokens))
    prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    built = Tokenizer(
        models.BPE(
            vocabulary, _merges(vocabulary, scores), fuse_unk=True, byte_fallback=True,
            unk_token=None if unknown is None else tokens[unknown],
        )
    )  # fmt: skip
    built.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend("▁")] if prefix else []), normalizers.Replace(" ", "▁")]
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    built.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return built


def _merges(vocabulary: dict[str, int], scores: np.ndarray) -> list[tuple[str, str]]:
    """Return the merges of SentencePiece's BPE, which joins the pair whose token has the highest score first."""
    merges = []
    for token, n in vocabulary.items():
        pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [(one, other) for one, other in pairs if one in vocabulary and other in vocabulary]
        merges += [(-float(scores[n]), vocabulary[one], vocabulary[other], one, other) for one, other in known]
    return [(one, other) for *_, one, other in sorted(merges)]


def _add_begin_and_end(file: GgufFile, built: Tokenizer, tokens: list[str]) -> None:
    """Add the tokens that every text begins or ends with, as the metadata specifies."""
    from tokenizers import processors

    sentencepiece = _value(file, "model", str) == "llama"
    begins = sentencepiece or file.metadata.get("tokenizer.ggml.pre") in WHOLE_WORDS
    parts = ["$A"]
    for key, name, default in (("bos", "add_bos_token", begins), ("eos", "add_eos_token", False)):
        token = _token(file, key, len(tokens))
        if file.metadata.get(f"tokenizer.ggml.{name}", default) and token is not None:
            parts = [tokens[token], *parts] if key == "bos" else [*parts, tokens[token]]
    if len(parts) > 1:
        special = [(token, built.token_to_id(token)) for token in parts if token != "$A"]
        built.post_processor = processors.TemplateProcessing(
            single=parts, pair=[*parts, *(f"{part}:1".replace("$A", "$B") for part in parts)], special_tokens=special
        )


def _value(file: GgufFile, key: str, kind: Any) -> Any:
    """Return a value of the tokenizer's metadata; raise if it is missing or has another type."""
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        raise ValueError(f"{file.path} has no tokenizer.ggml.{key}; pass a file that includes its tokenizer")
    check_value(f"{file.path}: tokenizer.ggml.{key}", value, kind)
    return value


def _types(file: GgufFile) -> np.ndarray:
    types = file.metadata.get("tokenizer.ggml.token_type")
    return types if isinstance(types, np.ndarray) else np.zeros(0)


def _token(file: GgufFile, key: str, size: int) -> int | None:
    """Return the id of a special token, or None; raise if it is not below the number of tokens."""
    token = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    check_value(f"{file.path}: tokenizer.ggml.{key}_token_id", token, int | None)
    if token is not None and not 0 <= token < size:
        raise ValueError(f"{file.path}: tokenizer.ggml.{key}_token_id must be below {size}, got {token}")
    return token
