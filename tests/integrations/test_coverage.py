"""Coverage reports which attention modules of a Hugging Face model run regard, and warns once about the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from regard.integrations.transformers import Coverage, attend, coverage, enable
from tests.integrations.families import APART, build, tokens

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
IMAGE = {**SMALL, "image_size": 16, "patch_size": 8}
DECODER = {"decoder_num_attention_heads": 2, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1}


@pytest.fixture(autouse=True)
def enabled() -> None:
    torch.set_num_threads(1)
    enable()


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The warnings of the integration, without those of Transformers."""
    printed: list[str] = []
    monkeypatch.setattr("regard.integrations.transformers._log.warning_once", printed.append)
    return printed


def sam() -> tuple[Any, Any, dict]:
    vision = {**IMAGE, "image_size": 64, "patch_size": 16, "output_channels": 16, "mlp_dim": 32, "num_pos_feats": 8}
    config = hf.SamConfig(
        vision_config=vision | {"global_attn_indexes": [1], "window_size": 2},
        prompt_encoder_config={"hidden_size": 16, "image_size": 64, "patch_size": 16, "mask_input_channels": 16},
        mask_decoder_config={
            "hidden_size": 16, "mlp_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "iou_head_hidden_dim": 8
        },
    )  # fmt: skip
    return hf.SamModel, config, {"pixel_values": torch.randn(1, 3, 64, 64)}


def longt5() -> tuple[Any, Any, dict]:
    config = hf.LongT5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=37, num_layers=1, num_heads=4, local_radius=3)
    return hf.LongT5Model, config, tokens("right") | {"decoder_input_ids": tokens("left")["input_ids"][:, :7]}


def git() -> tuple[Any, Any, dict]:
    config = hf.GitConfig(**SMALL, vocab_size=99, vision_config=IMAGE)
    return hf.GitModel, config, tokens("right") | {"pixel_values": torch.randn(3, 3, 16, 16)}


def clap_audio() -> tuple[Any, Any, dict]:
    config = hf.ClapAudioConfig(
        spec_size=32, patch_size=4, patch_stride=[4, 4], window_size=2, num_mel_bins=8, patch_embeds_hidden_size=16,
        hidden_size=32, depths=[1, 1], num_attention_heads=[2, 2], enable_fusion=False,
    )  # fmt: skip
    return hf.ClapAudioModel, config, {"input_features": torch.randn(1, 1, 16, 8)}


def siglip_vision() -> tuple[Any, Any, dict]:
    return hf.SiglipVisionModel, hf.SiglipVisionConfig(**IMAGE), {"pixel_values": torch.randn(1, 3, 16, 16)}


def got_ocr2() -> tuple[Any, Any, dict]:
    vision = {**IMAGE, "image_size": 32, "output_channels": 8, "mlp_dim": 16, "window_size": 2}
    text = {**SMALL, "model_type": "qwen2", "num_key_value_heads": 2, "vocab_size": 99}
    config = hf.GotOcr2Config(
        vision_config=vision | {"global_attn_indexes": [1]}, text_config=text, image_token_id=3, image_seq_length=1
    )
    ids = tokens("right")["input_ids"][:1].clamp(min=4)
    return hf.GotOcr2Model, config, {"input_ids": ids}


ITSELF = "computes its attention itself"
# (family, modules that run regard, modules that do not, kind of these, their reason, how the warning starts)
PARTLY = [
    (sam, 4, 2, "SamVisionSdpaAttention", f"{ITSELF}, chosen from SAM_VISION_ATTENTION_CLASSES", "2 of the 6"),
    (longt5, 2, 1, "LongT5LocalAttention", ITSELF, "1 of the 3"),
    (git, 2, 2, "GitSelfAttention", f"{ITSELF}, chosen from GIT_SELF_ATTENTION_CLASSES", "2 of the 4"),
    (clap_audio, 0, 2, "ClapAudioSelfAttention", ITSELF, "No attention module"),
    (
        siglip_vision,
        2,
        1,
        "MultiheadAttention",
        "is a module of torch, which regard.integrations.torch.replace",
        "1 of",
    ),
    (got_ocr2, 2, 2, "GotOcr2VisionAttention", ITSELF, "2 of the 4"),
]


@pytest.mark.parametrize(("family", "covered", "missed", "kind", "reason", "start"), PARTLY)
def test_parts_that_cannot_run_regard_are_reported_and_warned_about(
    family: Any, covered: int, missed: int, kind: str, reason: str, start: str, warnings: list[str]
) -> None:
    cls, config, inputs = family()
    torch.manual_seed(0)
    model = cls._from_config(config, attn_implementation="regard").eval()
    assert len(warnings) == 1
    assert warnings[0].startswith(start)
    assert f"({kind} {reason}" in warnings[0]
    assert "eager" not in warnings[0]
    report = coverage(model, **inputs)
    outside = [*report.missed, *(part for part in report.uncalled if family is got_ocr2 and "vision" in part.name)]
    assert len(report.covered) == covered
    assert [part.kind for part in outside] == [kind] * missed
    assert all(reason in part.reason for part in outside if part.reason)
    if covered:  # the results equal those of eager attention
        expected = cls._from_config(config, attn_implementation="eager").eval()
        expected.load_state_dict(model.state_dict())
        with torch.no_grad():
            ours, theirs = (one(**inputs)[0] for one in (model, expected))
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["bert", "llama", "bart", "detr", "vit"])
def test_fully_covered_models_print_no_warning(name: str, warnings: list[str]) -> None:
    model, inputs = build(name)
    before = coverage(model, **inputs)
    assert not before.covered
    assert {part.reason for part in before.missed} == {"is set to attn_implementation='eager'"}
    model.set_attn_implementation("regard")
    report = coverage(model, **inputs)
    assert report.parts == report.covered
    assert len(report.parts) == len(before.parts) >= 2
    assert all(part.calls == part.computed == 1 for part in report.parts)
    assert not warnings


@pytest.mark.parametrize("name", APART)
def test_models_with_custom_attention_have_no_covered_part(name: str) -> None:
    model, inputs = build(name)
    other = type(model)._from_config(model.config, attn_implementation="regard")
    report = coverage(other, **inputs)
    assert not report.covered
    assert report.missed


def test_the_warning_is_printed_once_and_by_set_attn_implementation(warnings: list[str]) -> None:
    cls, config, _ = sam()
    model = cls._from_config(config, attn_implementation="sdpa")
    assert not warnings
    model.set_attn_implementation("regard")
    assert len(warnings) == 1
    assert "vision_encoder.layers.*.attn (SamVisionSdpaAttention" in warnings[0]
    model.set_attn_implementation("eager")
    assert len(warnings) == 1


def videomae() -> tuple[Any, Any, dict]:
    config = hf.VideoMAEConfig(**IMAGE, num_frames=4, **DECODER, decoder_intermediate_size=16)
    hidden = torch.zeros(1, 8, dtype=torch.bool)
    hidden[:, :3] = True
    return hf.VideoMAEForPreTraining, config, {"pixel_values": torch.randn(1, 4, 3, 16, 16), "bool_masked_pos": hidden}


def vit_mae() -> tuple[Any, Any, dict]:
    config = hf.ViTMAEConfig(**IMAGE, **DECODER, decoder_intermediate_size=16)
    return hf.ViTMAEForPreTraining, config, {"pixel_values": torch.randn(1, 3, 16, 16), "noise": torch.rand(1, 4)}


def clipseg() -> tuple[Any, Any, dict]:
    config = hf.CLIPSegConfig(
        text_config={**SMALL, "vocab_size": 99, "eos_token_id": 2},
        vision_config=IMAGE,
        projection_dim=16,
        reduce_dim=16,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=16,
        extract_layers=[0, 1],
    )
    ids = tokens("right")["input_ids"][:1]
    return hf.CLIPSegForImageSegmentation, config, {"input_ids": ids, "pixel_values": torch.randn(1, 3, 16, 16)}


@pytest.mark.parametrize("family", [videomae, vit_mae, clipseg])
def test_parts_built_from_a_copy_of_the_configuration_are_set(family: Any, warnings: list[str]) -> None:
    cls, config, inputs = family()
    torch.manual_seed(0)
    model = cls._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = model(**inputs).logits
        model.set_attn_implementation("regard")
        ours = model(**inputs).logits
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
    report = coverage(model, **inputs)
    assert not report.missed, str(report)
    assert any("decoder" in part.name for part in report.covered)
    assert not warnings
    model.set_attn_implementation("sdpa")
    assert not coverage(model, **inputs).covered  # and back


def test_an_unset_copy_of_the_configuration_is_reported() -> None:
    cls, config, inputs = vit_mae()
    model = cls._from_config(config, attn_implementation="eager")
    model.config._attn_implementation_internal = "regard"
    (decoder,) = coverage(model, **inputs).missed
    assert decoder.name.startswith("decoder.")
    assert "in a copy of the configuration" in (decoder.reason or "")


class Asking(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.is_causal = config, False

    def forward(self, x: Tensor, itself: bool = False) -> Tensor:
        if itself:
            return x
        q = x[:, None]
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, attend)
        return attention(self, q, q, q, None)[0][:, :, 0]


class Pooler(nn.Module):
    """Attention in a module without attention in its name."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]


class Mixture(nn.Module):
    """A softmax that is not attention."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, None].softmax(-1)[:, 0]


class DeformableAttention(nn.Module):
    """One attention in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = InnerAttention()

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x[:, None].softmax(-1))


class InnerAttention(nn.Module):
    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return x * weights[:, 0]


class OwnModel(PreTrainedModel):
    config_class = hf.BertConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.first, self.second, self.unused = Asking(config), Asking(config), Asking(config)
        self.pool, self.mixture, self.deformable = Pooler(), Mixture(), DeformableAttention()
        self.dropout = nn.Dropout(0.5)
        self.post_init()

    def forward(self, x: Tensor, itself: bool = False) -> Tensor:
        assert not self.training
        x = self.dropout(self.second(self.first(x), itself=itself))
        return self.deformable(self.mixture(self.pool(self.second(x))))


def test_calls_are_counted_and_attention_outside_attention_modules_is_found() -> None:
    model = OwnModel._from_config(hf.BertConfig(), attn_implementation="regard").train()
    parts = {part.name: part for part in coverage(model, x=torch.randn(2, 5, 8), itself=True).parts}
    assert parts.keys() == {"first", "second", "unused", "pool", "deformable.attention"}
    assert (parts["first"].calls, parts["first"].computed, parts["first"].reason) == (1, 1, None)
    assert (parts["second"].calls, parts["second"].computed) == (2, 1)
    assert parts["second"].reason == "used regard in 1 of 2 calls"
    assert parts["unused"].reason == "not called with these inputs"
    assert parts["pool"].reason == ITSELF
    assert model.training
    assert model.dropout.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert ALL_ATTENTION_FUNCTIONS["regard"] is attend


def test_a_failing_pass_restores_the_state() -> None:
    model = OwnModel._from_config(hf.BertConfig(), attn_implementation="regard").train()
    with pytest.raises(TypeError):
        coverage(model, y=1)
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())
    assert ALL_ATTENTION_FUNCTIONS["regard"] is attend


def test_equal_modules_are_printed_on_one_line() -> None:
    cls, config, inputs = sam()
    report = coverage(cls._from_config(config, attn_implementation="regard"), **inputs)
    assert isinstance(report, Coverage)
    lines = str(report).splitlines()
    assert lines[0] == "SamModel: regard computed the attention of 4 of 6 modules"
    assert len(lines) == 6
    assert lines[-1].startswith("  other   vision_encoder.layers.*.attn (SamVisionSdpaAttention, 2 modules): computes")
    mamba = hf.MambaModel(hf.MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=9, state_size=4))
    assert str(coverage(mamba, input_ids=torch.tensor([[1, 2]]))) == "MambaModel has no attention modules"


@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_model_is_reported_like_the_model(in_place: bool) -> None:
    config = hf.LlamaConfig(**SMALL, vocab_size=9)
    model: Any = hf.LlamaForCausalLM._from_config(config, attn_implementation="regard")
    inputs = {"input_ids": torch.tensor([[1, 2, 3]])}
    expected = coverage(model, **inputs)
    compiled = torch.compile(model, backend="eager")
    if in_place:
        model.model.layers[0].compile(backend="eager")
    assert coverage(model if in_place else compiled, **inputs) == expected
    assert len(expected.covered) == 2
