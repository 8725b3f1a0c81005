#include <cstddef>
#include <cstdint>
#include <memory>

#include "router/sample_output.h"
#include "router/text/utf8.h"
#include "router/validate.h"
#include "server/base/check.h"
#include "tests/router/byte_tokenizer.h"
#include "weft/v1/inference.pb.h"

namespace {

// Every message's text is UTF-8, and usage counts the tokens.
void ReadAll(const weft::Tokenizer& tokenizer, const weft::v1::GenerateRequest& request) {
  weft::SampleOutput output(&tokenizer, request.sampling(), 0, 1);
  weft::v1::GenerateResponse message;
  if (output.Resume(request.resume().ids(), message)) return;
  std::int32_t tokens = request.resume().ids_size();
  const std::string& text = request.text();  // stands for what the model says
  for (std::size_t at = 0; at <= text.size() && !output.finished(); at += 3) {
    weft::v1::WorkerGenerateResponse response;
    for (const char c : text.substr(at, 3)) {
      response.add_token_ids(static_cast<unsigned char>(c));
      response.add_logprobs();
    }
    const bool last = at + 3 > text.size();
    response.set_finish_reason(!last         ? weft::v1::FINISH_REASON_UNSPECIFIED
                               : at % 2 == 0 ? weft::v1::FINISH_REASON_LENGTH
                                             : weft::v1::FINISH_REASON_STOP);
    message.Clear();
    if (!output.Read(response, message)) continue;
    tokens += message.token_ids_size();
    CHECK(message.logprobs_size() == message.token_ids_size());
    CHECK(message.usage().completion_tokens() == tokens);
    CHECK(!weft::FindInvalidUtf8(message.text()).has_value());
    CHECK(output.finished() == (message.finish_reason() != weft::v1::FINISH_REASON_UNSPECIFIED));
  }
  CHECK(output.finished());
}

}  // namespace

// A request that passes as valid is one that the router can serve.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const std::unique_ptr<weft::Tokenizer> tokenizer = weft::ByteTokenizer();
  weft::v1::GenerateRequest request;
  if (!request.ParseFromArray(data, static_cast<int>(size))) return 0;
  weft::RequestLimits limits;
  limits.served_model_name = request.model();
  if (!weft::ValidateRequest(request, limits).ok()) return 0;
  const weft::v1::SamplingParams& sampling = request.sampling();
  CHECK(sampling.n() >= 0 && sampling.n() <= limits.max_n);
  CHECK(sampling.min_tokens() >= 0 && sampling.logprobs() >= 0);
  CHECK(sampling.temperature() >= 0 && sampling.min_p() >= 0 && sampling.min_p() <= 1);
  const std::int32_t prompt[] = {0};
  (void)weft::ValidateTokens(prompt, request.resume().ids(), sampling, 257);
  if (request.has_text()) ReadAll(*tokenizer, request);
  return 0;
}
