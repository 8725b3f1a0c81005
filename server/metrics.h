#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "prometheus/counter.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "prometheus/metric_family.h"
#include "prometheus/registry.h"
#include "server/base/mutex.h"
#include "server/metric_table.h"

namespace weft {

using MetricLabels = std::map<std::string, std::string>;

// What one scrape reads from its readers.
class MetricReadings {
 public:
  // One series of a counter or gauge; each (spec, labels) at most once per scrape.
  void Set(const CounterSpec& spec, double value, const MetricLabels& labels = {});
  void Set(const GaugeSpec& spec, double value, const MetricLabels& labels = {});

 private:
  friend class MetricRegistry;
  explicit MetricReadings(const MetricLabels& constant_labels)
      : constant_labels_(constant_labels) {}
  prometheus::ClientMetric& Add(const char* name, const char* help, prometheus::MetricType type,
                                const MetricLabels& labels);

  const MetricLabels& constant_labels_;
  std::vector<prometheus::MetricFamily> families_;
};

// The metrics of one process, in Prometheus's text format. Some are counted where things happen
// (prometheus-cpp's counters and histograms: atomics, a histogram takes a lock of its own), others
// are read from their owners when somebody scrapes, and cost nothing in between.
//
// Thread-safe. The metrics live as long as the registry.
class MetricRegistry {
 public:
  // The label model_name of every series.
  explicit MetricRegistry(std::string model_name);
  MetricRegistry(const MetricRegistry&) = delete;
  MetricRegistry& operator=(const MetricRegistry&) = delete;

  // The metric of that name and those labels; made at the first call. The values of a label have to
  // come from a bounded set.
  prometheus::Counter& Get(const CounterSpec& spec, const MetricLabels& labels = {});
  prometheus::Gauge& Get(const GaugeSpec& spec, const MetricLabels& labels = {});
  prometheus::Histogram& Get(const HistogramSpec& spec, const MetricLabels& labels = {});

  // Runs `read` at every scrape, on the scraper's thread, until the result is destroyed: that waits
  // for a scrape under way.
  class Reader;
  [[nodiscard]] std::unique_ptr<Reader> AddReader(std::function<void(MetricReadings&)> read);

  // What /metrics answers.
  std::string Scrape() const;

 private:
  const MetricLabels constant_labels_;
  prometheus::Registry registry_;
  mutable Mutex mutex_;
  std::vector<Reader*> readers_ ABSL_GUARDED_BY(mutex_);
};

class MetricRegistry::Reader {
 public:
  ~Reader();
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

 private:
  friend class MetricRegistry;
  Reader(MetricRegistry& registry, std::function<void(MetricReadings&)> read)
      : registry_(registry), read_(std::move(read)) {}

  MetricRegistry& registry_;
  const std::function<void(MetricReadings&)> read_;
};

}  // namespace weft
