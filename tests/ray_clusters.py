"""What tests of Ray start it with."""

from __future__ import annotations

from typing import Any

import psutil

# Ray gives up on what is slow to start, or slow to answer. On a machine that is busy with other things all of it is.
PATIENCE = {
    "RAY_agent_register_timeout_ms": "600000",
    "RAY_gcs_rpc_server_connect_timeout_s": "600",
    "RAY_gcs_server_port_wait_time_s": "600",
    "RAY_health_check_timeout_ms": "120000",
    "RAY_raylet_start_wait_time_s": "600",
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "600",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "600",
}
SERVE_ENVIRONMENT = {
    **PATIENCE,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "tidewheel.ray.proxy.middlewares",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
}


def start_node(cluster: Any, attempts: int = 3, **options: Any) -> Any:
    """Add a node to a `ray.cluster_utils.Cluster`."""
    before = {*psutil.Process().children()}
    head, workers = cluster.head_node, {*cluster.worker_nodes}
    try:
        return cluster.add_node(object_store_memory=80 * 2**20, **options)
    except Exception:  # Ray raises no other kind where its processes took long to start, on a busy machine
        if attempts == 1:
            raise
        for child in {*psutil.Process().children()} - before:
            child.kill()
            child.wait()
        cluster.head_node, cluster.worker_nodes = head, workers
        return start_node(cluster, attempts - 1, **options)
