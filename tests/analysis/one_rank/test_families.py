"""Kernel names to families, by names as real traces have them."""

import pytest

from pacecar.analysis.one_rank.kernel_families import family_of
from pacecar.analysis.one_rank.one_trace import analyze_trace
from pacecar.ledger.attribution import Work
from tests.analysis.built import build

NAMES = {
    "gemm": [
        "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_kernel__5x_cublas",
        "nvjet_tst_144x128_64x6_2x1_v_bz_bias_TNN",
        "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT32x32x256_MI16x16x1_SN",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_64x3_tn_align2>(Params)",
        "void splitKreduce_kernel<float, float, float, float, true, false, false>(cublasSplitKParams<float>)",
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false, cublasGemvParams<float>>",
        "triton_tem_fused_mm_3",
        "void ck::kernel_gemm_xdl_cshuffle_v3<ck::GridwiseGemm>(Params)",
        "void deep_gemm::sm90_fp8_gemm_1d2d_impl<7168u>(CUtensorMap)",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4>>(Params)",
        "void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64>>(Params)",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)",
        "kernel_unified_attention_3d",
        "triton_tem_fused_flex_attention_0",
    ],
    "convolution": [
        "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize64x128x32_stage5_execute_kernel_cudnn",
        "void cudnn::winograd_nonfused::winogradForwardOutput4x4<float, float>(Params)",
        "igemm_bwd_gtcx2_nhwc_bf16_bx0_ex1_bt32x128x32_wt16x64x4",
        "miopenSp3AsmConv_v21_1_3_gfx9_fp32_stride1",
        "void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<3, float, int>(float)",
    ],
    "normalization": [
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float, float const*)",
        "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, 512, true, 1>(cudnnTensorStruct)",
        "std::enable_if<true, void>::type vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*)",
    ],
    "softmax": ["void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true>(float*)"],
    "elementwise": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, Array<char*, 3> >(int)",
        "void at::native::unrolled_elementwise_kernel<at::native::MulScalarFunctor<float, float>, Array<char*, 2>, "
        "at::native::memory::LoadWithoutCast, at::native::memory::StoreWithoutCast>(int)",
        "void at::native::vectorized_elementwise_kernel<4, at::native::tanh_kernel_cuda(at::TensorIteratorBase&)"
        "::{lambda()#2}::operator()() const::{lambda()#4}::operator()() const, Array<char*, 2> >(int)",
    ],
    "copy_kernel": [
        "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl<direct_copy_kernel_cuda()>>(int)",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, Array<char*, 1> >(int)",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 2, 128, 1>(float*)",
    ],
    "reduction": [
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float>>>(int)",
        "void cub::DeviceScanKernel<cub::DeviceScanPolicy<int>::Policy600, int*, int*>(int*)",
    ],
    "optimizer": [
        "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>, float>(int)",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
        "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4>>(int)",
        "triton_for_fused_0",
    ],
    "embedding": [
        "void split_embedding_codegen_forward_unweighted_kernel<float, float, float, long, 5ul>(int)",
        "void at::native::(anonymous namespace)::EmbeddingBag_updateOutputKernel_sum_mean<float, long>(int)",
    ],
    "random": ["void at::native::(anonymous namespace)::fused_dropout_kernel_vec<float, float, 1, 4, bool>(int)"],
    "sort": [
        "void cub::DeviceRadixSortOnesweepKernel<cub::DeviceRadixSortPolicy<long, int, int>::Policy800, false>(int*)"
    ],
    "index": [
        "void at::native::_scatter_gather_elementwise_kernel<128, 4, _cuda_scatter_gather_internal_kernel<true>>(int)",
        "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<index_kernel_impl<4>>>(int)",
    ],
    "pooling": ["void at::native::(anonymous namespace)::max_pool_forward_nchw<float, float>(int, float const*)"],
    "fused": ["triton_poi_fused_add_cos_sin_0", "triton_red_fused_mul_sub_4"],
    "mixture_of_experts": ["void moe::dev::routing::routingIndicesHistogramKernel<Params>(Params)"],
    "quantization": [
        "void vllm::scaled_fp8_quant_kernel_strided<c10::BFloat16, c10::Float8_e4m3fn>(c10::Float8_e4m3fn*)"
    ],
    "other": ["at::cuda::(anonymous namespace)::spin_kernel(long)", "my_kernel", ""],
}


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, names in NAMES.items() for name in names])
def test_names(family, name):
    assert family_of(name) == family


def test_families_are_sums_of_durations_with_their_share_and_their_largest_kernel():
    device = [
        (0, 60, Work.COMPUTE, "volta_sgemm_32x32_nn"),
        (10, 20, Work.COMPUTE, "volta_sgemm_64x64_nn"),
        (20, 40, Work.COMMUNICATION, "ncclKernel"),
        (40, 45, Work.COPY, "Memcpy HtoD"),
        (50, 55, Work.OTHER, "?"),
        (60, 60, Work.COMPUTE, "volta_sgemm_32x32_nn"),
    ]
    families = analyze_trace(build(device)).families
    assert [(f.family, f.work, f.count, f.duration_ns, f.share_ratio, f.largest) for f in families] == [
        ("gemm", "compute", 2, 70, 0.7, "volta_sgemm_32x32_nn"),
        ("communication", "communication", 1, 20, 0.2, "ncclKernel"),
        ("copy", "copy", 1, 5, 0.05, "Memcpy HtoD"),
        ("unknown", "other", 1, 5, 0.05, "?"),
    ]
