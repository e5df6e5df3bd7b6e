"""The classification table, by names and metadata as real traces have them."""

import pytest

from pacecar.profiler.attribution import Work
from pacecar.profiler.classification import HostRow, classify_device, classify_host

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
    ],
)
def test_rows_of_the_host(row_type, name, expected):
    assert classify_host(row_type, name) is expected
