"""Modules: attention with its projections, blocks, stacks, caches, packed batches."""

from regard.nn.attention import AdditiveAttention, MultiHeadAttention, SelfAttention, TokenNorm, linear
from regard.nn.blocks import Block, LayerScale, OutputNorm, PostNorm, PreNorm, Residual, SandwichNorm, UnitRMSNorm
from regard.nn.cache import Cache, CrossCache, FixedCache, WindowCache
from regard.nn.context import LayerContext, key_mask
from regard.nn.convolution import ShortConvolution
from regard.nn.cross_layer import CrossLayerAttention
from regard.nn.experts import Experts, Routing
from regard.nn.feedforward import ACTIVATIONS, FeedForward, GatedFeedForward
from regard.nn.freeze import freeze, thaw
from regard.nn.generate import Beam, GenerationState, Greedy, Sample
from regard.nn.graph import GraphAttention
from regard.nn.head_mixing import DifferentialAttention, OutputGate, TalkingHeadsAttention
from regard.nn.latent_attention import LatentAttention
from regard.nn.linear_attention import DeltaNet, GatedDeltaNet, GatedLinearAttention, Mamba2, Retention
from regard.nn.logits_processor import LogitsProcessor
from regard.nn.loss import token_loss
from regard.nn.packing import Packed, pack, unpack
from regard.nn.pooling import AttentionPooling, First, Last, Max, Mean
from regard.nn.recurrent import RecurrentCache
from regard.nn.rotary import Rotary
from regard.nn.sets import CrossBlock, InducedBlock, ProbePooling, SeedPooling
from regard.nn.stacks import Decoder, DecoderCache, Encoder, RelativeBias, RelativeEmbedding

__all__ = [
    "ACTIVATIONS",
    "AdditiveAttention",
    "AttentionPooling",
    "Beam",
    "Block",
    "Cache",
    "CrossBlock",
    "CrossLayerAttention",
    "Decoder",
    "DecoderCache",
    "DeltaNet",
    "DifferentialAttention",
    "Encoder",
    "Experts",
    "FeedForward",
    "First",
    "FixedCache",
    "GatedDeltaNet",
    "GatedFeedForward",
    "GatedLinearAttention",
    "GraphAttention",
    "Greedy",
    "InducedBlock",
    "Last",
    "LatentAttention",
    "LogitsProcessor",
    "Mamba2",
    "LayerScale",
    "Max",
    "Mean",
    "CrossCache",
    "MultiHeadAttention",
    "OutputGate",
    "OutputNorm",
    "Packed",
    "PostNorm",
    "PreNorm",
    "RecurrentCache",
    "ProbePooling",
    "RelativeBias",
    "RelativeEmbedding",
    "Residual",
    "Retention",
    "Rotary",
    "Routing",
    "Sample",
    "SandwichNorm",
    "SeedPooling",
    "SelfAttention",
    "ShortConvolution",
    "LayerContext",
    "GenerationState",
    "TalkingHeadsAttention",
    "TokenNorm",
    "UnitRMSNorm",
    "WindowCache",
    "freeze",
    "key_mask",
    "linear",
    "pack",
    "thaw",
    "token_loss",
    "unpack",
]
