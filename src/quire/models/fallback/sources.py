"""Recognizes classes of transformers that quire can replace, by the source of `forward`.

The file of each family in transformers contains all of its modules, so most classes are copies of a
few classes. A copy is recognized by the statements of its `forward`, without white space and
comments. Classes with other statements are not replaced. Called by `parts.py`.
"""

import inspect
import re
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

_ROOT_MEAN_SQUARE = (
    "input_dtype=hidden_states.dtype;hidden_states=hidden_states.to(torch.float32);"
    "variance=hidden_states.pow(2).mean(-1,keepdim=True);"
    "hidden_states=hidden_states*torch.rsqrt(variance+self.variance_epsilon);"
)
NORMS: Mapping[str, float | None] = {
    _ROOT_MEAN_SQUARE + "returnself.weight*hidden_states.to(input_dtype)": None,
    _ROOT_MEAN_SQUARE + "return(self.weight*hidden_states).to(input_dtype)": 0.0,
}
"""Statements of the norms of Llama and OLMo 2 -> the `offset` of the same norm in `layers.norm`."""

GATED_MLP = (
    "down_proj=self.down_proj(self.act_fn(self.gate_proj(x))*self.up_proj(x));returndown_proj"
)

ROTARY = (
    "freqs=position_ids[...,None].float()*self.inv_freq.to(device=x.device,dtype=torch.float);"
    "emb=torch.cat((freqs,freqs),dim=-1);cos=emb.cos()*self.attention_scaling;"
    "sin=emb.sin()*self.attention_scaling;returncos.to(dtype=x.dtype),sin.to(dtype=x.dtype)"
)

_TURN_HALVES = (
    "cos=cos.unsqueeze(unsqueeze_dim);sin=sin.unsqueeze(unsqueeze_dim);"
    "q_embed=(q*cos)+(rotate_half(q)*sin);k_embed=(k*cos)+(rotate_half(k)*sin);"
    "returnq_embed,k_embed"
)
_SWAP_HALVES = (
    "x1=x[...,:x.shape[-1]//2];x2=x[...,x.shape[-1]//2:];returntorch.cat((-x2,x1),dim=-1)"
)


def _attention(q: str, k: str, window: str) -> str:
    """The statements of an attention's `forward`. `q` and `k` are the expressions that compute
    queries and keys. `window` is the argument for the window, or ""."""
    return (
        "input_shape=hidden_states.shape[:-1];hidden_shape=(*input_shape,-1,self.head_dim);"
        f"query_states={q}.transpose(1,2);key_states={k}.transpose(1,2);"
        "value_states=self.v_proj(hidden_states).view(hidden_shape).transpose(1,2);"
        "cos,sin=position_embeddings;"
        "query_states,key_states=apply_rotary_pos_emb(query_states,key_states,cos,sin);"
        "ifpast_key_valuesisnotNone:;"
        "key_states,value_states=past_key_values.update(key_states,value_states,self.layer_idx);"
        "attention_interface:Callable=ALL_ATTENTION_FUNCTIONS.get_interface(;"
        "self.config._attn_implementation,eager_attention_forward;);"
        "attn_output,attn_weights=attention_interface(;self,;query_states,;key_states,;"
        "value_states,;attention_mask,;dropout=0.0ifnotself.trainingelseself.attention_dropout,;"
        f"scaling=self.scaling,;{window}**kwargs,;);"
        "attn_output=attn_output.reshape(*input_shape,-1).contiguous();"
        "attn_output=self.o_proj(attn_output);returnattn_output,attn_weights"
    )


_Q, _K = (f"self.{name}_proj(hidden_states).view(hidden_shape)" for name in "qk")
_WINDOW = "sliding_window=self.sliding_window,;"
_MISTRAL = 'sliding_window=getattr(self.config,"sliding_window",None),;'
ATTENTIONS: Mapping[str, bool] = {
    _attention(_Q, _K, ""): False,
    _attention(_Q, _K, _WINDOW): False,
    _attention(_Q, _K, _MISTRAL): False,
    _attention(f"self.q_norm({_Q})", f"self.k_norm({_K})", ""): True,
    _attention(f"self.q_norm({_Q})", f"self.k_norm({_K})", _WINDOW): True,
}
"""Statements of attention (Llama, Qwen2, Mistral, Qwen3) -> whether q and k are normed."""


def _layer(*arguments: str) -> str:
    """The statements of a decoder layer's `forward`, which passes `arguments` to its attention."""
    passed = "".join(f"{name}={name},;" for name in arguments)
    return (
        "residual=hidden_states;hidden_states=self.input_layernorm(hidden_states);"
        f"hidden_states,_=self.self_attn(;hidden_states=hidden_states,;{passed}**kwargs,;);"
        "hidden_states=residual+hidden_states;residual=hidden_states;"
        "hidden_states=self.post_attention_layernorm(hidden_states);"
        "hidden_states=self.mlp(hidden_states);hidden_states=residual+hidden_states;"
        "returnhidden_states"
    )


LAYERS = frozenset(
    {
        _layer(
            "attention_mask",
            "position_ids",
            "past_key_values",
            "use_cache",
            "position_embeddings",
        ),
        _layer("position_embeddings", "attention_mask", "position_ids", "past_key_values"),
    }
)
"""Statements of the decoder layers of Llama and Mixtral."""


def body_of(module: Any) -> str:
    """The statements of `forward` of a module's class; "" if there is no source."""
    return _statements(type(module).forward)


_ROUTED = re.compile(
    r"\b(?:F|nn\.functional)\.linear\(;?[^;]*?,;?self\.weight"
    r"(?:\.float\(\)|\.type\(torch\.float32\))?(?:,self\.bias)?,?;?\)"
)
"""Matches a router's product with its weight."""


def is_router(module: Any) -> bool:
    """Whether a module uses its weight only in one call of `linear` and to read the dtype."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2:
        return False
    body = body_of(module)
    rest = _ROUTED.sub("", body).replace("self.weight.dtype", "")
    return rest.count("self.weight") == 0 and len(_ROUTED.findall(body)) == 1


def turns_halves(module: Any) -> bool:
    """Whether the file of an attention class rotates q and k by the same functions as Llama."""
    names = vars(sys.modules[type(module).__module__])
    found = (names.get("apply_rotary_pos_emb"), names.get("rotate_half"))
    return tuple(map(_statements, found)) == (_TURN_HALVES, _SWAP_HALVES)


@cache
def _statements(function: Any) -> str:
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return ""
    body = re.sub(r'^\s*r?"""(.*?)"""\n', "", source.partition(":\n")[2], flags=re.DOTALL)
    lines = (re.sub(r"\s+", "", line.partition("#")[0]) for line in body.splitlines())
    return ";".join(line for line in lines if line)
