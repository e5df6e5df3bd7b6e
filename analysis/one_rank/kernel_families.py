"""Groups kernels into families (gemm, attention, ...) by their names, and gives each family's share of the time.

A step has thousands of kernels with hundreds of names, and the ten longest are a poor summary: elementwise kernels may
have forty names and fill the step together.  Families show what to change: fuse elementwise operations, use a better
attention, avoid copies.

A kernel has only its name, so families are words to search for, in order; the first match decides.  The order matters
more than the words: PyTorch puts the operation into the template arguments of a general kernel
(`elementwise_kernel<... direct_copy_kernel_cuda ...>`), cuDNN calls its convolutions `implicit_gemm`, and an optimizer
is an elementwise functor.  Other names are "other"; a test on real traces keeps that small.

Left out: communication, which `classification` decides first.  Durations are sums: two kernels that overlap on two
streams count twice here and once in the ledger.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pacecar.formatting.plain_text import clean
from pacecar.ledger.attribution import Work
from pacecar.ledger.classification import NAMES_MAX
from pacecar.ledger.intervals import total

from ..document.report import Family
from ..trace.columns import WORKS, Trace

__all__ = ["FAMILIES", "family_of", "kernel_families", "kernel_name", "sums_by_group"]

FAMILIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("embedding", (
        "embedding", "embeddings", "permute_pooled_embs", "linearize_index", "bounds_check_indices", "emb_bag",
        "fbgemm_gpu::permute_", "fbgemm_gpu::_offsets_range", "recat_", "block_bucketize", "jagged",
        "grad_indice_weights", "cachelookup", "rotary_embed", "keyed_jagged", "_permute_2d_lengths", "emb_",
    )),
    ("optimizer", (
        "adamfunctor", "adam_kernel", "adamw", "fusedadam", "fusedoptimizer", "sgdfunctor", "fusedsgd", "lambfunctor",
        "lamb_",
        "momentum_update", "lionfunctor", "adagrad", "optim::", "multi_tensor", "foreach_tensor", "triton_for_",
    )),
    ("attention", (
        "flash_fwd", "flash_bwd", "flashattn", "flash_attn", "fmha", "attention", "attn_fwd", "attn_bwd", "attn_",
        "_attn", "mha_", "fwd_splitkv", "sdpa", "reshape_and_cache", "mla_", "batchprefill", "batchdecode",
        "singleprefill", "decode_kernel", "paged_", "bwd_dq", "bwd_dkdv", "flex_",
    )),
    ("convolution", (
        "convolve", "convolution", "conv1d", "conv2d", "conv3d", "conv_", "_conv", "::conv", "_4conv", "dgrad", "wgrad",
        "fprop", "winograd", "scudnn", "im2col", "col2im", "fft2d", "igemm_", "computeoffsetskernel", "computeboffsets",
        "computewgrad", "depthwise", "subtensorop", "miopen", "nchwtonhwc", "nhwctonchw", "nchw2nhwc",
        "batched_transpose", "flip_filter", "gcgemm", "xdlops",
    )),
    ("normalization", (
        "batch_norm", "batchnorm", "layer_norm", "layernorm", "rms_norm", "rmsnorm", "group_norm", "groupnorm",
        "bn_fw", "bn_bw", "gammabeta", "rowwisemoments", "scalepackedtensor", "ln_fwd", "ln_bwd",
        "instance_norm", "computefusedparams", "computeinternalgradients", "computebackwardfused",
    )),
    ("sampling", ("topk", "top_k", "top_p", "sample", "multinomial", "argmax", "gathertopk", "penalt")),
    ("mixture_of_experts", (
        "moe", "routing", "expert", "permute_tokens", "bitmatrix", "finalize_matmul", "_combined_", "gating",
    )),
    ("softmax", ("softmax", "nll_loss", "classnll", "cross_entropy", "logsumexp", "log_softmax")),
    ("gemm", (
        "gemm", "cijk_", "nvjet", "xmma", "matmul", "cublas", "gemv", "splitk", "split_k", "bmm", "cutlass::kernel",
        "dot_kernel", "dot_product", "triton_mm", "triton_tem_", "_mm_", "wmma", "mfma", "tensorop", "ck::kernel_",
        "grouped_", "epilogue::impl", "gett", "cutensor", "magma_", "reduce_1block", "f8f8bf16", "device_kernel",
        "kernel_grouped", "hipblas", "tensile", "ck_tile::gemm", "_matmul", "triton_bmm", "ger_kernel",
        "device_gemm", "trsm", "syrk",
    )),
    ("quantization", ("quant", "fp8", "hfp8", "int8", "scaled_cast", "amax", "_to_float", "qparam")),
    ("random", (
        "distribution_", "dropout", "philox", "curand", "bernoulli", "random_", "uniform_kernel", "normal_kernel",
    )),
    ("sort", ("sort", "radix", "bitonic", "unique", "histogram", "mergesort", "searchsorted", "kthvalue")),
    ("index", (
        "index", "gather", "scatter", "masked", "where_kernel", "nonzero", "flagged", "take_", "compact", "select",
        "put_", "triu", "tril", "arange", "segment", "to_dense",
    )),
    ("pooling", ("pool", "upsample", "interpolate", "grid_sampl", "roi_align", "roi_pool")),
    ("copy_kernel", (
        "copy", "memcpy", "memset", "catarray", "transpose", "fillfunctor", "permute", "fill_", "_cat_", "pad_",
        "concat", "clone", "contiguous", "__amd_rocclr", "convert", "slice", "roll_cuda", "flip_kernel",
    )),
    ("fused", ("triton_poi", "triton_red", "triton_per", "triton_", "fused_", "_fused", "kernel_fused", "nvfuser")),
    ("reduction", (
        "reduce", "cumsum", "scan", "norm_kernel", "sum_functor", "meanops", "argmin", "_sum_", "sum_kernel",
        "count_", "prefix_sum", "l2norm",
    )),
    ("elementwise", (
        "elementwise", "vectorized", "unrolled", "pointwise", "act_and_mul", "silu", "gelu", "relu", "swiglu",
        "swish", "sigmoid", "tanh", "optensor", "opdtensor", "addtensor", "bias", "residual", "_add", "_mul",
        "compute_cuda_kernel", "scale", "clamp", "axpy", "activation", "lerp", "ew_",
    )),
)  # fmt: skip
"""Each family and its words, searched for in the lower-case name in this order."""

OTHER = "other"


@lru_cache(maxsize=NAMES_MAX)
def family_of(name: str) -> str:
    """Return the family of a compute kernel of this name; "other" when no word of `FAMILIES` fits."""
    lowered = name.lower()
    for family, words in FAMILIES:
        for word in words:
            if word in lowered:
                return family
    return OTHER


def kernel_families(trace: Trace, start_ns: NDArray[np.int64], end_ns: NDArray[np.int64]) -> list[Family]:
    """Return the families of the device rows, the longest first.

    `start_ns` and `end_ns` are the rows' times, cut to the window; empty rows do not count.  Communication and copies
    are one family each, work of unknown kind is "unknown".
    """
    device = trace.device
    inside = end_ns > start_ns
    name, work, durations = device.name[inside], device.work[inside], (end_ns - start_ns)[inside]
    everything = total(durations)
    # One group for each pair of name and kind; there are few, so python is fast enough.
    pairs, group, counts = np.unique(name.astype(np.int64) * len(WORKS) + work, return_inverse=True, return_counts=True)
    sums = sums_by_group(group, durations, len(pairs))
    found: dict[tuple[str, Work], list[tuple[int, int, str]]] = {}
    for pair, count, duration in zip(pairs.tolist(), counts.tolist(), sums, strict=True):
        kind, kernel = WORKS[pair % len(WORKS)], trace.names[pair // len(WORKS)]
        found.setdefault((_family(kind, kernel), kind), []).append((duration, count, kernel))
    families = [
        Family(
            family=family,
            work=kind.value,
            count=sum(count for _, count, _ in kernels),
            duration_ns=sum(duration for duration, _, _ in kernels),
            share_ratio=sum(duration for duration, _, _ in kernels) / everything,
            largest=max(kernels)[2],
        )
        for (family, kind), kernels in found.items()
    ]
    return sorted(families, key=lambda family: (-family.duration_ns, family.family))


def _family(kind: Work, kernel: str) -> str:
    if kind is Work.COMPUTE:
        return family_of(kernel)
    return "unknown" if kind is Work.OTHER else kind.value


def sums_by_group(group: NDArray[np.int64], values: NDArray[np.int64], groups: int) -> list[int]:
    """Return the sum of `values` for each group, in integers: bincount's weights are floats."""
    values = values[np.argsort(group, kind="stable")]
    ends = np.cumsum(np.bincount(group, minlength=groups)).tolist()
    return [total(values[low:high]) for low, high in pairwise([0, *ends])]


def kernel_name(name: str) -> str:
    """Return a kernel's name for display: cleaned, without the return type of a C++ template."""
    return clean(name).removeprefix("void ")
