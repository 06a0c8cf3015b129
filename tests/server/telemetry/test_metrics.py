"""Metrics: what is counted, under which names, and that the dashboard asks for nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server.conftest import RunningServer, StartServer
from server.raw_http import post_raw
from server.scripted_engine import ScriptedEngine
from server.waiting import eventually, is_idle

from server.telemetry import test_host_metrics
from tidewheel.engine.adapters.options import LoraOptions
from tidewheel.engine.adapters.registry import LoraRegistry
from tidewheel.engine.devices.bucket_stats import BucketStats, BucketUse
from tidewheel.engine.devices.bucketing import Bucket
from tidewheel.engine.pipeline.stage_times import PipelineStats, StageStats
from tidewheel.server.http.limits import AdmissionLimits

COMPLETIONS = "/v1/completions"
DASHBOARD = Path(__file__).parents[3] / "monitoring" / "grafana.json"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(server: RunningServer) -> Samples:
    """All samples by name and labels, without the model's name, which all have but the process' own."""
    response = server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            assert sample.name.startswith("process_") or sample.labels.pop("model_name") == "m"
            found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def padding_engine() -> ScriptedEngine:
    """One whose device has buckets."""
    engine = ScriptedEngine()
    prompts, decodes = BucketUse("prompt", Bucket(2, 128, 1), 3, 700), BucketUse("decode", Bucket(4, 1, 16), 10, 31)
    padded = BucketStats((decodes, prompts), num_outside=5, num_compilations=6)
    engine.executor.stats = lambda: padded
    return engine


def test_requests_are_measured(start_server: StartServer) -> None:
    measured = start_server(engine={"step_s": 0.002}, served_model_names=("m",))
    before = samples(measured)
    assert before["tidewheel:generation_tokens_total", ()] == 0
    measured.post(COMPLETIONS, {"prompt": "SAY(hello)YAS", "n": 2})
    measured.post(COMPLETIONS, {"prompt": "LOOP(", "max_tokens": 4, "stream": True})
    after = samples(measured)
    assert after["tidewheel:prompt_tokens_total", ()] > 0
    assert after["tidewheel:generation_tokens_total", ()] == 2 * len("hello.") + 4
    assert after["tidewheel:request_success_total", (("finished_reason", "stop"),)] == 2
    assert after["tidewheel:request_success_total", (("finished_reason", "length"),)] == 1
    assert 0 <= after["tidewheel:kv_cache_usage_perc", ()] <= 1
    for name in ("num_requests_running", "num_requests_waiting", "num_preemptions_total", "steps_stalled_total"):
        assert after[f"tidewheel:{name}", ()] == 0
    assert after["tidewheel:prefix_cache_queries_total", ()] >= after["tidewheel:prefix_cache_hits_total", ()]
    config = next(labels for name, labels in after if name == "tidewheel:cache_config_info")
    assert dict(config).items() >= {"block_size": "16", "num_gpu_blocks": "2048"}.items()


def test_histograms(start_server: StartServer) -> None:
    measured = start_server(engine={"step_s": 0.002}, served_model_names=("m",))
    measured.post(COMPLETIONS, {"prompt": "SAY(hello)YAS", "n": 2})
    measured.post(COMPLETIONS, {"prompt": "LOOP(", "max_tokens": 4, "stream": True})
    measured.post(COMPLETIONS, {"prompt": "LOOP( x", "max_tokens": 1})
    after = samples(measured)
    requests, choices = 3, 4
    for name, count in {
        "time_to_first_token_seconds": requests,
        "e2e_request_latency_seconds": requests,
        "request_params_n": requests,
        "request_params_max_tokens": requests,
        "request_prompt_tokens": requests,
        "request_prefill_kv_computed_tokens": requests,
        "request_max_num_generation_tokens": requests,
        "request_generation_tokens": choices,
        "request_num_preemptions": choices,
        "request_queue_time_seconds": choices,
        "request_prefill_time_seconds": choices,
        "request_decode_time_seconds": choices,
        "request_inference_time_seconds": choices,
        "request_time_per_output_token_seconds": choices - 1,  # of one there is a single token
    }.items():
        assert after[f"tidewheel:{name}_count", ()] == count, name
        assert after[f"tidewheel:{name}_bucket", (("le", "+Inf"),)] == count, name

    def total(name: str) -> float:
        return after[f"tidewheel:{name}_sum", ()]

    assert total("request_params_n") == 4
    assert total("request_params_max_tokens") == 16 + 4 + 1
    assert total("request_prompt_tokens") == after["tidewheel:prompt_tokens_total", ()]
    assert total("request_generation_tokens") == 6 + 6 + 4 + 1 == after["tidewheel:generation_tokens_total", ()]
    assert total("request_max_num_generation_tokens") == 6 + 4 + 1
    # Tokens that wait for a busy reader come together, and each counts.
    assert after["tidewheel:inter_token_latency_seconds_count", ()] == 2 * 5 + 3
    assert total("inter_token_latency_seconds") >= 0.002 * (2 * 5 + 3) * 0.9
    assert total("request_prefill_time_seconds") > 0.002 * 3
    assert total("request_decode_time_seconds") >= 0.002 * (2 * 5 + 3) * 0.9
    phases = total("request_prefill_time_seconds") + total("request_decode_time_seconds")
    assert abs(total("request_inference_time_seconds") - phases) < 1e-6
    assert total("e2e_request_latency_seconds") > 0
    steps = after["tidewheel:step_duration_seconds_count", ()]
    assert steps == after["tidewheel:iteration_tokens_total_count", ()] > 6
    assert total("step_duration_seconds") >= steps * 0.002
    assert total("iteration_tokens_total") > total("request_generation_tokens")


def test_preemptions_are_counted(start_server: StartServer) -> None:
    tight = start_server(engine={"num_blocks": 16}, served_model_names=("m",))
    answer = tight.post(COMPLETIONS, {"prompt": ["LOOP(", "and LOOP("], "max_tokens": 200}).json()
    assert [len(choice["text"]) for choice in answer["choices"]] == [200, 200]
    after = samples(tight)
    assert after["tidewheel:num_preemptions_total", ()] > 0
    assert after["tidewheel:num_preemptions_total", ()] == after["tidewheel:request_num_preemptions_sum", ()]
    assert after["tidewheel:request_num_preemptions_bucket", (("le", "20"),)] == 2


def test_what_waits_is_counted_by_its_reason(start_server: StartServer) -> None:
    def waiting(server: RunningServer, reason: str) -> float:
        found = samples(server)
        by_reason = {key: found["tidewheel:num_requests_waiting_by_reason", (("reason", key),)]
                     for key in ("capacity", "deferred")}  # fmt: skip
        assert sum(by_reason.values()) == found["tidewheel:num_requests_waiting", ()]
        return by_reason[reason]

    # One prompt fits at a time.
    tight = start_server(engine={"num_blocks": 16, "step_s": 0.05}, served_model_names=("m",))
    endless = [post_raw(tight, {"prompt": f"{i}{'.' * 190} LOOP(", "max_tokens": 40}) for i in range(2)]
    eventually(lambda: waiting(tight, "capacity") == 1, "one should wait for room")
    # The second of two equal prompts waits for what the first computes, which takes two steps.
    slow = start_server(engine={"step_s": 0.4}, served_model_names=("m",))
    endless.append(post_raw(slow, {"prompt": [f"{'.' * 8000} SAY(a)YAS"] * 2, "max_tokens": 1}))
    eventually(lambda: waiting(slow, "deferred") == 1, "one should wait for the other")
    for connection in endless:
        connection.close()
    eventually(lambda: is_idle(tight) and is_idle(slow), "clients have gone")


def test_padding_is_measured_by_bucket_on_devices_that_have_buckets(start_server: StartServer) -> None:
    def figures(server: RunningServer) -> Samples:
        found = samples(server).items()
        return {key: value for key, value in found if re.match("tidewheel:(bucket|compilations)_.*_total", key[0])}

    assert figures(start_server(served_model_names=("m",))) == {}
    labels = {
        "prompt": (("batch_size", "2"), ("num_blocks", "1"), ("phase", "prompt"), ("query_len", "128")),
        "decode": (("batch_size", "4"), ("num_blocks", "16"), ("phase", "decode"), ("query_len", "1")),
    }
    assert figures(start_server(padding_engine(), served_model_names=("m",))) == {
        ("tidewheel:bucket_hits_total", labels["prompt"]): 3,
        ("tidewheel:bucket_hits_total", labels["decode"]): 10,
        ("tidewheel:bucket_tokens_total", labels["prompt"]): 700,
        ("tidewheel:bucket_tokens_total", labels["decode"]): 31,
        ("tidewheel:bucket_padding_tokens_total", labels["prompt"]): 3 * 256 - 700,
        ("tidewheel:bucket_padding_tokens_total", labels["decode"]): 10 * 4 - 31,
        ("tidewheel:bucket_misses_total", ()): 5,
        ("tidewheel:compilations_after_warmup_total", ()): 6,
    }


def staged_engine() -> ScriptedEngine:
    """One whose device has two stages, buckets and adapters too, so that all that a dashboard can show is there."""
    engine = padding_engine()
    stages = [StageStats("the first", 7, 1.5, 6, 0.25), StageStats("the second", 7, 2.5, 5, 0.75)]
    engine.executor.stage_stats = lambda: PipelineStats(stages, restarts=3)
    engine.loras = LoraRegistry(LoraOptions(enable_lora=True), Mock(), Mock(), Mock())
    return engine


def test_stages_are_measured_where_there_are_any(start_server: StartServer) -> None:
    def figures(server: RunningServer) -> Samples:
        return {key: value for key, value in samples(server).items() if re.match("tidewheel:pipeline.*_total", key[0])}

    assert figures(start_server(served_model_names=("m",))) == {}
    first, second = (("stage", "1"),), (("stage", "2"),)
    assert figures(start_server(staged_engine(), served_model_names=("m",))) == {
        ("tidewheel:pipeline_stage_steps_total", first): 7,
        ("tidewheel:pipeline_stage_steps_total", second): 7,
        ("tidewheel:pipeline_stage_computing_seconds_total", first): 1.5,
        ("tidewheel:pipeline_stage_computing_seconds_total", second): 2.5,
        ("tidewheel:pipeline_stage_hops_total", first): 6,
        ("tidewheel:pipeline_stage_hops_total", second): 5,
        ("tidewheel:pipeline_stage_hop_seconds_total", first): 0.25,
        ("tidewheel:pipeline_stage_hop_seconds_total", second): 0.75,
        ("tidewheel:pipeline_restarts_total", ()): 3,
    }


FORCED = {"prompt": "SAY(ab)YAS", "structured_outputs": {"choice": ["abcdefgh"]}, "max_tokens": 20}


def test_draft_tokens_are_counted_by_position(start_server: StartServer) -> None:
    """The draft tokens are those that a grammar forces, so they are all accepted."""
    pytest.importorskip("llguidance")
    measured = start_server(served_model_names=("m",))
    measured.post(COMPLETIONS, FORCED)
    found = samples(measured)
    drafts, draft_tokens, right = (
        found[f"tidewheel:spec_decode_num_{name}_total", ()] for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    name = "tidewheel:spec_decode_num_accepted_tokens_per_pos_total"
    places = [found[name, (("position", str(place)),)] for place in range(sum(key == name for key, _ in found))]
    assert drafts > 0
    assert places == sorted(places, reverse=True)
    assert sum(places) == right <= draft_tokens


def test_rejections_are_counted(start_server: StartServer) -> None:
    limits = AdmissionLimits(max_queue=1)
    tight = start_server(engine={"num_blocks": 16, "step_s": 0.02}, served_model_names=("m",), admission=limits)
    endless = [post_raw(tight, {"prompt": f"{i} LOOP(", "max_tokens": 200}) for i in range(2)]
    eventually(lambda: len(tight.engine.requests) == 2, "two should be let in")
    assert tight.post(COMPLETIONS, {"prompt": "LOOP(", "max_tokens": 200}).status_code == 429
    for connection in endless:
        connection.close()
    eventually(lambda: is_idle(tight), "clients have gone")
    assert samples(tight)["tidewheel:requests_rejected_total", ()] == 1


def test_the_prefix_may_be_vllms(start_server: StartServer) -> None:
    named = start_server(metrics_prefix="vllm:", served_model_names=("m",))
    names = {name for name, _ in samples(named)}
    assert not any(name.startswith("tidewheel") for name in names)
    assert {"vllm:num_requests_running", "vllm:e2e_request_latency_seconds_bucket"} <= names


def test_the_dashboard_asks_for_metrics_that_there_are(start_server: StartServer) -> None:
    measured = start_server(staged_engine(), served_model_names=("m",))
    measured.post(COMPLETIONS, {"prompt": "SAY(hello)YAS"})
    measured.post(COMPLETIONS, FORCED)
    found = samples(measured)
    hosted = {f"tidewheel:{name}" for name in test_host_metrics.NAMES}
    exported = {name for name, _ in found} | hosted
    labels = {label for _, pairs in found for label, _ in pairs}
    labels |= {"model_name", "instance", "replica"}  # which all have, by Prometheus, and on Ray
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = list(_expressions(dashboard))
    assert len(expressions) > 30
    queried: set[str] = set()
    for expression in expressions:
        names = re.findall(r"\b(?:tidewheel:|process_)\w+", expression)
        assert names, expression
        queried.update(names)
        for grouped in re.findall(r"\bby \(([^)]*)\)", expression):
            assert set(grouped.split(", ")) <= labels, expression
    assert hosted <= queried <= exported
    counted = "tidewheel:(bucket|compilations|pipeline|spec)_.*_total"
    assert {name for name in exported if re.match(counted, name)} <= queried
    assert {panel["id"] for panel in dashboard["panels"]} == set(range(1, len(dashboard["panels"]) + 1))


def test_the_dashboard_puts_the_chosen_instances_together() -> None:
    """Several series become one figure, or each has its instance's name."""
    promql = pytest.importorskip("promql_parser")
    dashboard = json.loads(DASHBOARD.read_text())
    (instance,) = [one for one in dashboard["templating"]["list"] if one["name"] == "instance"]
    assert instance["multi"]
    assert instance["includeAll"]
    (model,) = [one for one in dashboard["templating"]["list"] if one["name"] == "model_name"]
    assert model["multi"]
    assert model["includeAll"]
    for target in [target for panel in dashboard["panels"] for target in panel["targets"]]:
        for selector, around in _selectors(promql, target["expr"].replace("$__rate_interval", "1m")):
            matchers = {one.name: (one.op, one.value) for one in selector.matchers.matchers}
            assert matchers["instance"] == (promql.MatchOp.Re, "$instance"), target
            if selector.name.startswith(("process_", "tidewheel:memory_")):  # of all models together
                assert "job" in matchers, target
            else:
                assert matchers["model_name"] == (promql.MatchOp.Re, "$model_name"), target
            aggregates = [node for node in around if isinstance(node, promql.AggregateExpr)]
            labels = aggregates[-1].modifier.labels if aggregates and aggregates[-1].modifier else []
            assert ("instance" in labels or not aggregates) == ("{{instance}}" in target["legendFormat"]), target
            functions = [node.func.name for node in around if isinstance(node, promql.Call)]
            assert ("le" in labels) == selector.name.endswith("_bucket"), target
            assert ("histogram_quantile" in functions) <= ("le" in labels), target


def _selectors(promql: Any, expression: str) -> list[tuple[Any, list[Any]]]:
    """Each selector of an expression, with what it is in, outermost first."""
    found: list[tuple[Any, list[Any]]] = []
    around: list[Any] = []

    def enter(node: Any) -> None:
        if isinstance(node, promql.VectorSelector):
            found.append((node, [*around]))
        around.append(node)

    def leave(_: Any) -> None:
        around.pop()

    promql.walk(promql.parse(expression), enter, leave)
    return found


def _expressions(node: Any) -> Iterator[str]:
    if isinstance(node, list):
        for item in node:
            yield from _expressions(item)
    elif isinstance(node, dict):
        for key, value in node.items():
            if key in ("expr", "query", "definition") and isinstance(value, str) and value != "prometheus":
                yield value
            else:
                yield from _expressions(value)
