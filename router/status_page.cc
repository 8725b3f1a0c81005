#include "router/status_page.h"

#include <algorithm>
#include <string_view>

#include "fmt/format.h"
#include "server/base/format_bytes.h"

namespace weft {
namespace {

constexpr std::string_view kHead = R"(<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="5">
<meta name="viewport" content="width=device-width"><title>Weft router</title><style>
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 72em; padding: 0 1em;
       color: #222; background: #fff; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin: 1.5em 0 .3em; }
table { border-collapse: collapse; } th, td { padding: .15em 1em .15em 0; text-align: left; }
th { font-weight: 600; color: #555; } td.n { text-align: right; font-variant-numeric: tabular-nums; }
.bar { width: 16em; height: .8em; background: #e4e4ea; border-radius: 2px; }
.bar div { height: 100%; background: #3a6ea5; border-radius: 2px; }
.state { padding: 0 .5em; border-radius: 3px; color: #fff; font-size: .9em; }
.ready { background: #2e7d32; } .down { background: #b3261e; } .faint { color: #777; }
</style></head><body>
)";

std::string Escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

double Share(std::int64_t part, std::int64_t whole) {
  if (whole <= 0) return 0;
  return 100.0 * static_cast<double>(std::clamp<std::int64_t>(part, 0, whole)) /
         static_cast<double>(whole);
}

// The KV of a sequence is spread evenly over the ranks: each is as full as the pool.
void AddRanks(const v1::GroupInfo& group, std::string& page) {
  const std::int64_t used = group.num_blocks() - group.num_free_blocks();
  const double share = Share(used, group.num_blocks());
  page +=
      "<table><tr><th>rank</th><th>KV in use</th><th></th><th>KV</th><th>weights</th>"
      "<th>workspace</th><th>pid</th><th>metrics</th></tr>\n";
  for (const v1::RankInfo& rank : group.ranks()) {
    page += fmt::format(
        "<tr><td class=n>{}</td><td><div class=bar role=img aria-label=\"{:.1f} % in use\">"
        "<div style=\"width:{:.1f}%\"></div></div></td><td class=n>{:.1f} %</td>"
        "<td class=n>{}</td><td class=n>{}</td><td class=n>{}</td><td class=n>{}</td><td>{}</td>"
        "</tr>\n",
        rank.rank(), share, share, share, FormatBytes(static_cast<std::uint64_t>(rank.kv_bytes())),
        FormatBytes(static_cast<std::uint64_t>(rank.weight_bytes())),
        FormatBytes(static_cast<std::uint64_t>(rank.workspace_bytes())), rank.pid(),
        Escaped(rank.metrics_address()));
  }
  page += "</table>\n";
}

void AddGroup(const GroupSnapshot& group, std::string& page) {
  const v1::GroupInfo& info = group.info;
  page += fmt::format("<h2>{} <span class=\"state {}\">{}</span></h2>\n", Escaped(info.address()),
                      group.ready ? "ready" : "down", Escaped(group.state));
  if (info.tensor_parallel_size() == 0) return;  // its leader was never heard of
  page += fmt::format(
      "<p>{}, {} ranks, KV by position over {}, blocks of {} in runs of {}, {} tokens at most<br>"
      "<b>{}</b> running, <b>{}</b> waiting, {} of {} blocks in use, {} KV bytes per token and "
      "rank</p>\n",
      Escaped(info.model()), info.tensor_parallel_size(), info.decode_context_parallel_size(),
      info.block_size(), info.cp_kv_cache_interleave_size(), info.max_model_len(),
      info.num_requests_running(), info.num_requests_waiting(),
      info.num_blocks() - info.num_free_blocks(), info.num_blocks(),
      info.kv_bytes_per_token_per_rank());
  AddRanks(info, page);
}

void AddErrors(const RouterStatus& status, std::string& page) {
  page += "<h2>Recent errors</h2>\n";
  if (status.errors.empty()) {
    page += "<p class=faint>none</p>\n";
    return;
  }
  page += "<table><tr><th>ago</th><th>status</th><th>reason</th><th>message</th></tr>\n";
  for (const RecentErrors::Entry& error : status.errors) {
    page += fmt::format("<tr><td class=n>{:.0f} s</td><td>{}</td><td>{}</td><td>{}</td></tr>\n",
                        absl::ToDoubleSeconds(status.now - error.time), Escaped(error.code),
                        Escaped(error.reason), Escaped(error.message));
  }
  page += "</table>\n";
}

}  // namespace

std::string StatusPage(const RouterStatus& status) {
  std::string page(kHead);
  const auto ready = std::count_if(status.cluster.groups.begin(), status.cluster.groups.end(),
                                   [](const auto& group) { return group->ready; });
  page += fmt::format(
      "<h1>Weft router: {}</h1>\n<p>{} of {} groups ready, <b>{}</b> requests in flight, <b>{}</b> "
      "waiting for a group <span class=faint>· version {}, up {}</span></p>\n",
      Escaped(status.model), ready, status.cluster.groups.size(), status.requests_in_flight,
      status.requests_waiting, Escaped(status.version),
      absl::FormatDuration(absl::Trunc(status.uptime, absl::Seconds(1))));
  for (const auto& group : status.cluster.groups) AddGroup(*group, page);
  AddErrors(status, page);
  page += "</body></html>\n";
  return page;
}

}  // namespace weft
