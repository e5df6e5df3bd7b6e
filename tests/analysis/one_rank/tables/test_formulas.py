"""FLOPs and bytes from the inputs of a call: torch's own counts are the truth, and what is unknown stays unknown."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import flop_counter

from pacecar.analysis.one_rank.origins.call_inputs import inputs_of
from pacecar.analysis.one_rank.tables.formulas import OPERATIONS, _pairs
from pacecar.analysis.one_rank.tables.roofline import arithmetic_of
from pacecar.analysis.trace.details.detail_columns import Signature

SIZES = st.integers(1, 9)


def inputs(*arguments, kind: str = "float"):
    """Return inputs as torch writes them; a tuple is a tensor's shape, a string the value of something else."""
    is_tensor = [isinstance(one, tuple) for one in arguments]
    dims = [list(one) if tensor else [] for one, tensor in zip(arguments, is_tensor, strict=True)]
    types = [kind if tensor else "Scalar" for tensor in is_tensor]
    values = ["" if tensor else one for one, tensor in zip(arguments, is_tensor, strict=True)]
    return inputs_of(Signature(*(json.dumps(one).encode() for one in (dims, types, values))))


def work(name: str, *arguments, kind: str = "float"):
    return OPERATIONS[name].work(inputs(*arguments, kind=kind))


@settings(max_examples=30)
@given(m=SIZES, k=SIZES, n=SIZES, b=SIZES)
def test_matmuls_count_as_torch_counts(m, k, n, b):
    found = work("aten::mm", (m, k), (k, n))
    assert found.flops == flop_counter.mm_flop((m, k), (k, n))
    assert found.bytes == 4 * (m * k + k * n + m * n)
    assert work("aten::addmm", (n,), (m, k), (k, n), "1", "1").flops == flop_counter.addmm_flop((n,), (m, k), (k, n))
    assert work("aten::addmm", (n,), (m, k), (k, n), kind="c10::Half").bytes == 2 * (m * k + k * n + m * n + n)
    assert work("aten::bmm", (b, m, k), (b, k, n)).flops == flop_counter.bmm_flop((b, m, k), (b, k, n))
    added = work("aten::baddbmm", (b, m, n), (b, m, k), (b, k, n))
    assert added.flops == flop_counter.baddbmm_flop((b, m, n), (b, m, k), (b, k, n))


@pytest.mark.slow
@settings(max_examples=30)
@given(b=SIZES, h=SIZES, q=SIZES, k=SIZES, d=SIZES, v=SIZES)
def test_attention_without_a_mask_counts_as_torch_counts(b, h, q, k, d, v):
    shapes = (b, h, q, d), (b, h, k, d), (b, h, k, v)
    found = work("aten::_scaled_dot_product_flash_attention", *shapes, "0.", "False", "False", "0.1")
    assert found.flops == flop_counter.sdpa_flop_count(*shapes)
    assert found.bytes == 4 * b * h * (q * d + k * d + k * v + q * v)
    gradient = (b, h, q, v)
    arguments = [gradient, *shapes, gradient, (b, h, q), "", "", str(q), str(k), "0.", "False"]
    backward = work("aten::_scaled_dot_product_flash_attention_backward", *arguments)
    assert backward.flops == flop_counter.sdpa_backward_flop_count(gradient, *shapes)
    turned = [(one[0], one[2], one[1], one[3]) for one in shapes]
    flash = work("flash_attn::_flash_attn_forward", *turned, "0.", "0.1", "False")
    assert flash.flops == found.flops


@pytest.mark.slow
@given(q=st.integers(0, 12), k=st.integers(0, 12), at_end=st.booleans())
def test_of_causal_attention_the_pairs_that_are_not_masked_count(q, k, at_end):
    shift = k - q if at_end else 0
    assert _pairs(q, k, is_causal=True, at_end=at_end) == sum(j <= i + shift for i in range(q) for j in range(k))
    assert _pairs(q, k, is_causal=False, at_end=at_end) == q * k


@settings(max_examples=25)
@given(
    n=st.integers(1, 3), c_in=st.integers(1, 3), c_out=st.integers(1, 3), groups=st.integers(1, 2),
    size=st.integers(6, 9), kernel=st.integers(1, 3), stride=st.integers(1, 2), padding=st.integers(0, 1),
    dilation=st.integers(1, 2), dims=st.integers(1, 3), transposed=st.booleans(),
)  # fmt: skip
def test_convolutions_count_as_torch_counts(
    n, c_in, c_out, groups, size, kernel, stride, padding, dilation, dims, transposed
):
    x = torch.empty(n, c_in * groups, *([size] * dims), device="meta")
    parts = (c_in * groups, c_out) if transposed else (c_out * groups, c_in)
    weight = torch.empty(*parts, *([kernel] * dims), device="meta")
    wide = [[stride] * dims, [padding] * dims, [dilation] * dims]
    out = torch.ops.aten.convolution(x, weight, None, *wide, transposed, [0] * dims, groups)
    rest = (*map(str, wide), str(transposed), str([0] * dims), str(groups))
    found = work("aten::convolution", tuple(x.shape), tuple(weight.shape), "", *rest)
    expected = flop_counter.conv_flop_count(list(x.shape), list(weight.shape), list(out.shape), transposed=transposed)
    assert found.flops == expected
    assert found.bytes == 4 * (x.numel() + weight.numel() + out.numel())
    backward = work(
        "aten::convolution_backward", tuple(out.shape), tuple(x.shape), tuple(weight.shape), "[0]", *rest,
        "[True, True, False]",
    )  # fmt: skip
    assert backward.flops == 2 * expected
    only = work(
        "aten::convolution_backward", tuple(out.shape), tuple(x.shape), tuple(weight.shape), "[0]", *rest,
        "[False, True, False]",
    )  # fmt: skip
    assert only.flops == expected
    assert only.bytes == 4 * (out.numel() + x.numel() + weight.numel())


def test_places_of_arguments_are_those_of_torchs_schemas():
    causal = {name: one.work.keywords["causal"] for name, one in OPERATIONS.items() if one.kind == "attention"}
    checked = 0
    for name, place in causal.items():
        namespace, _, short = name.partition("::")
        operator = getattr(torch.ops.aten, short, None) if namespace == "aten" else None
        if operator is None:
            continue
        arguments = [argument.name for argument in operator.default._schema.arguments]
        first = OPERATIONS[name].work.keywords["first"]
        assert arguments[place] == "is_causal", name
        assert arguments[first : first + 3] == ["query", "key", "value"], name
        checked += 1
    assert checked >= 8
    forward = [argument.name for argument in torch.ops.aten.convolution.default._schema.arguments]
    assert forward[3:9] == ["stride", "padding", "dilation", "transposed", "output_padding", "groups"]
    backward = [argument.name for argument in torch.ops.aten.convolution_backward.default._schema.arguments]
    assert (backward[7], backward[10]) == ("transposed", "output_mask")


def test_what_the_inputs_do_not_say_is_unknown():
    old = work("aten::convolution", (2, 3, 8, 8), (4, 3, 3, 3), "", "", "", "", "", "", "")
    assert (old.flops, old.bytes) == (None, None)
    assert work("aten::_scaled_dot_product_flash_attention", *[(1, 2, 3, 4)] * 3, "", "").flops is None
    assert work("aten::mm", (2, 3), (4, 5)) is None
    assert work("aten::mm", (2, 3)) is None
    assert work("aten::mm") is None
    assert work("aten::_scaled_dot_product_flash_attention", *[(8, 2, 4)] * 3, "0.", "False") is None
    bits = work("aten::mm", (2, 4), (4, 2), kind="c10::Float4_e2m1fn_x2")
    assert (bits.flops, bits.bytes) == (32, None)


@pytest.mark.parametrize("broken", [b"", b"[", b"{}", b"7", b'[["a"]]', b"[[-1]]", b"[[1e9]]", b"[[[1]]]", b"\xff"])
def test_shapes_that_are_none_are_no_tensors(broken):
    found = inputs_of(Signature(broken, b'["float"]', broken))
    assert [one for one in found.tensors if one is not None] == []
    assert found.integers(0) is None
    assert found.flags(0) is None


def test_scalars_of_old_traces_are_no_tensors():
    old = inputs_of(Signature(b"[[32, 3], [], [], []]", b'["float", "Int", "Bool", "GenericList"]', b""))
    assert old.shapes_text == "[32, 3]"
    assert old.types_text == "float32"
    listed = inputs_of(Signature(b"[[[2, 3], [4]], []]", b'["TensorList", "Scalar"]', b""))
    assert listed.shapes_text == "([2, 3], [4])"


@pytest.mark.parametrize(
    ("dtype", "kernels", "gpu", "arithmetic"),
    [
        ("bfloat16", ["anything"], "NVIDIA H200", "bfloat16"),
        ("float32", ["ampere_sgemm_128x64_tn"], "NVIDIA A100-SXM4-80GB", "float32"),
        ("float32", ["sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n"], "NVIDIA A100-SXM4-80GB", "tf32"),
        ("float32", ["ampere_sgemm_tn", "cutlass_tf32_gemm"], "NVIDIA A100-SXM4-80GB", None),
        ("float32", ["nvjet_tss_128x64"], "NVIDIA H200", None),
        ("float32", ["anything"], "Tesla V100-SXM2-32GB", "float32"),
        ("", ["anything"], None, None),
    ],
)
def test_fp32_is_fp32_or_tf32_as_the_kernels_say(dtype, kernels, gpu, arithmetic):
    assert arithmetic_of(dtype, kernels, gpu) == arithmetic


def test_one_multiply_add_is_two():
    assert work("aten::mm", (1, 1), (1, 1)).flops == 2
    assert math.isclose(work("aten::mm", (1, 1), (1, 1)).bytes, 12)
