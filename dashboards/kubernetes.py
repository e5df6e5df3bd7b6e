"""Renders what Kubernetes reads of rules and dashboards: a PrometheusRule, and the kustomization of ConfigMaps.

The Prometheus operator takes rules as an object of its own kind, and Grafana's sidecar takes dashboards out of
ConfigMaps with a label.  A second copy by hand would drift, so both are made of what Prometheus and Grafana read.

    prometheus_rule     deploy/kubernetes/components/prometheusrule/prometheusrule.yaml
    kustomization       dashboards/generated/kustomization.yaml: kustomize reads files below a kustomization only, so it
                        stands beside the dashboards, and components/grafana-dashboards names this folder

The Helm chart needs neither: its templates read the files themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .rules.rule_files import dumped, rule_groups

__all__ = ["NAMESPACE", "kustomization", "prometheus_rule"]

NAMESPACE = "pacecar"
"""That of deploy/kubernetes/base; a kustomization around it may set another."""

NAME_LABEL = {"app.kubernetes.io/name": "pacecar"}

SIDECAR_LABEL = {"grafana_dashboard": "1"}
"""What the sidecar of Grafana's chart, and of kube-prometheus-stack, looks for unless it is told otherwise."""


def prometheus_rule() -> str:
    """Return recording and alert rules as one PrometheusRule of the Prometheus operator."""
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "pacecar", "namespace": NAMESPACE, "labels": NAME_LABEL},
        "spec": {"groups": rule_groups()},
    }
    return dumped("dashboards/rules/", rule)


def kustomization(dashboards: Iterable[str]) -> str:
    """Return a component that makes a ConfigMap of each of the files `dashboards`."""
    component: dict[str, Any] = {
        "apiVersion": "kustomize.config.k8s.io/v1alpha1",
        "kind": "Component",
        # A hash in the name would leave the dashboards of the version before beside those of this one.
        "generatorOptions": {
            "disableNameSuffixHash": True,
            "labels": NAME_LABEL | SIDECAR_LABEL,
            "annotations": {"grafana_folder": "pacecar"},
        },
        "configMapGenerator": [
            {"name": f"pacecar-dashboard-{name.removesuffix('.json')}", "namespace": NAMESPACE, "files": [name]}
            for name in sorted(dashboards)
        ],
    }
    return dumped("dashboards/kubernetes.py", component)
