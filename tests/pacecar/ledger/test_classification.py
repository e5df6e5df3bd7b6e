"""The classification table, by names and metadata as real traces have them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar.ledger.attribution import Work
from pacecar.ledger.classification import (
    HostRow,
    classify_device,
    classify_host,
    collective_operation,
    function_name,
)

COMM, COMPUTE, COPY = Work.COMMUNICATION, Work.COMPUTE, Work.COPY


@pytest.mark.parametrize(
    ("row_type", "name", "linked", "expected"),
    [
        ("kernel", "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", None, COMM),
        ("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", None, COMM),
        ("kernel", "ncclSymkDevKernel_AllGather_LL(ncclSymkDevWorkArgs)", None, COMM),
        ("kernel", "rcclGenericKernel(ncclDevComm*, channelMasks)", None, COMM),
        ("kernel", "hccl_all_reduce_bf16", None, COMM),
        ("kernel", "void deep_ep::intranode::dispatch<8, 768>(int4*, float*)", None, COMM),
        ("kernel", "nvshmemi_barrier_on_stream_kernel", None, COMM),
        ("kernel", "mscclpp::collective::allreducePacket", None, COMM),
        ("kernel", "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)", None, COMM),
        ("kernel", "void one_shot_all_reduce_kernel<c10::BFloat16, 16, 8>", None, COMM),
        ("kernel", "multimem_all_reduce_kernel<float>", None, COMM),
        ("kernel", "userbuffers_fp16_sum_inplace_gpu_rr_rs_oop", None, COMM),
        ("kernel", "a_kernel_that_nobody_knows", "record_param_comms", COMM),
        ("gpu_memcpy", "Memcpy DtoD (Device -> Device)", "record_param_comms", COMM),
        ("collective_comm", "allreduce", None, COMM),
        ("kernel", "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn", "aten::mm", COMPUTE),
        ("kernel", "triton_poi_fused_add_relu_0", None, COMPUTE),
        ("kernel", "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "aten::sum", COMPUTE),
        ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", "aten::copy_", COPY),
        ("gpu_memset", "Memset (Device)", None, COPY),
        ("privateuse1_kernel", "something", None, Work.OTHER),
        ("gpu_user_annotation", "nccl:all_reduce", None, None),
        ("cuda_sync", "Stream Synchronize", None, None),
        ("cuda_runtime", "cudaLaunchKernel", None, None),
    ],
)
def test_rows_of_a_device(row_type, name, linked, expected):
    assert classify_device(row_type, name, linked) is expected


@pytest.mark.parametrize(
    ("row_type", "name", "expected"),
    [
        ("cpu_op", "aten::mm", HostRow.OPERATOR),
        ("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", HostRow.OPERATOR),
        ("cpu_op", "c10d::allreduce_", HostRow.LAUNCH),
        ("cpu_op", "record_param_comms", HostRow.LAUNCH),
        ("user_annotation", "gloo:all_reduce", HostRow.WORK),
        ("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", HostRow.LOADER),
        ("user_annotation", "Optimizer.step#AdamW.step", None),
        ("user_annotation", "nccl:all_reduce", None),  # the host's view; the kernel has its own row
        ("user_annotation", "my own phase", None),
        ("python_function", "train.py(3): main", None),
        ("kernel", "aten::mm", None),
        ("cpu_op", "ProfilerStep#7", None),
    ],
)
def test_rows_of_the_host(row_type, name, expected):
    assert classify_host(row_type, name) is expected


ACROSS_DEVICES = [
    # NCCL, RCCL, MSCCL, torchcomms
    ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", "send_recv"),
    ("ncclAllReduceRingLLKernel_sum_f32(ncclColl)", "all_reduce"),
    ("void AllReduceKernel<128, 8, FuncSum<float>, float>(KernelArgs<float>)", "all_reduce"),
    ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce_scatter"),
    ("ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce"),
    ("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "broadcast"),
    ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send_recv"),
    ("ncclSymkDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_bf16(ncclSymkDevWorkArgs4K)", "all_reduce"),
    ("ncclSymDevKernel_AllGather_STMC(ncclSymDevArgs)", "all_gather"),
    ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", None),
    ("ncclKernelAllGatherCtranRecDbl(int*, CtranAlgoDeviceState*, CtranKernelAllGatherArgs)", "all_gather"),
    ("ctranKernelAllReduceTree(int*, CtranAlgoDeviceState*)", "all_reduce"),
    ("void ncclKernelAllReduceCtranDirect<float, (commRedOp_t)0>(int*, CtranAlgoDeviceState*)", "all_reduce"),
    ("mscclKernel_Sum_float_Simple_0(ncclDevComm*, mscclAlgo*, mscclWork*)", None),
    ("void mscclpp::executionKernel<__half, mscclpp::LL16Packet, false>(int, __half*)", None),
    ("void allreduce7<__half>(__half*, __half*, __half*, unsigned long)", "all_reduce"),
    ("void turbomind::comm::allreduce_kernel<8, __half>(__half*)", "all_reduce"),
    # Intel, Huawei, Habana
    ("oneccl_allreduce_pcie<sycl::half>", "all_reduce"),
    ("hcom_allReduce__842_0_1", "all_reduce"),
    ("hccl_all_to_all_bf16", "all_to_all"),
    ("ishmem_alltoall_kernel", "all_to_all"),
    # experts
    ("void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*, int*)", "dispatch"),
    ("void deep_ep::intranode::cached_notify_combine<8>(void**, int*, int, int, int)", "combine"),
    ("void deep_ep::internode::notify_dispatch<false, 2>(int const*, int*)", "dispatch"),
    ("void deep_ep::internode_ll::combine<true, 7168, 9>(void*, void*, int*)", "combine"),
    ("_ZN7deep_ep9intranode8dispatchILi8ELi768EEEvPv", "dispatch"),
    ("void hybrid_ep::dispatch_kernel<8, 64>(hybrid_ep::dispatch_kernel_param_t<unsigned char>)", "dispatch"),
    ("void pplx::a2a_kernels::a2a_dispatch_send_kernel<true>(unsigned long)", "dispatch"),
    ("void mori::moe::EpDispatchIntraNodeKernel<__hip_bfloat16>(mori::moe::EpDispatchCombineArgs)", "dispatch"),
    ("EpCombineIntraNodeKernel_bf16", "combine"),
    ("void tensorrt_llm::kernels::moe_comm::moeA2ADispatchKernel<4>(int const*)", "dispatch"),
    ("allToAllV_2d(void*, void*, long*, long*, unsigned long)", "all_to_all"),
    # NVSHMEM, symmetric memory, user buffers, custom all-reduce
    ("nvshmemi_transfer_rma_put_kernel", None),
    ("void nvshmemi_barrier_kernel<(threadgroup_t)2>(int)", "barrier"),
    ("void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)", "all_reduce"),
    ("void c10d::symmetric_memory::one_shot_all_reduce_kernel<float, 16, 8, true>(float**)", "all_reduce"),
    ("c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int, int, unsigned long)", "barrier"),
    ("void two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16, 8>(c10::BFloat16**)", "all_reduce"),
    ("void oneShotAllReduceKernel<8u, true>(__nv_bfloat16*, __nv_bfloat16*, unsigned long)", "all_reduce"),
    ("void hybridCubeMeshAllReduceKernel<true>(__nv_bfloat16*)", "all_reduce"),
    ("void vllm::cross_device_reduce_2stage<__half, 4>(vllm::RankData*, vllm::RankSignals)", "all_reduce"),
    ("void sglang::cross_device_reduce_1stage<float, 2>(sglang::RankData*)", "all_reduce"),
    ("void aiter::reduce_scatter_cross_device_store<__hip_bfloat16, 8>(aiter::RankData*)", "reduce_scatter"),
    ("void quickreduce::allreduce_prototype_twoshot<quickreduce::AllReduceTwoshot<__half>>(__half*)", "all_reduce"),
    ("void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<0, __half, 8>()", "all_reduce"),
    ("void tensorrt_llm::kernels::mnnvl::twoshot_allreduce_kernel<8, __nv_bfloat16>(__nv_bfloat16*)", "all_reduce"),
    (
        "void tensorrt_llm::kernels::reduce_scatter::lamport_style_one_shot_all_reduce_norm_kernel<float>()",
        "all_reduce",
    ),
    ("void userbuffers_fp16_sum_inplace_gpu_rr_ag<8>(int, int, int)", None),
    ("kuserbuffers_pushsend(int*, int*, int4*, int4*, int)", "send"),
    ("std::enable_if<true, void>::type comm::all_gather_kernel<float>(float*)", "all_gather"),
    ("mcclKernel_Broadcast_RING_LL(mcclDevComm*)", "broadcast"),
    ("cnclAllReduceKernel_ring", "all_reduce"),
    ("flagcxP2pKernel(void const*, void*, unsigned long)", None),
    ("reduce_local_outofplace_kernel_float32_sum", None),
    ("mooncake::(anonymous namespace)::allReduceExecutorKernel(AllReduceExecutorArgs)", "all_reduce"),
    ("xla::gpu::AllReduceKernelImpl<float>(AllReduceKernelParams)", "all_reduce"),
    # a library that nobody has heard of
    ("void fancycomm::detail::RingAllGatherKernel<float, 4>(float const*)", "all_gather"),
    ("reduce_scatter_ring_bf16", "reduce_scatter"),
    ("all2all_push_kernel", "all_to_all"),
]

WITHIN_ONE_DEVICE = [
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<bool, at::native::func_wrapper_t<bool, "
    "at::native::and_kernel_cuda(at::TensorIterator&)::{lambda()#1}>, unsigned int, bool, 4> >(at::native::ReduceOp)",
    "void at::native::_scatter_gather_elementwise_kernel<128, 4, at::native::_cuda_scatter_gather_internal_kernel<0>>",
    "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long)",
    "void oneflow::cuda::softmax::SoftmaxBlockSMemImpl<Load, Store, float, 1, 256, WarpAllReduce<SumOp, float>>(Load)",
    "void softmax_warp_forward<float, float, float, 10, WarpAllReduce>(float*, float const*, int, int, int)",
    "void layernorm_block_all_reduce_kernel<float, 256>(float*, float*)",
    "void blockAllReduceSum<float>(float*)",
    "void cub::DeviceReduceKernel<cub::DeviceReducePolicy<float>>(float*)",
    "void cub::DeviceReduceByKeyKernel<cub::AllReduceByKey, long*>(long*)",
    "void at_cuda_detail::cub::DeviceScanKernel<cub::AllGather>(int)",
    "void cutlass::Kernel<cutlass::reduction::kernel::ReduceSplitK<cutlass::MatrixShape<4, 128>>>(Params)",
    "void splitKreduce_kernel<float, float, float, float, true, false, false>(cublasSplitKParams<float>)",
    "ub_norm_kernel",
    "ub_reduce_rows(float*)",
    "my_deep_epilogue_kernel",
    "void deep_gemm::sm90_fp8_gemm_1d2d_impl<7168u>(CUtensorMap)",
    "triton_poi_fused_all_gather_into_tensor_view_3",
    "triton_red_fused__to_copy_all_reduce_sum_1",
    "_finalize_matmul_scatter_bf16",
    "_combined_routing_compute",
    "void moe_combine_kernel<float>(float*)",
    "void dispatch_tokens_to_experts<float>(float*)",
    "ag_gemm_all_gather_consumer_gemm",
    "void flash_fwd_splitkv_combine_kernel<128>(Params)",
    "void moe::dev::finalize::finalizeKernelVecLoad<moe::dev::finalize::KernelParams<cutlass::bfloat16_t>>(Params)",
    "void at::native::(anonymous namespace)::allocate_histogram<float>(float*)",
    "small_ball_query_kernel(float*)",
    "accumulate_gradients_all(float*)",
    "cclosure_kernel",
    "__amd_rocclr_copyBuffer",
    "__amd_rocclr_fillBufferAligned",
    "cccl_transform_kernel",
    "_fwd_kernel_ep_scatter_1",
    "_fwd_kernel_ep_gather",
    "deepep_permute_triton_kernel",
    "deepep_post_reorder_triton_kernel",
    "gemv_all_reduce_kernel",
    "void vllm::reshape_and_cache_kernel<float>(float*)",
    "void aiter::local_device_load_rmsnorm<__hip_bfloat16, 8>(aiter::RankSignals)",
]


@pytest.mark.parametrize(("name", "operation"), ACROSS_DEVICES)
def test_kernels_of_communication_libraries(name, operation):
    assert classify_device("kernel", name) is COMM
    assert collective_operation(name) == operation


@pytest.mark.parametrize("name", WITHIN_ONE_DEVICE)
def test_kernels_that_only_sound_like_communication(name):
    assert classify_device("kernel", name) is COMPUTE


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("volta_sgemm_128x64_nn", "volta_sgemm_128x64_nn"),
        ("void a::b<c<1>, (d)2>(e<f>*, int)", "a::b"),
        ("void (anonymous namespace)::kernel<int>(int)", "kernel"),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int>(int)", "internal::gemvx::kernel"),
        ("_ZN3fooIiEEvv", "_ZN3fooIiEEvv"),
        ("void f<x>::{lambda(int)#1}::operator()(int) const", "f::{lambda"),
        ("", ""),
        ("<<>>", "<<>>"),
    ],
)
def test_the_function_of_a_demangled_name(name, function):
    assert function_name(name) == function


@pytest.mark.slow
@given(st.text(alphabet="a<>():, ~_Zall_reduce", max_size=60))
def test_no_name_is_too_odd(name):
    assert classify_device("kernel", name) in (COMM, COMPUTE, COPY)
    collective_operation(name)


@pytest.mark.parametrize(
    ("row_type", "name", "expected"),
    [
        ("mtia_ccp_events", "aten_add_kernel", COMPUTE),
        ("mtia_ccp_events", "Memcpy HtoD", COPY),
        ("mtia_ccp_events", "hccl_all_gather", COMM),
        ("mtia_workloadd", "anything", Work.OTHER),
        ("hpu_op", "anything", Work.OTHER),
        ("cpu_op", "ncclKernel", None),
        ("xpu_kernel", "gemm_kernel", COMPUTE),
    ],
)
def test_rows_of_other_devices(row_type, name, expected):
    assert classify_device(row_type, name) is expected
