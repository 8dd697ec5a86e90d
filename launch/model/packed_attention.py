"""Attention inside the segments of a packed row, with the best kernel available: for
megatron-core's layers (`megatron.attention`); and, through transformers' registry, for vision
towers, for language models, and for language models on rows with prefix trees.

flash_attn_3  flash_attn_interface's flash_attn_varlen_func, on Hopper, where importable
flash_attn    flash-attn's, where importable
torch_varlen  torch.nn.attention.varlen on CUDA
sdpa          one scaled_dot_product_attention per segment: CPU, or float32 on CUDA
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from launch.model.prefix_trees import RowTrees

#: cu_seqlens of queries and keys, and the longest segment of each, as flash attention takes them.
Lengths = tuple[Tensor, Tensor, int, int]
#: Numbers of earlier and of later tokens of its segment that a token sees; -1: all.
Window = tuple[int, int]
CAUSAL: Final[Window] = (-1, 0)
#: Major compute capability of the GPUs that flash attention 3 is written for.
_HOPPER: Final = 9
#: (query (T, H, D), key and value (T', G, D), lengths, scale, window) -> (T, H, D); queries are the
#: last tokens of a segment's keys, G divides H.
VarlenKernel = Callable[[Tensor, Tensor, Tensor, Lengths, float, Window], Tensor]


def _flash_attn(
    package: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Lengths,
    scale: float,
    window: Window,
) -> Tensor:
    varlen = importlib.import_module(package).flash_attn_varlen_func
    options = {"softmax_scale": scale, "causal": window[1] == 0, "window_size": window}
    out = varlen(query, key, value, *lengths, **options)
    return out[0] if isinstance(out, tuple) else out  # early versions of 3 also gave the sums


def _torch_varlen(
    query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, scale: float, window: Window
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # The kernel takes grouped keys; from 2.13 torch refuses them unless they are announced.
    has_option = "enable_gqa" in inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if has_option else {}
    out = varlen_attn(query, key, value, *lengths, scale=scale, window_size=window, **options)
    assert isinstance(out, Tensor)  # a pair only where return_aux asks for it
    return out


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Lengths,
    scale: float,
    window: Window,
    blocks: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Call scaled_dot_product_attention on each segment. `blocks`: numbers of the blocks of queries
    and of keys, -1: none. Tokens of a block see each other, within the window's earlier side."""
    gqa = query.shape[1] != key.shape[1]
    own, seen = (cu_seqlens.diff().tolist() for cu_seqlens in lengths[:2])
    # Slices would fill, and add up, a gradient of all keys for every segment.
    parts = [query.split(own), key.split(seen), value.split(seen)]
    parts += [] if blocks is None else [blocks[0].split(own), blocks[1].split(seen)]
    outputs = []
    for tensors in zip(*parts, strict=True):
        q, k, v = (t.transpose(0, 1)[None] for t in tensors[:3])
        options: dict[str, Any] = {"is_causal": window == CAUSAL}
        # is_causal would align the first tokens, and knows no window.
        if window[0] >= 0 or (window == CAUSAL and q.shape[2] != k.shape[2]):
            mask = _visible(q.shape[2], k.shape[2], window, q.device)
            if blocks is not None:
                rows, columns = tensors[3:]
                near = _visible(q.shape[2], k.shape[2], (window[0], -1), q.device)
                mask |= near & (rows[:, None] == columns) & (columns >= 0)
            options = {"attn_mask": mask}
        out = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=gqa, **options)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def _visible(num_queries: int, num_keys: int, window: Window, device: torch.device) -> Tensor:
    """Make the mask of queries that are the last of the keys: bool (num_queries, num_keys)."""
    everything = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    (earlier, later), first = window, num_keys - num_queries
    found = everything if later < 0 else everything.tril(first + later)
    return found if earlier < 0 else found.triu(first - earlier)


KERNELS: Final[Mapping[str, VarlenKernel]] = {
    "flash_attn_3": functools.partial(_flash_attn, "flash_attn_interface"),  # its folder `hopper`
    "flash_attn": functools.partial(_flash_attn, "flash_attn"),
    "torch_varlen": _torch_varlen,
    "sdpa": _sdpa,
}


@functools.cache
def is_importable(package: str) -> bool:
    """Tell whether a package is installed and can be imported."""
    try:  # finding it is not enough: a build for another torch is found, but fails here
        importlib.import_module(package)
    except ImportError:
        return False
    return True


def select_backend(device: torch.device, dtype: torch.dtype, requested: str = "auto") -> str:
    """Choose the backend of attention for tensors of a device and dtype. Raises ValueError if the
    requested backend is not installed, or cannot compute them."""
    available = ["sdpa"]
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        available.insert(0, "torch_varlen")
        if is_importable("flash_attn"):
            available.insert(0, "flash_attn")
        is_installed = is_importable("flash_attn_interface")
        if is_installed and torch.cuda.get_device_capability(device)[0] == _HOPPER:
            available.insert(0, "flash_attn_3")
    if requested == "auto":
        return available[0]
    if requested not in available:
        raise ValueError(
            f"attention {requested!r} cannot be used for {dtype} on {device}; set "
            f"attention to auto or to one of: {', '.join(available)}"
        )
    return requested


#: Name in transformers' attention registry. Its models look for "flash" in the name, and then pass
#: the whole row with its boundaries instead of calling once per image.
PACKED_ATTENTION: Final = "packed_flash"
#: Name in the registry for language models on rows with prefix trees.
TREE_ATTENTION: Final = "prefix_trees"


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: Any = None,
    max_length_q: Any = None,
    row_trees: RowTrees | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    backend: str | None = None,
    **_: Any,  # transformers passes the key's lengths too, and its own bookkeeping
) -> tuple[torch.Tensor, None]:
    """Attend inside segments, for transformers: a tower's segments are images or windows. In a row
    with prefix trees, attend to trunks as well. Windows, and images whose tokens see each other,
    are at places in a sample, not in the row.

    Args:
        query: (1, H, T, D).
        key, value: (1, G, T, D). Values may be narrower (multi-head latent attention).
        cu_seq_lens_q, max_length_q: boundaries of the segments, and the longest; or else
        row_trees: the segments of a language model's row, from the model's forward.
        is_causal: default: the module's.
        backend: a name in KERNELS; default: the best for these tensors.

    Returns:
        (1, T, H, D), and no attention weights.
    """
    device, width = query.device, value.shape[-1]
    if width < query.shape[-1]:  # kernels take one width
        value = F.pad(value, (0, query.shape[-1] - width))
    query, key, value = (t[0].transpose(0, 1) for t in (query, key, value))
    if torch.is_autocast_enabled(device.type):  # rotated queries and keys are float32
        dtype = torch.get_autocast_dtype(device.type)
        query, key, value = (t.to(dtype) for t in (query, key, value))
    kernel = KERNELS[backend or select_backend(device, query.dtype)]
    window = CAUSAL if (module.is_causal if is_causal is None else is_causal) else (-1, -1)
    if sliding_window is not None:
        window = sliding_window - 1, window[1]
    if row_trees is None:
        lengths = (cu_seq_lens_q.to(torch.int32),) * 2 + (max_length_q,) * 2
        out = kernel(query, key, value, lengths, scaling, window)
    else:
        trees = row_trees
        if sliding_window is not None and trees.blocks is not None:
            kernel = functools.partial(_sdpa, blocks=(trees.blocks, trees.blocks[trees.keys]))
        lengths = trees.cu_seqlens_q, trees.cu_seqlens_kv, trees.max_seqlen_q, trees.max_seqlen_kv
        with trees.gather_keys(key, value) as (key, value):
            out = kernel(query, key, value, lengths, scaling, window)
    return out[None, ..., :width], None


def register_attention(backend: str | None = None) -> str:
    """Make `packed_attention`, on a backend or the best, known to transformers, and return the name
    to ask for."""
    from transformers import AttentionInterface

    name = PACKED_ATTENTION if backend is None else f"{backend}_{PACKED_ATTENTION}"
    AttentionInterface.register(name, functools.partial(packed_attention, backend=backend))
    return name
