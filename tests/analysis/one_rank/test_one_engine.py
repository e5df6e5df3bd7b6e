"""A profiled window read in memory and the same window written to a file and read back have one ledger."""

import threading

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from pacecar.analysis.one_rank.one_trace import charges_of
from pacecar.analysis.trace.reader import read_trace
from pacecar.ledger.attribution import LossCause, attribute
from pacecar.profiler.windows.trace_spans import read_rows


def run_a_job():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(24, 64)), batch_size=8)
    for (batch,) in loader:
        optimizer.zero_grad()
        with record_function("forward"):
            loss = model(batch).sum()
        loss.backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_memory_and_file_agree_to_the_nanosecond(tmp_path):
    with profile(activities=[ProfilerActivity.CPU]) as session:
        run_a_job()
    results = session.profiler.kineto_results
    if not hasattr(results, "trace_activities"):
        pytest.skip("this torch keeps no rows in memory")
    rows = results.trace_activities()
    session.export_chrome_trace(str(tmp_path / "window.json"))
    trace = read_trace(tmp_path / "window.json")
    charges = charges_of(trace)
    assert charges.window is not None
    assert trace.wall_offset_ns is not None
    offset = trace.wall_offset_ns

    reading = read_rows(rows, training_thread=threading.get_native_id(), on_device=False)
    causes = {LossCause.DATA_WAIT: reading.data_wait - offset, LossCause.OPTIMIZER: charges.causes[LossCause.OPTIMIZER]}
    work = {kind: spans - offset for kind, spans in reading.work.items()}
    from_memory = attribute(work, charges.window, causes=causes, observed=charges.observed)
    from_file = attribute(charges.work, charges.window, causes=charges.causes, observed=charges.observed)
    assert from_file == from_memory
    assert from_file.compute_ns > 0
    assert from_file.data_wait_ns > 0
