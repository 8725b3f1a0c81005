#include "worker/join_client.h"

#include <chrono>
#include <utility>

#include "fmt/format.h"
#include "server/base/bounded_time.h"
#include "server/grpc_status.h"

namespace weft {

JoinClient::JoinClient(const std::string& leader_address, const GrpcChannelOptions& options)
    : leader_address_(leader_address),
      channel_(NewGrpcChannel(leader_address, options)),
      stub_(v1::Worker::NewStub(channel_)) {}

JoinClient::~JoinClient() {
  context_.TryCancel();
  if (watch_.joinable()) watch_.join();
}

absl::StatusOr<GroupAgreement> JoinClient::Join(const RankOffer& offer, const v1::RankInfo& info,
                                                absl::Duration timeout) {
  if (!channel_->WaitForConnected(std::chrono::system_clock::now() + ToBoundedChrono(timeout))) {
    // A call that does not wait says why: nobody listens, or TLS does not agree.
    const absl::Status why = FromGrpcStatus(stub_->Join(&context_)->Finish());
    return absl::UnavailableError(fmt::format("no leader at {} after {} (--join-timeout): {}",
                                              leader_address_, absl::FormatDuration(timeout),
                                              std::string(why.message())));
  }
  stream_ = stub_->Join(&context_);
  v1::JoinRequest request;
  request.set_rank(offer.rank);
  request.set_fabric_address(offer.fabric_address);
  request.set_num_blocks(offer.num_blocks);
  request.set_agreed(offer.agreed);
  request.set_kv_fabric_address(offer.kv_fabric_address);
  *request.mutable_info() = info;
  v1::JoinResponse response;
  if (!stream_->Write(request) || !stream_->Read(&response)) {
    const absl::Status status = FromGrpcStatus(stream_->Finish());
    const std::string why =
        fmt::format("the leader did not take this rank: {}", std::string(status.message()));
    return status.ok() ? absl::UnavailableError(why) : absl::Status(status.code(), why);
  }
  GroupAgreement agreement;
  agreement.fabric_addresses.assign(response.fabric_addresses().begin(),
                                    response.fabric_addresses().end());
  agreement.num_blocks = response.num_blocks();
  agreement.max_model_len = response.max_model_len();
  return agreement;
}

void JoinClient::WatchEnd(std::function<void()> on_end) {
  watch_ = std::thread([this, on_end = std::move(on_end)] {
    v1::JoinResponse ignored;
    while (stream_->Read(&ignored)) {
    }
    on_end();
  });
}

void JoinClient::Send(const v1::RankInfo& info) {
  v1::JoinRequest request;
  *request.mutable_info() = info;
  MutexLock lock(write_mutex_);
  stream_->Write(request);
}

void JoinClient::Send(const KvReport& report) {
  v1::JoinRequest request;
  v1::KvReport& out = *request.mutable_kv_report();
  out.set_transfer_id(report.transfer);
  out.set_kind(static_cast<v1::KvReport::Kind>(static_cast<int>(report.kind) + 1));
  out.set_error(report.error);
  out.set_bytes(report.bytes);
  MutexLock lock(write_mutex_);
  stream_->Write(request);
}

}  // namespace weft
