#!/usr/bin/env python3
"""Writes the Grafana dashboards beside this file.

    .deps/deploy/venv/bin/python deploy/grafana/generate.py [--check]    --check writes nothing, exits 1 on a difference
"""

import pathlib
import sys

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import BigValueGraphMode, LegendDisplayMode, LegendPlacement, TooltipDisplayMode
from grafana_foundation_sdk.models.dashboard import DashboardLinkType, DataSourceRef, VariableRefresh

HERE = pathlib.Path(__file__).parent
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
MODEL = 'cluster=~"$cluster", model_name=~"$model"'
GROUP = MODEL + ', group=~"$group"'
RATE = "$__rate_interval"


def quantiles(name, labels=MODEL):
    """p50, p90 and p99 of a histogram."""
    return [(f"histogram_quantile({q}, sum by (le) (rate({name}_bucket{{{labels}}}[{RATE}])))", f"p{round(100 * q)}")
            for q in (0.5, 0.9, 0.99)]


def rate(name, labels=MODEL, by=""):
    return f"sum by ({by}) (rate({name}{{{labels}}}[{RATE}]))" if by else f"sum(rate({name}{{{labels}}}[{RATE}]))"


# Of each dashboard: title, what it shows, its variables beside cluster and model, and its rows: panels of
# (title, unit, description, queries and legends).
OVERVIEW = ("weft-overview", "Weft / overview", "Do users get answers, how fast, and is there room for more?", [], {
    "Requests": [
        ("Alerts that fire", "none", "Of Weft's, in all clusters; see Alerting for what to do",
         [('count(ALERTS{alertname=~"Weft.*", alertstate="firing"}) or vector(0)', "firing")]),
        ("Groups ready", "none", "That a router sees, and all it has been told of (an autoscaler's maximum counts)",
         [(f"max(weft_router_groups_ready{{{MODEL}}})", "ready"), (f"max(weft_router_groups{{{MODEL}}})", "known")]),
        ("Failed requests", "percentunit", "Through no fault of the caller, over 5 minutes; the budget is 0.1 %",
         [(f"weft:router_errors:ratio_rate5m{{{MODEL}}}", "{{cluster}} {{model_name}}")]),
        ("Requests that ended", "reqps", "By gRPC status, at the routers",
         [(rate("weft_router_requests_total", by="outcome"), "{{outcome}}")]),
        ("Requests in flight", "none", "At the routers; and in the groups: that run, that wait for a place",
         [(f"sum(weft_router_requests_in_flight{{{MODEL}}})", "in flight"),
          (f"sum(weft_num_requests_running{{{MODEL}}})", "running"),
          (f"sum(weft_num_requests_waiting{{{MODEL}}})", "waiting")]),
        ("How requests finished", "reqps", "In the groups",
         [(rate("weft_request_success_total", by="finished_reason"), "{{finished_reason}}")]),
    ],
    "Latency": [
        ("Time to first token", "s", "From a request's arrival at its group", quantiles("weft_time_to_first_token_seconds")),
        ("Time between tokens", "s", "Of a request", quantiles("weft_inter_token_latency_seconds")),
        ("Request latency", "s", "From arrival to the last token", quantiles("weft_e2e_request_latency_seconds")),
        ("Time in the queue", "s", "Before the first step", quantiles("weft_request_queue_time_seconds")),
        ("Time in prefill", "s", "From the first step to the first token", quantiles("weft_request_prefill_time_seconds")),
        ("Time in decode", "s", "From the first token to the last", quantiles("weft_request_decode_time_seconds")),
    ],
    "Work": [
        ("Tokens", "short", "Per second: of prompts, when their requests are admitted; generated",
         [(rate("weft_prompt_tokens_total"), "prompt"), (rate("weft_generation_tokens_total"), "generated")]),
        ("Tokens of a request", "short", "p50 and p99 of prompts and of completions",
         [q for name, what in (("weft_request_prompt_tokens", "prompt"), ("weft_request_generation_tokens", "completion"))
          for q in ((e, f"{what} {legend}") for e, legend in quantiles(name) if legend != "p90")]),
        ("KV cache in use", "percentunit", "Of each group's blocks; near 100 % requests wait or are preempted",
         [(f"max by (group) (weft_kv_cache_usage_ratio{{{MODEL}}})", "{{group}}")]),
        ("Prefix cache hits", "percentunit", "Of the tokens of prompts that were looked up; they need no computing",
         [(f"{rate('weft_prefix_cache_hits_total', by='group')} / {rate('weft_prefix_cache_queries_total', by='group')}",
           "{{group}}")]),
        ("Prefix cache evictions", "ops", "Blocks per second that left for other tokens; many, and few hits, want more KV memory",
         [(rate("weft_prefix_cache_evictions_total", by="group"), "{{group}}")]),
        ("Preemptions", "ops", "Requests per second that lost their KV and are computed again",
         [(rate("weft_num_preemptions_total", by="group"), "{{group}}")]),
    ],
})

GROUP_BOARD = ("weft-group", "Weft / group", "What a group's ranks do: steps, collectives, KV by position", ["group"], {
    "Engine": [
        ("Requests", "none", "That run and that wait for KV blocks or a place",
         [(f"weft_num_requests_running{{{GROUP}}}", "{{group}} running"),
          (f"weft_num_requests_waiting{{{GROUP}}}", "{{group}} waiting")]),
        ("Steps", "ops", "Per second; the same for all ranks of a group",
         [(f"max by (group) (rate(weft_rank_step_id{{{GROUP}}}[{RATE}]))", "{{group}}")]),
        ("Tokens in a step", "short", "p50, p90 and p99; at --max-num-batched-tokens prefill is what limits",
         quantiles("weft_iteration_tokens", GROUP)),
        ("Time per output token", "s", "Mean of a request, quantiles over requests",
         quantiles("weft_request_time_per_output_token_seconds", GROUP)),
        ("KV cache in use", "percentunit", "Of the group's blocks",
         [(f"weft_kv_cache_usage_ratio{{{GROUP}}}", "{{group}}")]),
        ("Slow readers", "bytes", "What waits in the leader for readers of token streams",
         [(f"weft_stream_buffer_bytes{{{GROUP}}}", "{{group}}")]),
    ],
    "Ranks": [
        ("Time since progress", "s", "Of a rank; it grows also while there is nothing to do. One rank above the others holds all up",
         [(f"time() - weft_rank_last_progress_timestamp_seconds{{{GROUP}}}", "{{group}} rank {{rank}}")]),
        ("Where a step's time goes", "s", "From one step to the next, how much of it a rank is in the step, and in its collectives: for the slowest rank and the messages. Without work there are no steps",
         [(f"1 / max by (group) (rate(weft_rank_step_id{{{GROUP}}}[{RATE}]) > 0)", "{{group}} step to step"),
          (f"sum by (group, rank) (rate(weft_rank_step_seconds_total{{{GROUP}}}[{RATE}])) / "
           f"(sum by (group, rank) (rate(weft_rank_step_id{{{GROUP}}}[{RATE}])) > 0)", "{{group}} rank {{rank}} step"),
          (f"sum by (group, rank) (rate(weft_rank_collective_wait_seconds_total{{{GROUP}}}[{RATE}])) / "
           f"(sum by (group, rank) (rate(weft_rank_step_id{{{GROUP}}}[{RATE}])) > 0)", "{{group}} rank {{rank}} collectives")]),
        ("Time in collectives", "percentunit", "Share of each rank's time. The rank that waits least is the slowest",
         [(f"weft:rank_collective_wait:ratio_rate1m{{{GROUP}}}", "{{group}} rank {{rank}}")]),
        ("Collectives", "Bps", "Payload that a rank receives from the others",
         [(rate("weft_rank_collective_received_bytes_total", GROUP, "group, rank"), "{{group}} rank {{rank}}")]),
        ("Fabric", "Bps", "Plans and collectives, sent and received",
         [(rate("weft_rank_fabric_sent_bytes_total", GROUP, "group, rank"), "{{group}} rank {{rank}} sent"),
          (rate("weft_rank_fabric_received_bytes_total", GROUP, "group, rank"), "{{group}} rank {{rank}} received")]),
        ("KV per rank", "short", "Tokens of running requests whose KV a rank holds: positions are shared out, so ranks of a DCP group are level",
         [(f"weft_rank_kv_tokens{{{GROUP}}}", "{{group}} rank {{rank}}")]),
        ("KV imbalance", "none", "Fullest rank over the mean; 1 is level, N a single block of short sequences",
         [(f"weft:rank_kv_tokens:max_over_mean{{{GROUP}}}", "{{group}}")]),
        ("Memory", "bytes", "Of each rank: weights, KV cache, workspace",
         [(f"weft_rank_memory_bytes{{{GROUP}}}", "{{group}} rank {{rank}} {{kind}}")]),
    ],
})

HANDOFF = ("weft-handoff", "Weft / prefill and decode", "KV that goes from groups that compute prompts to groups that go on", ["group"], {
    "Hand-off": [
        ("Hand-offs", "reqps", "Prompts that one group was to compute for another; failed and short ones the other one computes itself",
         [(rate("weft_router_handoffs_total", by="outcome"), "{{outcome}}")]),
        ("Duration", "s", "Of transfers that were done, from the reservation or the first chunk", quantiles("weft_kv_transfer_seconds", GROUP)),
        ("Open transfers", "none", "By direction",
         [(f"sum by (group, direction) (weft_kv_transfer_inflight{{{GROUP}}})", "{{group}} {{direction}}")]),
        ("KV sent and received", "Bps", "By group",
         [(rate("weft_kv_transfer_bytes_total", GROUP, "group, direction"), "{{group}} {{direction}}")]),
        ("Sent while computing", "percentunit", "Share of the KV that went out before its prompt was done: it costs no time",
         [(f"{rate('weft_kv_transfer_overlapped_bytes_total', GROUP, 'group')} / "
           f"({rate('weft_kv_transfer_bytes_total', GROUP + ', direction=' + chr(34) + 'sent' + chr(34), 'group')} > 0)", "{{group}}")]),
        ("Failures", "ops", "Transfers that failed, by reason; that ended for want of progress; messages that came too late",
         [(rate("weft_kv_transfer_failed_total", GROUP, "reason"), "failed: {{reason}}"),
          (rate("weft_kv_transfer_expired_total", GROUP), "expired"),
          (rate("weft_kv_transfer_dropped_messages_total", GROUP), "late messages")]),
    ],
})

ROUTER = ("weft-router", "Weft / router", "What routers do with requests: where they go, why they fail", [], {
    "Requests": [
        ("Requests that ended", "reqps", "By gRPC status and reason",
         [(rate("weft_router_requests_total", by="outcome, reason"), "{{outcome}} {{reason}}")]),
        ("Refused before a group took them", "reqps", "By reason: OVERLOADED and DRAINING are the cluster's, INVALID_ARGUMENT the caller's",
         [(rate("weft_router_rejects_total", by="reason"), "{{reason}}")]),
        ("In flight", "none", "Generate calls at each router",
         [(f"weft_router_requests_in_flight{{{MODEL}}}", "{{instance}}")]),
        ("Waiting", "none", "For a tokenizer thread; for a group that takes them",
         [(f"sum by (stage) (weft_router_queued_requests{{{MODEL}}})", "{{stage}}")]),
    ],
    "Groups": [
        ("Placements", "reqps", "Samples given to each group",
         [(rate("weft_router_placements_total", by="group"), "{{group}}")]),
        ("Groups ready", "none", "As each router sees it",
         [(f"weft_router_groups_ready{{{MODEL}}}", "{{instance}}")]),
        ("Retries and replays", "ops", "Placed again: the group could not take it; the group was lost and another one goes on",
         [(rate("weft_router_retries_total"), "retries"), (rate("weft_router_replays_total"), "replays")]),
        ("Drains", "none", "Routers and leaders that finish what they have, and those whose time for it is over",
         [(f"sum(weft_drain_deadline_timestamp_seconds{{{MODEL}}} > bool 0)", "draining"),
          (f"sum((weft_drain_deadline_timestamp_seconds{{{MODEL}}} > bool 0) "
           f"* (weft_drain_deadline_timestamp_seconds{{{MODEL}}} < bool time()))", "overdue")]),
        ("Groups that are asked last", "none", "At 1 for a router: the group's streams failed too often, and it is tried now and then",
         [(f"max by (group) (weft_router_breaker_open{{{MODEL}}})", "{{group}}")]),
        ("Prompt tokens that are cached", "percentunit", "In the group that was chosen, as far as the router knew",
         [(f"{rate('weft_router_cached_prompt_tokens_total')} / {rate('weft_router_prompt_tokens_total')}", "cached")]),
        ("Prefix index", "none", "Blocks of each group's prefix cache that routers know",
         [(f"max by (group) (weft_router_prefix_index_blocks{{{MODEL}}})", "{{group}}")]),
        ("Memory of the prefix index", "bytes", "Of each router, for all groups",
         [(f"sum by (instance) (weft_router_prefix_index_bytes{{{MODEL}}})", "{{instance}}")]),
        ("Slow readers", "bytes", "What waits in routers for clients that read too slowly",
         [(f'weft_stream_buffer_bytes{{{MODEL}, group=""}}', "{{instance}}")]),
    ],
})


def panel(title, unit, description, queries):
    single = len(queries) == 1 and title == "Alerts that fire"
    made = (stat if single else timeseries).Panel().title(title).unit(unit).description(description)
    made = made.datasource(SOURCE).span(8).height(8)
    if single:
        made = made.graph_mode(BigValueGraphMode.NONE)
    else:
        made = (made.min(0).fill_opacity(10).line_width(1)
                .legend(common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
                        .show_legend(True))
                .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI)))
    for expression, legend in queries:
        made = made.with_target(prometheus.Dataquery().datasource(SOURCE).expr(expression).legend_format(legend).range())
    return made


def variable(name, query):
    return (dashboard.QueryVariable(name).label(name).datasource(SOURCE).query(query).multi(True).include_all(True)
            .all_value(".*").refresh(VariableRefresh.ON_TIME_RANGE_CHANGED))


def build(uid, title, description, variables, rows):
    board = (dashboard.Dashboard(title).uid(uid).description(description).tags(["weft"]).refresh("30s")
             .time("now-1h", "now").timezone("browser").readonly()
             .with_variable(dashboard.DatasourceVariable("datasource").label("data source").type("prometheus"))
             .with_variable(variable("cluster", "label_values(weft_router_groups, cluster)"))
             .with_variable(variable("model", 'label_values(weft_router_groups{cluster=~"$cluster"}, model_name)')))
    if "group" in variables:
        board = board.with_variable(variable("group", f"label_values(weft_num_requests_running{{{MODEL}}}, group)"))
    board = (board
             .link(dashboard.DashboardLink("Weft").type(DashboardLinkType.DASHBOARDS).tags(["weft"]).as_dropdown(False)
                   .include_vars(True).keep_time(True))
             .link(dashboard.DashboardLink("Alerts").type(DashboardLinkType.LINK).url("/alerting/list?search=Weft"))
             .annotation(dashboard.AnnotationQuery().name("Alerts").datasource(SOURCE).enable(True).icon_color("red")
                         .expr('ALERTS{alertname=~"Weft.*", alertstate="firing"}')))
    for row, panels in rows.items():
        board = board.with_row(dashboard.Row(row))
        for entry in panels:
            board = board.with_panel(panel(*entry))
    return JSONEncoder(sort_keys=True, indent=2).encode(board.build()) + "\n"


def main():
    different = False
    for spec in (OVERVIEW, GROUP_BOARD, HANDOFF, ROUTER):
        path, text = HERE / f"{spec[0]}.json", build(*spec)
        if path.exists() and path.read_text() == text:
            continue
        different = True
        if "--check" in sys.argv:
            print(f"{path.name} is not what deploy/grafana/generate.py writes: run it", file=sys.stderr)
        else:
            path.write_text(text)
    return 1 if different and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
