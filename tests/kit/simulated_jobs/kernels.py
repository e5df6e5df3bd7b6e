"""Lists the kernels of a transformer block as the programs launch them: names, operators, times, grids.

The names are real ones, so that families of kernels come out as in a real trace.  Times are those of a small block on
a large device; `Model.kernel_scale` stretches them.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["BACKWARD", "EXTRA", "FORWARD", "LOSS", "NCCL", "OPTIMIZER", "Kernel"]


class Kernel(NamedTuple):
    """A kernel and the operator that launches it; `power` as in `Instruction`."""

    name: str
    operator: str
    device_ns: int
    grid: tuple[int, ...]
    power: int = 1
    is_split: bool = True
    """Whether tensor parallel ranks share it."""


_NORM = "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>(int, float)"
_NORM_BACKWARD = "void at::native::(anonymous namespace)::layer_norm_grad_input_kernel_vectorized<c10::BFloat16, float>"
_GEMM = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn"
_GEMM_NN = "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_32x6_nn"
_GEMM_NT = "ampere_bf16_s16816gemm_bf16_256x128_ldg8_f2f_stages_64x3_nt"
_FLASH = (
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, 64, 4>>(pytorch_flash::Flash_fwd_params)"
)
_FLASH_BACKWARD = (
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, 64, 64, 8>>"
)
_GELU = "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&)>"
_GELU_BACKWARD = "void at::native::vectorized_elementwise_kernel<4, at::native::GeluBackwardCUDAKernelImpl>"

FORWARD: tuple[tuple[Kernel, ...], tuple[Kernel, ...]] = (
    (
        Kernel(_NORM, "aten::native_layer_norm", 25_000, (4096, 1, 1), is_split=False),
        Kernel(_GEMM, "aten::addmm", 180_000, (32, 24, 1)),
        Kernel(_FLASH, "aten::_flash_attention_forward", 140_000, (32, 8, 16), power=2),
        Kernel(_GEMM_NN, "aten::addmm", 70_000, (32, 8, 1)),
    ),
    (
        Kernel(_NORM, "aten::native_layer_norm", 25_000, (4096, 1, 1), is_split=False),
        Kernel(_GEMM, "aten::addmm", 240_000, (32, 32, 1)),
        Kernel(_GELU, "aten::gelu", 40_000, (16384, 1, 1)),
        Kernel(_GEMM_NN, "aten::addmm", 240_000, (32, 8, 4)),
    ),
)
"""The two halves of a block; tensor parallel ranks sum their results after each."""

BACKWARD: tuple[tuple[Kernel, ...], tuple[Kernel, ...]] = (
    (
        Kernel(_GEMM_NN, "AddmmBackward0", 240_000, (32, 32, 1)),
        Kernel(_GEMM_NT, "AddmmBackward0", 245_000, (16, 32, 1)),
        Kernel(_GELU_BACKWARD, "GeluBackward0", 45_000, (16384, 1, 1)),
        Kernel(_GEMM_NN, "AddmmBackward0", 240_000, (32, 8, 4)),
        Kernel(_GEMM_NT, "AddmmBackward0", 245_000, (16, 32, 1)),
        Kernel(_NORM_BACKWARD, "NativeLayerNormBackward0", 40_000, (4096, 1, 1), is_split=False),
    ),
    (
        Kernel(_GEMM_NN, "AddmmBackward0", 70_000, (32, 8, 1)),
        Kernel(_GEMM_NT, "AddmmBackward0", 75_000, (16, 8, 1)),
        Kernel(_FLASH_BACKWARD, "FlashAttentionBackward0", 350_000, (32, 8, 16), power=2),
        Kernel(_GEMM_NN, "AddmmBackward0", 180_000, (32, 24, 1)),
        Kernel(_GEMM_NT, "AddmmBackward0", 185_000, (16, 24, 1)),
        Kernel(_NORM_BACKWARD, "NativeLayerNormBackward0", 40_000, (4096, 1, 1), is_split=False),
    ),
)

LOSS: tuple[Kernel, ...] = (
    Kernel(
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true, false>(float*, int)",
        "aten::_log_softmax",
        30_000,
        (1024, 1, 1),
        is_split=False,
    ),
    Kernel(
        "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>",
        "aten::nll_loss_forward",
        10_000,
        (1, 1, 1),
        is_split=False,
    ),
)

OPTIMIZER = Kernel(
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, "
    "FusedAdamMathFunctor<float, 4, (ADAM_MODE)1, false>>",
    "aten::_fused_adamw_",
    60_000,
    (320, 1, 1),
    is_split=False,
)

EXTRA = Kernel(
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float>>>",
    "aten::mean",
    0,
    (4096, 1, 1),
    is_split=False,
)
"""What a stage runs beside its layers where a fault says so; how long it takes is said there."""

NCCL = {
    "all_reduce": ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "allreduce"),
    "all_gather": ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "_allgather_base"),
    "reduce_scatter": (
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "_reduce_scatter_base",
    ),
    "send": ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send"),
    "recv": ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "recv"),
}
"""Kernel of each operation, and torch's name of it ("Collective name")."""
