#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>

#include "absl/types/span.h"
#include "worker/group/collective_mux.h"

namespace weft {

// A queue of collective messages in one block of memory of fixed size.
class MessageRing {
 public:
  struct Message {
    CollectiveHeader header;
    absl::Span<const std::byte> payload;  // valid until Pop()
  };

  explicit MessageRing(std::size_t capacity_bytes)
      : num_words_((capacity_bytes + 7) / 8),
        words_(std::make_unique_for_overwrite<std::uint64_t[]>(num_words_)) {}

  std::size_t size_bytes() const { return num_words_ * 8; }

  // What a message takes of the capacity; wrapping around may cost as much again, once.
  static constexpr std::size_t BytesOf(std::size_t payload_bytes) {
    return 8 * WordsOf(payload_bytes);
  }

  // False when the ring is full.
  bool Push(const CollectiveHeader& header, absl::Span<const std::byte> payload) {
    const std::size_t need = WordsOf(payload.size());
    const bool empty = count_ == 0;
    if (empty) head_ = tail_ = 0;
    if (tail_ >= head_ && (empty || tail_ > head_)) {
      if (num_words_ - tail_ < need) {
        if (head_ < need) return false;
        if (tail_ < num_words_) words_[tail_] = kSkip;
        tail_ = 0;
      }
    } else if (head_ - tail_ < need) {
      return false;
    }
    std::uint64_t* const at = &words_[tail_];
    at[0] = payload.size();
    std::memcpy(at + 1, &header, sizeof(header));
    if (!payload.empty()) std::memcpy(at + kHeaderWords, payload.data(), payload.size());
    tail_ += need;
    ++count_;
    return true;
  }

  std::optional<Message> Front() {
    if (count_ == 0) return std::nullopt;
    if (head_ == num_words_ || words_[head_] == kSkip) head_ = 0;
    Message message;
    std::memcpy(&message.header, &words_[head_ + 1], sizeof(message.header));
    message.payload =
        absl::MakeConstSpan(reinterpret_cast<const std::byte*>(&words_[head_ + kHeaderWords]),
                            static_cast<std::size_t>(words_[head_]));
    return message;
  }

  // Drops the message that Front() returned.
  void Pop() {
    head_ += WordsOf(static_cast<std::size_t>(words_[head_]));
    --count_;
  }

 private:
  static constexpr std::uint64_t kSkip = ~std::uint64_t{0};
  static constexpr std::size_t kHeaderWords = 1 + sizeof(CollectiveHeader) / 8;

  static constexpr std::size_t WordsOf(std::size_t payload_bytes) {
    return kHeaderWords + (payload_bytes + 7) / 8;
  }

  std::size_t num_words_;
  std::unique_ptr<std::uint64_t[]> words_;
  std::size_t head_ = 0;
  std::size_t tail_ = 0;
  std::size_t count_ = 0;
};

}  // namespace weft
