"""One spelling for module and tensor names.

Wrapped checkpoints put the language model below a prefix, and not all put it below the same one:
`model.layers.0`, `language_model.model.layers.0` and `model.language_model.layers.0` are the same
module. Skip lists are written with either. Mistral's own files have names of their own:
`layers.0.attention.wq` is `layers.0.self_attn.q_proj`. Here the same thing always gets the same
name: `layers.0.self_attn.q_proj`, `lm_head`.
"""

import re
from collections.abc import Mapping

_WRAPPERS = ("model.", "language_model.")

# Mistral's own name of a module -> transformers' one.
MISTRAL_MODULES: Mapping[str, str] = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "tok_embeddings": "embed_tokens",
    "output": "lm_head",
    "vision_encoder": "vision_tower",
    "vision_language_adapter": "multi_modal_projector",
    "patch_merger": "multi_modal_projector.patch_merger",
    "pre_mm_projector_norm": "multi_modal_projector.norm",
}
_MISTRAL_NAME = re.compile(
    rf"(layers\.\d+\.)?({'|'.join(map(re.escape, MISTRAL_MODULES))})(?=\.|$)"
)
_DERIVED_BUFFER = re.compile(
    r"(^|\.)(rotary_emb\.(original_)?(inv_freq|cos_cached|sin_cached|cos_sin_cache)"
    r"|rope\.freqs|freqs_cis|position_ids"
    r"|(self_attn|attn|attention)\.(bias|masked_bias|mask|causal_mask))$"
)
_DECODER_MODULE = re.compile(r"layers\.\d+\.")


def canonical_name(name: str) -> str:
    """`name` of a module or tensor without the prefixes of its wrappers and in transformers' words.

    The name of a parameter, such as `weight`, stays as it is.
    """
    while name.startswith(_WRAPPERS):
        name = name.partition(".")[2]
    match = _MISTRAL_NAME.match(name)
    if match is None:
        return name
    return f"{match[1] or ''}{MISTRAL_MODULES[match[2]]}{name[match.end() :]}"


def is_decoder_module(name: str) -> bool:
    """Whether `name` is that of a module inside a decoder layer, in any spelling."""
    return _DECODER_MODULE.match(canonical_name(name)) is not None


def is_derived_buffer(name: str) -> bool:
    """Whether the tensor of this canonical name is a buffer that older checkpoints hold although it
    follows from the configuration: frequencies and tables of the rotation, causal masks, positions.
    """
    return _DERIVED_BUFFER.search(name) is not None


def split_tensor_name(name: str) -> tuple[str, str]:
    """(module, parameter) of a tensor's name: `a.b.weight` gives `("a.b", "weight")`."""
    module, _, parameter = name.rpartition(".")
    return module, parameter
