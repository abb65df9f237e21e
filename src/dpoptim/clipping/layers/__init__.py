"""Which rule runs which module."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrize import is_parametrized

from dpoptim.clipping.layers.attention import attention
from dpoptim.clipping.layers.convolution import convolution
from dpoptim.clipping.layers.embedding import embedding, scaled_embedding
from dpoptim.clipping.layers.generic import generic
from dpoptim.clipping.layers.hugging_face.deberta import deberta_attention, deberta_encoder, deberta_lm_head
from dpoptim.clipping.layers.hugging_face.opt import opt_decoder_layer, opt_positions
from dpoptim.clipping.layers.hugging_face.relative_bias import mpnet_encoder, t5_attention
from dpoptim.clipping.layers.hugging_face.vision import vit_embeddings
from dpoptim.clipping.layers.linear import linear, transposed_linear
from dpoptim.clipping.layers.norm_layers import (
    frozen_batch_norm,
    group_norm,
    instance_norm,
    layer_norm,
    rms_norm,
    rms_norm_kind,
)
from dpoptim.clipping.layers.recurrent import recurrent
from dpoptim.clipping.layers.rule import Layer, RuleFunction, any_trainable
from dpoptim.data.shards import fsdp_modules

_RULES: dict[Any, RuleFunction] = {
    nn.Linear.forward: linear,
    nn.Embedding.forward: embedding,
    nn.LayerNorm.forward: layer_norm,
    nn.RMSNorm.forward: rms_norm,
    nn.GroupNorm.forward: group_norm,
    nn.Conv1d.forward: convolution,
    nn.Conv2d.forward: convolution,
    nn.Conv3d.forward: convolution,
    nn.MultiheadAttention.forward: attention,
    nn.LSTM.forward: recurrent,
    nn.GRU.forward: recurrent,
    nn.RNN.forward: recurrent,
    _InstanceNorm.forward: instance_norm,
    _BatchNorm.forward: frozen_batch_norm,
}
"""The key is a forward function, so a subclass with a different forward never gets its parent's rule."""

_OF_TRANSFORMERS: dict[tuple[str, str], RuleFunction] = {
    ("pytorch_utils", "Conv1D"): transposed_linear,
    ("models.vit.modeling_vit", "ViTEmbeddings"): vit_embeddings,
    ("models.opt.modeling_opt", "OPTLearnedPositionalEmbedding"): opt_positions,
}
_REWRITTEN: dict[tuple[str, str], RuleFunction] = {
    ("models.opt.modeling_opt", "OPTDecoderLayer"): opt_decoder_layer,
    ("models.t5.modeling_t5", "T5Attention"): t5_attention,
    ("models.mt5.modeling_mt5", "MT5Attention"): t5_attention,
    ("models.umt5.modeling_umt5", "UMT5Attention"): t5_attention,
    ("models.mpnet.modeling_mpnet", "MPNetEncoder"): mpnet_encoder,
    ("models.deberta_v2.modeling_deberta_v2", "DebertaV2Encoder"): deberta_encoder,
    ("models.deberta_v2.modeling_deberta_v2", "DisentangledSelfAttention"): deberta_attention,
    ("models.deberta_v2.modeling_deberta_v2", "DebertaV2LMPredictionHead"): deberta_lm_head,
}
"""These rules change the inputs of inner layers, and run if an inner parameter is trained."""

_OF_DEBERTA = {deberta_encoder, deberta_attention, deberta_lm_head}
"""These rules use parameters of other modules (tables of positions or words) and always run."""


def own_rule(module: nn.Module) -> RuleFunction | None:
    """Return the module's rule, or None if it needs the generic rule."""
    forward = type(module).forward
    if forward in _RULES:
        return _RULES[forward]
    for (home, kind), rule in (_OF_TRANSFORMERS | _REWRITTEN).items():  # looked up only if transformers is imported
        found = getattr(sys.modules.get(f"transformers.{home}"), kind, None)
        if found is not None and forward is found.forward:
            return rule
    if rms_norm_kind(module) is not None:
        return rms_norm
    is_scaled = isinstance(module, nn.Embedding) and forward.__qualname__.endswith("ScaledWordEmbedding.forward")
    return scaled_embedding if is_scaled and forward.__module__.startswith("transformers.") else None


def choose_rules(model: nn.Module) -> dict[nn.Module, Layer]:
    """Return the layer of every module that must run through the engine."""
    ruled = {
        id(parameter)
        for module in model.modules()
        if own_rule(module) is not None
        for parameter in module.parameters(recurse=False)
    }
    layers: dict[nn.Module, Layer] = {}
    inside_generic: set[nn.Module] = set()
    for name, module in model.named_modules():
        is_attention = isinstance(module, nn.MultiheadAttention)  # which never calls its part
        own = [p for p in module.parameters(recurse=is_attention) if p.requires_grad]
        parts: Any = module.modules() if is_attention else [module]
        is_computed = any(is_parametrized(part) and any_trainable(part.parametrizations) for part in parts)
        rule = None if is_computed else own_rule(module)
        rewrites = rule in _REWRITTEN.values() and (rule in _OF_DEBERTA or any_trainable(module))
        if module in inside_generic or not (own or rewrites or is_computed):
            continue
        if rule is None:  # the generic rule runs everything inside the module
            if not is_computed and all(id(parameter) in ruled for parameter in own):
                continue  # its parameters belong to other layers too, as the decoder bias of a masked-LM head does
            if isinstance(module, nn.ParameterList | nn.ParameterDict):  # has no forward
                raise ValueError(
                    f"the parameters of '{name}' ({type(module).__name__}) are used outside of it, where no rule sees "
                    "their gradients. Register each on the module that uses it, as self.w0 = nn.Parameter(...)"
                )
            if fsdp_modules(module):  # whose hooks would run for each example
                raise ValueError(
                    f"layer '{name}' ({type(module).__name__}) has no specific rule, and FSDP shards it by itself. "
                    "Call fully_shard only on a module around it"
                )
            rule = generic
            inside_generic.update(module.modules())
        forward = module.__dict__.get("forward")
        if forward is not None and getattr(forward, "__func__", None) is not type(module).forward:
            raise ValueError(
                f"the forward of layer '{name}' was replaced on the instance. Create the private optimizer first"
            )
        layers[module] = Layer(name or type(module).__name__, rule, rewrites=rewrites)
    return layers
