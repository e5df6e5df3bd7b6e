"""The page for users of other exporters lists every name, names existing metrics, and its joins work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pacecar.metrics.catalog import CATALOG
from tests.dashboards.promql import check
from tests.kit.tools import find_tool

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/coming-from.md").read_text(encoding="utf-8")
RECORDING = ROOT / "dashboards/generated/pacecar.rules.yml"
BLOCKS = re.findall(r"^```promql\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)

POD = 'namespace="{}", pod="{}"'


def process(node: str, gpu: int, pid: int, *, owner: str) -> dict[str, str]:
    """A process with memory of a GPU for two hours, and whose it is."""
    at = f'instance="{node}", pid="{pid}"'
    return {
        f'pacecar_gpu_process_memory_bytes{{{at}, gpu="{gpu}"}}': "5x120",
        f"pacecar_process_info{{{at}, {owner}}}": "1x120",
    }


def rank(number: int, pod: str) -> dict[str, str]:
    """A rank of a job of two, in a pod, that waits a fifth of its step for communication."""
    labels = f'instance="n1", training_job="llama", launch="3f", rank="{number}"'
    return {
        f'pacecar_rank_info{{{labels}, pod_name="{pod}", pod_namespace="ml"}}': "1x120",
        f'pacecar_job_ledger_seconds_total{{{labels}, heading="exposed_communication"}}': "0+12x120",
        f"pacecar_job_step_wall_seconds_total{{{labels}}}": "0+60x120",
    }


SERIES = {
    # Two GPUs of the pod train-0, on one of which two of its processes are; one of nb-0; one of a Slurm job.
    **process("n1", 0, 11, owner='training_job="llama", launch="3f", rank="0", pod_name="train-0", pod_namespace="ml"'),
    **process("n1", 1, 12, owner='training_job="llama", launch="3f", rank="1", pod_name="train-0", pod_namespace="ml"'),
    **process("n1", 1, 13, owner='pod_name="train-0", pod_namespace="ml"'),
    **process("n2", 0, 11, owner='pod_name="nb-0", pod_namespace="notebooks"'),
    **process("n3", 0, 14, owner='slurm_job="77"'),
    **rank(0, "train-0"),
    **rank(1, "train-0"),
    f"kube_pod_labels{{{POD.format('ml', 'train-0')}, label_team='vision'}}": "1x120",
    f"kube_pod_labels{{{POD.format('notebooks', 'nb-0')}, label_team='speech'}}": "1x120",
    f"kube_pod_labels{{{POD.format('web', 'shop-0')}, label_team='shop'}}": "1x120",
    f'kube_pod_container_resource_requests{{{POD.format("ml", "train-0")}, resource="nvidia_com_gpu"}}': "2x120",
    f'kube_pod_container_resource_requests{{{POD.format("ml", "idle-0")}, resource="nvidia_com_gpu"}}': "4x120",
    f'kube_pod_container_resource_requests{{{POD.format("web", "shop-0")}, resource="cpu"}}': "9x120",
    'pacecar_gpu_temperature_celsius{instance="n1", gpu="0"}': "61x120",
    'pacecar_gpu_temperature_celsius{instance="n1", gpu="1"}': "62x120",
    'kube_node_labels{node="n1", label_rack="r7"}': "1x120",
    'kube_node_labels{node="n2", label_rack="r8"}': "1x120",
}

ANSWERS = [
    {'{label_team="vision"}': 2, '{label_team="speech"}': 1},
    {'{pod_namespace="ml"}': 4, '{pod_namespace="notebooks"}': 2},
    {'{slurm_job="77"}': 2},
    {'{label_team="vision"}': 4, '{label_team="speech"}': 2},
    {'{namespace="ml", pod="idle-0"}': 4},
    {'{instance="n1", gpu="0", label_rack="r7"}': 61, '{instance="n1", gpu="1", label_rack="r7"}': 62},
    {'{label_team="vision"}': 0.2},
]
"""The expected result of each query of the page after two hours, in order."""


def test_every_name_that_people_come_with_is_on_the_page():
    listed = (ROOT / "tests/docs/foreign_metrics.txt").read_text(encoding="utf-8").splitlines()
    wanted = {line for line in listed if line and not line.startswith("#")}
    assert len(wanted) > 300
    assert wanted - set(re.findall(r"`(\w+)`", PAGE)) == set()


def test_every_name_of_ours_on_the_page_is_in_the_catalog():
    without_rules = re.sub(r"\w+:pacecar_\w+:\w+", "", PAGE)
    assert set(re.findall(r"\bpacecar_[a-z0-9_]+", without_rules)) <= {metric.name for metric in CATALOG}


@pytest.mark.slow
def test_every_query_of_the_page_finds_what_it_says(tmp_path):
    assert len(BLOCKS) == len(ANSWERS), "each query of the page has an answer here"
    # Two hours in steps of a minute have 121 points.
    rounded = [
        {
            "expr": f"round({query}, 0.2)",
            "eval_time": "2h",
            "exp_samples": [{"labels": labels, "value": value} for labels, value in answer.items()],
        }
        for query, answer in zip(BLOCKS, ANSWERS, strict=True)
    ]
    series = [{"series": name.replace("'", '"'), "values": values} for name, values in SERIES.items()]
    check(find_tool("promtool"), tmp_path, *rounded, series=series, rules=[RECORDING], interval="1m")
