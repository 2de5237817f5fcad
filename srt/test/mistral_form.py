"""From transformers' names and configuration to Mistral's own form: the inverse of what the runtime
does when it loads such a checkpoint.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from srt.checkpoint.weight_names import canonical_name, split_tensor_name

_MODULES = {
    "embed_tokens": "tok_embeddings",
    "norm": "norm",
    "lm_head": "output",
}
_LAYER_MODULES = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def to_mistral_names(
    tensors: Mapping[str, Tensor], hf_config: Mapping[str, Any]
) -> dict[str, Tensor]:
    """`tensors` of a Llama-like decoder under Mistral's names, with the rows of q and k in the
    order of its rotary embedding: the two halves of a head interleaved.
    """
    hf_config = hf_config.get("text_config") or hf_config
    heads = {
        "q_proj": hf_config["num_attention_heads"],
        "k_proj": hf_config["num_key_value_heads"],
    }
    result = {}
    for name, tensor in tensors.items():
        module, parameter = split_tensor_name(canonical_name(name))
        leaf = module.rpartition(".")[2]
        if leaf in heads and tensor.dim() > 0 and tensor.shape[0] > 1:
            tensor = _interleave_halves(tensor, heads[leaf])
        if module in _MODULES:
            target = _MODULES[module]
        else:
            _, layer, within = module.split(".", 2)
            target = f"layers.{layer}.{_LAYER_MODULES[within]}"
        result[f"{target}.{parameter}"] = tensor
    return result


def _interleave_halves(tensor: Tensor, heads: int) -> Tensor:
    """Row r of a head becomes row 2r in its first half, and in its second the one after."""
    rows = tensor.shape[0] // heads
    split = tensor.reshape(heads, 2, rows // 2, *tensor.shape[1:])
    return split.transpose(1, 2).reshape(tensor.shape)


def to_params(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """params.json of a Mistral or Ministral-3 configuration."""
    hf_config = hf_config.get("text_config") or hf_config
    hidden, heads = hf_config["hidden_size"], hf_config["num_attention_heads"]
    params: dict[str, Any] = {
        "dim": hidden,
        "n_layers": hf_config["num_hidden_layers"],
        "head_dim": hf_config.get("head_dim") or hidden // heads,
        "hidden_dim": hf_config["intermediate_size"],
        "n_heads": heads,
        "n_kv_heads": hf_config["num_key_value_heads"],
        "norm_eps": hf_config["rms_norm_eps"],
        "vocab_size": hf_config["vocab_size"],
        "tied_embeddings": hf_config.get("tie_word_embeddings", False),
        "max_position_embeddings": hf_config["max_position_embeddings"],
    }
    rope = hf_config.get("rope_parameters") or {"rope_theta": hf_config.get("rope_theta", 1e4)}
    params["rope_theta"] = rope["rope_theta"]
    if hf_config.get("sliding_window"):
        params["sliding_window"] = hf_config["sliding_window"]
    if rope.get("rope_type") == "yarn":
        params["yarn"] = {
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
            "factor": rope["factor"],
            "apply_scale": False,
            "beta": rope["beta_fast"],
            "alpha": rope["beta_slow"],
        }
        if rope.get("llama_4_scaling_beta"):
            params["llama_4_scaling"] = {
                "original_max_position_embeddings": rope["original_max_position_embeddings"],
                "beta": rope["llama_4_scaling_beta"],
            }
    return params
