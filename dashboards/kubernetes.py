"""Renders rules and dashboards for Kubernetes: a PrometheusRule, and a kustomization with ConfigMaps.

The Prometheus operator reads rules from its own kind of object, and Grafana's sidecar reads dashboards from labelled
ConfigMaps.

    prometheus_rule     deploy/kubernetes/components/prometheusrule/prometheusrule.yaml
    kustomization       dashboards/generated/kustomization.yaml, beside the dashboards, because kustomize reads only
                        files below a kustomization; components/grafana-dashboards refers to this folder

The Helm chart needs neither, because its templates read the files themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .rules.rule_files import dumped, rule_groups

__all__ = ["NAMESPACE", "kustomization", "prometheus_rule"]

NAMESPACE = "pacecar"
"""The namespace of deploy/kubernetes/base; an outer kustomization may change it."""

NAME_LABEL = {"app.kubernetes.io/name": "pacecar"}

SIDECAR_LABEL = {"grafana_dashboard": "1"}
"""The label that the sidecars of Grafana's chart and of kube-prometheus-stack look for by default."""


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
    """Return a component that makes a ConfigMap from each of the files `dashboards`."""
    component: dict[str, Any] = {
        "apiVersion": "kustomize.config.k8s.io/v1alpha1",
        "kind": "Component",
        # With a hash in the name, the previous version's dashboards would remain.
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
