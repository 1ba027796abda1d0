"""Rounded weights in checkpoint folders and GGUF files."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import regard as rg
from regard.engines import native
from regard.engines.packed_linear import PackedWeight
from regard.engines.weight_formats import quantize
from regard.models.checkpoints.gguf.blocks import parse_blocks
from regard.nn.freeze import pack_quantized

pytestmark = pytest.mark.skipif(bool(native.why_missing()), reason="needs the compiled library")
NAME = "stack.layers.0.attention.qkv.weight"


def language_model(d_model=64, d_hidden=65):
    torch.manual_seed(0)
    sizes = {"vocabulary": 96, "layers": 2, "heads": 2, "d_head": 16, "positions": 16}
    return rg.models.LanguageModel(rg.models.LanguageConfig(d_model=d_model, d_hidden=d_hidden, **sizes)).eval()


@pytest.mark.parametrize("weights", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("d_model", [64, 33, 32])  # 32 rows are one panel
@torch.inference_mode()
def test_saved_and_loaded_weights_are_the_same(weights, d_model, tmp_path):
    model, ids = language_model(d_model), torch.tensor([[1, 2, 3]])
    rg.save(model, tmp_path / "plain")
    loaded = rg.load(tmp_path / "plain", weights=weights)
    rg.save(loaded, tmp_path / "rounded")
    with safe_open(tmp_path / "rounded" / "model.safetensors", "pt") as file:
        assert f"{NAME}.{weights}" in file.keys()  # noqa: SIM118
    again = rg.load(tmp_path / "rounded")
    for name, weight in again.named_parameters():
        assert type(weight) is type(loaded.get_parameter(name))
        assert torch.equal(weight.clone(), loaded.get_parameter(name).clone())
    assert torch.equal(again(ids), loaded(ids))
    size = sum(path.stat().st_size for path in (tmp_path / "rounded").iterdir())
    assert size < 0.75 * sum(path.stat().st_size for path in (tmp_path / "plain").iterdir())


def test_layout_of_the_file(tmp_path):
    model = language_model()
    rg.nn.freeze(model, weights="int4")
    rg.save(model, tmp_path)
    tensors, weight = load_file(tmp_path / "model.safetensors"), model.get_parameter(NAME).clone()
    low, high = tensors[f"{NAME}.int4"] & 15, tensors[f"{NAME}.int4"] >> 4
    numbers = torch.stack((low, high), -1).flatten(1).float() - 8
    assert torch.equal(numbers * tensors[f"{NAME}.scale"].repeat_interleave(32, 1), weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{NAME}.scale"), "no .*scale"),
        (lambda t: t.update({f"{NAME}.scale": t[f"{NAME}.scale"][:, :1]}), "must be finite float32 of shape"),
        (lambda t: t[f"{NAME}.scale"].fill_(float("nan")), "must be finite"),
        (lambda t: t.update({f"{NAME}.scale": t[f"{NAME}.scale"].double()}), "must be finite float32"),
        (lambda t: t[f"{NAME}.scale"].fill_(1 / 3), "float16 numbers"),
        (lambda t: t.update({f"{NAME}.int8": t[f"{NAME}.int8"].short()}), "must be a matrix of torch.int8"),
        (lambda t: t.update({f"{NAME}.minimum": t[f"{NAME}.scale"].clone()}), "takes no"),
        (lambda t: t.update({f"{NAME}.int8": t[f"{NAME}.int8"][:, :32].clone()}), "scale"),
    ],
)
def test_damaged_files_are_refused(change, message, tmp_path):
    model = language_model()
    rg.nn.freeze(model, weights="int8")
    rg.save(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        rg.load(tmp_path)


def test_dtypes_and_formats_that_do_not_go_together(tmp_path):
    rg.save(language_model(), tmp_path)
    with pytest.raises(ValueError, match="computes in float32"):
        rg.load(tmp_path, weights="int8", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="one of 'float32', 'bfloat16', 'int8', 'int4', got 'int3'"):
        rg.load(tmp_path, weights="int3")
    with pytest.raises(ValueError, match="got 'int3'"):
        rg.nn.freeze(language_model(), weights="int3")


def test_freezing_again_converts_or_keeps():
    model = language_model()
    rg.nn.freeze(model, weights="int8")
    before = model.get_parameter(NAME)
    rounded = before.clone()
    rg.nn.freeze(model)
    assert model.get_parameter(NAME) is before
    assert before.format == "int8"
    rg.nn.freeze(model, weights="float32")
    assert before.format == "float32"
    assert torch.equal(before.clone(), rounded)
    assert torch.equal(model.state_dict()[NAME], rounded)


def test_an_embedding_that_is_stored_as_int4_stays_so():
    model = language_model()
    content = quantize(model.embedding.weight.detach(), "int4")
    pack_quantized(model, {"embedding.weight": content})
    rg.nn.freeze(model, weights="int4")
    assert model.embedding.weight.format == content.format
    assert torch.equal(model.embedding.weight.clone(), content.dequantize())


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_gguf_blocks_are_taken_as_they_are(kind):
    gguf = pytest.importorskip("gguf")
    weight = torch.randn(48, 96, generator=torch.Generator().manual_seed(0))
    blocks = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind])
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind]))
    content = parse_blocks(kind, torch.from_numpy(blocks))
    assert torch.equal(content.dequantize(), expected)
    assert torch.equal(PackedWeight.pack(content).unpack(), expected)
