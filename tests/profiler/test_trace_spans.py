"""Rows to spans, on a CPU job and on a device job, with rows as kineto gives them."""

from dataclasses import dataclass

from pacecar.ledger.attribution import Work
from pacecar.ledger.intervals import intervals, union
from pacecar.profiler.windows.trace_spans import read_rows

MAIN, AUTOGRAD, GLOO, OTHER = 11, 12, 13, 14


@dataclass
class Row:
    """A kineto row; attributes are methods there."""

    row_type: str
    row_name: str
    start: int
    end: int
    thread: int = MAIN
    link: "Row | None" = None
    metadata: str = ""

    def name(self):
        return self.row_name

    def type(self):
        return self.row_type

    def timestamp(self):
        return self.start

    def duration(self):
        return self.end - self.start

    def resource_id(self):
        return self.thread

    def metadata_json(self):
        return self.metadata

    def linked_activity(self):
        return self.link


def spans_of(reading, kind):
    return union(reading.work.get(kind, intervals([]))).tolist()


def test_on_cpu_compute_is_operators_of_training_threads_without_launches_and_loading():
    rows = [
        Row("cpu_op", "aten::linear", 0, 100),
        Row("cpu_op", "aten::addmm", 10, 90),
        Row("cpu_op", "autograd::engine::evaluate_function: X", 200, 300, AUTOGRAD),
        Row("cpu_op", "c10d::allreduce_", 250, 270, AUTOGRAD),
        Row("cpu_op", "aten::add_", 250, 400, OTHER),
        Row("user_annotation", "gloo:all_reduce", 260, 500, GLOO),
        Row("user_annotation", "enumerate(DataLoader)#_X.__next__", 600, 700),
        Row("cpu_op", "aten::stack", 610, 690),
        Row("cpu_op", "aten::cat", 800, 820),
        Row("user_annotation", "Optimizer.step#SGD.step", 0, 900),
    ]
    reading = read_rows(rows, training_thread=MAIN, on_device=False, data_wait=intervals([(810, 830)]))
    assert spans_of(reading, Work.COMPUTE) == [[0, 100], [200, 250], [270, 300], [800, 810]]
    assert spans_of(reading, Work.COMMUNICATION) == [[260, 500]]
    assert reading.data_wait.tolist() == [[600, 700], [810, 830]]
    assert reading.device_rows == 0


def test_what_is_inside_an_operator_is_not_read_but_a_launch_inside_a_node_of_the_engine_is():
    read = []

    class MonitoredHook(Row):
        def name(self):
            read.append(self.row_name)
            return self.row_name

    rows = [
        MonitoredHook("cpu_op", "aten::linear", 0, 100),
        MonitoredHook("cpu_op", "aten::addmm", 10, 90),
        MonitoredHook("user_annotation", "gloo:all_reduce", 20, 120, GLOO),
        MonitoredHook("cpu_op", "aten::mm", 40, 60),
        MonitoredHook("cpu_op", "autograd::engine::evaluate_function: AccumulateGrad", 200, 300),
        MonitoredHook("cpu_op", "torch::autograd::AccumulateGrad", 210, 220),
        MonitoredHook("cpu_op", "c10d::allreduce_", 230, 250),
        MonitoredHook("cpu_op", "MyFunctionBackward", 400, 500),
        MonitoredHook("cpu_op", "c10d::allgather_", 410, 420),
    ]
    reading = read_rows(rows, training_thread=MAIN, on_device=False)
    assert spans_of(reading, Work.COMPUTE) == [[0, 100], [200, 230], [250, 300], [400, 410], [420, 500]]
    assert spans_of(reading, Work.COMMUNICATION) == [[20, 120]]
    assert "aten::addmm" not in read
    assert "aten::mm" not in read


def test_where_a_dtensor_may_communicate_inside_an_operator_waiting_there_is_not_compute():
    rows = [
        Row("cpu_op", "aten::mm", 0, 1000),
        Row("cpu_op", "aten::mm", 10, 60),
        Row("cpu_op", "_c10d_functional::all_reduce", 70, 90),
        Row("cpu_op", "record_param_comms", 75, 80),
        Row("user_annotation", "gloo:all_reduce", 80, 940, GLOO),
        Row("cpu_op", "_c10d_functional::wait_tensor", 100, 950),
        Row("cpu_op", "aten::view", 960, 970),
        Row("cpu_op", "MmBackward0", 1100, 1400, AUTOGRAD),
        Row("cpu_op", "_c10d_functional_autograd::all_to_all_single", 1200, 1300, AUTOGRAD),
        Row("cpu_op", "autograd::engine::evaluate_function: X", 1500, 1510, AUTOGRAD),
    ]
    reading = read_rows(rows, training_thread=MAIN, on_device=False, may_communicate_inside=True)
    assert spans_of(reading, Work.COMPUTE) == [
        [0, 70],
        [90, 100],
        [950, 1000],
        [1100, 1200],
        [1300, 1400],
        [1500, 1510],
    ]
    assert spans_of(reading, Work.COMMUNICATION) == [[80, 940]]


def test_on_a_device_only_the_devices_rows_are_work():
    comms = Row("cpu_op", "record_param_comms", 5, 6)
    rows = [
        Row("cpu_op", "aten::linear", 0, 100),
        Row("kernel", "gemm", 20, 60, 7),
        Row("kernel", "odd_name", 60, 80, 9, link=comms),
        Row("gpu_memcpy", "Memcpy HtoD", 80, 85, 7),
        Row("gpu_user_annotation", "ProfilerStep", 0, 1000, 7),
        Row("user_annotation", "gloo:all_gather", 90, 95, GLOO),
    ]
    reading = read_rows(rows, training_thread=MAIN, on_device=True)
    assert spans_of(reading, Work.COMPUTE) == [[20, 60]]
    assert spans_of(reading, Work.COMMUNICATION) == [[60, 80], [90, 95]]
    assert spans_of(reading, Work.COPY) == [[80, 85]]
    assert reading.device_rows == 3


def test_a_collective_still_open_at_the_end_ends_where_ddp_had_waited_for_it():
    open_row = Row("user_annotation", "gloo:all_reduce", 10, 500, GLOO, metadata='"finished": false')
    closed = Row("user_annotation", "gloo:broadcast", 600, 700, GLOO)
    reading = read_rows([open_row, closed], training_thread=MAIN, on_device=False, backward_end_ns=90)
    assert spans_of(reading, Work.COMMUNICATION) == [[10, 90], [600, 700]]


def test_without_thread_names_every_operator_thread_trains():
    rows = [Row("cpu_op", "aten::a", 0, 10, 1), Row("cpu_op", "aten::b", 20, 30, 2)]
    assert spans_of(read_rows(rows, training_thread=None, on_device=False), Work.COMPUTE) == [[0, 10], [20, 30]]
