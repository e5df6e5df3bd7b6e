"""Whose collective is a kernel, and what did it move?  By the three ways in which torch has said so."""

import msgspec
import pytest

from pacecar.analysis.trace.collectives import from_kernel, from_metadata, operation_of
from pacecar.analysis.trace.columns import NONE, WORKS, CollectiveColumns
from pacecar.analysis.trace.decoding.events import Args
from tests.analysis.trace.writing import host, kernel, launch

SAID = {
    "Collective name": "_allgather_base",
    "In msg nelems": 25136,
    "Out msg nelems": 201088,
    "Group size": 8,
    "dtype": "BFloat16",
    "Process Group Name": "3",
    "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]",
    "Seq": 0,
}
MEANT = CollectiveColumns(
    operation="all_gather",
    bytes=402176,
    dtype="BFloat16",
    group="3",
    group_size=8,
    ranks=tuple(range(8)),
    sequence=0,
)


def said_of(trace):
    """Return each device row's work and collective."""
    return [
        (WORKS[work].value, None if number == NONE else trace.collectives[number])
        for work, number in zip(trace.device.work, trace.device.collective, strict=True)
    ]


def test_the_kernels_own_arguments_say_it_whatever_its_name(read):
    assert said_of(read(kernel(name="my_fused_thing", **SAID))) == [("communication", MEANT)]


def test_the_linked_host_row_says_it_when_the_kernel_does_not(read):
    row = host(90, 50, "record_param_comms", **SAID, **{"External id": 12})
    linked = kernel(name="my_fused_thing", correlation=900, **{"External id": 12})
    other = kernel(200, name="my_fused_thing", correlation=901, **{"External id": 13})
    assert said_of(read(row, linked, other)) == [("communication", MEANT), ("compute", None)]


def test_a_copy_linked_to_a_collective_is_communication(read):
    row = host(90, 50, "record_param_comms", **SAID, **{"External id": 12})
    copy = kernel(cat="gpu_memcpy", name="Memcpy DtoD", correlation=900, **{"External id": 12})
    assert said_of(read(row, copy)) == [("communication", MEANT)]


def test_an_external_id_that_is_the_kernels_own_correlation_links_nothing(read):
    """Kinetos of 2021 to 2023 wrote it so; it hits some operator's id by chance."""
    row = host(90, 50, "record_param_comms", **{"External id": 12})
    events = [kernel(100 * n, name="gemm", correlation=n, **{"External id": n}) for n in range(10, 14)]
    assert set(said_of(read(row, *events))) == {("compute", None)}


def annotated(name="nccl:all_to_all", shapes=([1024, 8],), types=("float",), operator=(), operator_types=()):
    """Return a kernel launched inside an annotation inside an operator, and a stray launch outside."""
    return [
        host(10, 80, "c10d::call_", **{"Input Dims": list(operator), "Input type": list(operator_types)}),
        host(20, 60, "record_param_comms", **{"External id": 3}),
        host(30, 40, name, "user_annotation", **{"Input Dims": list(shapes), "Input type": list(types)}),
        host(30, 40, "nccl:broadcast", "user_annotation", tid=99),
        launch(50, 2, 7),
        kernel(60, 9, "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", 7, **{"External id": 7}),
    ]


def test_the_annotation_around_the_launch_says_what_send_recv_is(read):
    assert said_of(read(*annotated())) == [
        ("communication", CollectiveColumns(operation="all_to_all", bytes=32768, dtype="Float"))
    ]


def test_the_operator_around_it_knows_the_output_too(read):
    events = annotated("nccl:_all_gather_base", ([16],), ("c10::Half",), ([128], [16]), ("c10::Half", "c10::Half"))
    assert said_of(read(*events)) == [
        ("communication", CollectiveColumns(operation="all_gather", bytes=256, dtype="Half"))
    ]


def test_a_gathers_bytes_are_unknown_from_its_input_alone(read):
    events = annotated("nccl:_all_gather_base", ([16],), ("c10::Half",))
    assert said_of(read(*events)) == [
        ("communication", CollectiveColumns(operation="all_gather", bytes=None, dtype="Half"))
    ]


def test_a_launch_outside_or_on_another_thread_is_not_the_annotations(read):
    rows = [host(30, 40, "nccl:all_to_all", "user_annotation")]
    for stray in (launch(80, 2, 7), launch(50, 2, 7, tid=5), launch(10, 2, 7)):
        trace = read(*rows, stray, kernel(60, 9, "ncclKernel_SendRecv_RING", 7))
        assert said_of(trace) == [("communication", CollectiveColumns(operation="send_recv"))]


def test_the_innermost_annotation_that_is_still_open_counts(read):
    outer = host(30, 60, "nccl:coalesced", "user_annotation")
    inner = host(35, 5, "nccl:send 0->1", "user_annotation")
    launches = [launch(36, 1, 7), launch(50, 1, 8)]
    kernels = [kernel(60, 5, "ncclKernel_SendRecv", 7), kernel(70, 5, "ncclKernel_SendRecv", 8)]
    trace = read(outer, inner, *launches, *kernels)
    assert [one.operation for _, one in said_of(trace)] == ["send", "coalesced"]


def test_a_single_group_of_everybody_is_every_collectives_group(read):
    config = [{"pg_name": "0", "pg_size": 2, "ranks": [0, 1]}]
    trace = read(kernel(name="ncclDevKernel_AllReduce"), distributedInfo={"world_size": 2, "pg_config": config})
    assert trace.collectives == (CollectiveColumns(operation="all_reduce", group="0", group_size=2, ranks=(0, 1)),)
    config.append({"pg_name": "1", "pg_size": 2, "ranks": [0, 1]})
    trace = read(kernel(name="ncclDevKernel_AllReduce"), distributedInfo={"world_size": 2, "pg_config": config})
    assert trace.collectives == (CollectiveColumns(operation="all_reduce"),)


def test_the_work_of_a_host_group_has_its_shapes(read):
    shapes = {"Input Dims": [[4160], []], "Input type": ["float", "Scalar"]}
    trace = read(host(name="gloo:all_reduce", cat="user_annotation", **shapes), host(200, name="c10d::allreduce_"))
    assert trace.collectives == (CollectiveColumns(operation="all_reduce", bytes=16640, dtype="Float"),)
    assert trace.host_rows.collective.tolist() == [0, NONE]


@pytest.mark.parametrize(
    ("word", "operation"),
    [
        *(("allreduce", "all_reduce"), ("allreduce_coalesced", "all_reduce"), ("nccl:all_reduce", "all_reduce")),
        *(("_allgather_base", "all_gather"), ("all_gather_into_tensor_coalesced", "all_gather")),
        *(("reduce_scatter_tensor_coalesced", "reduce_scatter"), ("_reduce_scatter_base", "reduce_scatter")),
        *(("all_to_allv", "all_to_all"), ("nccl:all_to_all", "all_to_all"), ("alltoall", "all_to_all")),
        *(("_broadcast_oop", "broadcast"), ("_reduce_oop", "reduce"), ("nccl:send 0->1", "send")),
        *(("nccl:recv 0<-1", "recv"), ("batch_isend_irecv", "send_recv"), ("gloo:barrier", "barrier")),
        *(("gather", "gather"), ("scatter", "scatter"), ("coalesced", "coalesced"), ("wait", "wait")),
    ],
)
def test_torchs_words_for_operations(word, operation):
    assert operation_of(word) == operation


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "all_reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce_scatter"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send_recv"),
        ("ncclKernel_Generic", "ncclKernel_Generic"),
        ("void deep_ep::intranode::dispatch<8, 768>(int4*, float*)", "dispatch"),
        ("void vllm::cross_device_reduce_1stage<__hip_bfloat16, 8>(RankData*)", "all_reduce"),
    ],
)
def test_a_kernels_name_says_the_operation_or_stands_for_itself(name, operation):
    assert from_kernel(name) == CollectiveColumns(operation=operation)


@pytest.mark.parametrize(
    ("dtype", "size"), [("Byte", 1), ("Float8_e4m3fn", 1), ("Half", 2), ("BFloat16", 2), ("Float", 4), ("Long", 8)]
)
def test_bytes_are_elements_times_their_size_and_zero_elements_are_zero(dtype, size):
    args = Args(operation="allreduce", elements_in=0, elements_out=7, dtype=dtype)
    assert from_metadata(args).bytes == 7 * size
    assert from_metadata(msgspec.structs.replace(args, elements_out=0)).bytes == 0
    assert from_metadata(msgspec.structs.replace(args, dtype="Nibble")).bytes is None
    assert from_metadata(Args(operation="allreduce", dtype=dtype)).bytes is None


@pytest.mark.parametrize(
    ("listed", "more", "ranks"),
    [
        ("[0, 1]", {}, (0, 1)),
        ("[0, 4, ..., 28]", {"rank_start": 0, "rank_stride": 4, "group_size": 8}, tuple(range(0, 32, 4))),
        ("[0, ...]", {}, None),
        ("[0, x]", {}, None),
        ("[]", {}, None),
        ("", {"rank_start": 3, "rank_stride": 1, "group_size": 1}, (3,)),
        ("", {"rank_start": 3, "rank_stride": 0, "group_size": 2}, None),
        ("", {"rank_start": 0, "rank_stride": 1, "group_size": 1 << 60}, None),
    ],
)
def test_ranks_are_listed_or_follow_from_start_and_stride(listed, more, ranks):
    assert from_metadata(Args(operation="allreduce", ranks=listed, **more)).ranks == ranks


def peer_to_peer(word, sequence, **peer):
    """Return the arguments of a send or receive of NCCL as torch's saveNcclMeta writes them ("Rank" is the peer's)."""
    group = {"Process Group Name": "5", "Process Group Ranks": "[2, 6]", "Group size": 2, "Rank": 1, "Seq": sequence}
    return {"Collective name": word, "In msg nelems": 8, "Out msg nelems": 8, "dtype": "BFloat16", **group, **peer}


def test_sends_and_receives_name_their_peer(read):
    name = "ncclDevKernel_SendRecv(ncclDevComm*, unsigned long, ncclWork*)"
    trace = read(
        kernel(100, name=name, **peer_to_peer("send", 1, **{"Dst Rank": 6})),
        kernel(200, name=name, correlation=2, **peer_to_peer("recv", 2, **{"Src Rank": 0})),
        kernel(300, name=name, correlation=3, **peer_to_peer("recv", 3, **{"Src Rank": -1})),
        kernel(400, name=name, correlation=4, **peer_to_peer("send", 4)),
    )
    found = [meta for _, meta in said_of(trace)]
    assert [(one.operation, one.source_rank, one.destination_rank) for one in found] == [
        ("send", None, 6),
        ("recv", 0, None),
        ("recv", None, None),
        ("send", None, None),
    ]
    assert {(one.bytes, one.group, one.ranks) for one in found} == {(16, "5", (2, 6))}


def test_the_linked_host_row_names_the_peer_where_the_kernel_does_not(read):
    row = host(90, 50, "record_param_comms", **peer_to_peer("send", 1, **{"Dst Rank": 6}), **{"External id": 12})
    trace = read(row, kernel(name="ncclKernel_SendRecv", correlation=900, **{"External id": 12}))
    assert said_of(trace)[0][1].destination_rank == 6


@pytest.mark.parametrize("shapes", ["nonsense", [[-1]], [["a"]], [[1 << 60]], {"a": 1}, [[[4]]], [None], [[]] * 9999])
def test_shapes_that_are_none_are_no_bytes(read, shapes):
    row = host(30, 40, "gloo:all_reduce", "user_annotation", **{"Input Dims": shapes, "Input type": ["float"]})
    trace = read(row)
    assert trace.collectives[0].bytes == (4 if shapes == [[]] * 9999 else None)
