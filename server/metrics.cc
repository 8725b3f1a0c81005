#include "server/metrics.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "prometheus/text_serializer.h"

namespace weft {

void MetricReadings::Set(const CounterSpec& spec, double value, const MetricLabels& labels) {
  Add(spec.name, spec.help, prometheus::MetricType::Counter, labels).counter.value = value;
}

void MetricReadings::Set(const GaugeSpec& spec, double value, const MetricLabels& labels) {
  Add(spec.name, spec.help, prometheus::MetricType::Gauge, labels).gauge.value = value;
}

prometheus::ClientMetric& MetricReadings::Add(const char* name, const char* help,
                                              prometheus::MetricType type,
                                              const MetricLabels& labels) {
  auto family = std::find_if(
      families_.begin(), families_.end(),
      [name](const prometheus::MetricFamily& f) { return f.name == std::string_view(name); });
  if (family == families_.end()) {
    family = families_.insert(family, {.name = name, .help = help, .type = type});
  }
  prometheus::ClientMetric& metric = family->metric.emplace_back();
  for (const MetricLabels* from : {&constant_labels_, &labels}) {
    for (const auto& [label, text] : *from) metric.label.push_back({label, text});
  }
  return metric;
}

MetricRegistry::MetricRegistry(std::string model_name)
    : constant_labels_{{"model_name", std::move(model_name)}} {}

prometheus::Counter& MetricRegistry::Get(const CounterSpec& spec, const MetricLabels& labels) {
  return prometheus::BuildCounter()
      .Name(spec.name)
      .Help(spec.help)
      .Labels(constant_labels_)
      .Register(registry_)
      .Add(labels);
}

prometheus::Gauge& MetricRegistry::Get(const GaugeSpec& spec, const MetricLabels& labels) {
  return prometheus::BuildGauge()
      .Name(spec.name)
      .Help(spec.help)
      .Labels(constant_labels_)
      .Register(registry_)
      .Add(labels);
}

prometheus::Histogram& MetricRegistry::Get(const HistogramSpec& spec, const MetricLabels& labels) {
  return prometheus::BuildHistogram()
      .Name(spec.name)
      .Help(spec.help)
      .Labels(constant_labels_)
      .Register(registry_)
      .Add(labels, std::vector<double>(spec.buckets.begin(), spec.buckets.end()));
}

std::unique_ptr<MetricRegistry::Reader> MetricRegistry::AddReader(
    std::function<void(MetricReadings&)> read) {
  std::unique_ptr<Reader> reader(new Reader(*this, std::move(read)));
  MutexLock lock(mutex_);
  readers_.push_back(reader.get());
  return reader;
}

MetricRegistry::Reader::~Reader() {
  MutexLock lock(registry_.mutex_);
  std::erase(registry_.readers_, this);
}

std::string MetricRegistry::Scrape() const {
  MetricReadings readings(constant_labels_);
  {
    MutexLock lock(mutex_);
    for (const Reader* reader : readers_) reader->read_(readings);
  }
  std::vector<prometheus::MetricFamily> families = registry_.Collect();
  families.insert(families.end(), std::make_move_iterator(readings.families_.begin()),
                  std::make_move_iterator(readings.families_.end()));
  const prometheus::TextSerializer serializer;
  return serializer.prometheus::Serializer::Serialize(families);
}

}  // namespace weft
