#include "server/tls.h"

#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <array>
#include <cstdint>
#include <utility>

#include "fmt/format.h"
#include "grpc/grpc.h"
#include "grpc/grpc_security.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/security/tls_certificate_provider.h"
#include "grpcpp/security/tls_credentials_options.h"
#include "server/base/log.h"
#include "server/base/mutex.h"
#include "server/base/read_file.h"
#include "server/base/status_macros.h"

namespace weft {
namespace {

constexpr std::uintmax_t kMaxPemBytes = std::uintmax_t{4} << 20;
constexpr unsigned kClientRefreshSeconds = 1;

// Before anybody else starts OpenSSL: threads of gRPC use it for as long as the process lives, also
// while it exits, when OpenSSL would free what they use (seen with ASan, at 1 in 50 exits).
[[maybe_unused]] const int kNoCleanUpAtExit = OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr);

struct Pem {
  std::string certificate;
  std::string key;
  std::string ca_certs;
};

using Bio = std::unique_ptr<BIO, decltype(&BIO_free)>;
using Certificate = std::unique_ptr<X509, decltype(&X509_free)>;
using Key = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;

Bio Memory(const std::string& pem) {
  return Bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())), BIO_free);
}

Certificate ParseCertificate(const std::string& pem) {
  Certificate certificate(PEM_read_bio_X509(Memory(pem).get(), nullptr, nullptr, nullptr),
                          X509_free);
  ERR_clear_error();
  return certificate;
}

// Null also for one with a passphrase: OpenSSL would ask the terminal.
Key ParseKey(const std::string& pem) {
  const auto no_passphrase = [](char*, int, int, void*) { return -1; };
  Key key(PEM_read_bio_PrivateKey(Memory(pem).get(), nullptr, no_passphrase, nullptr),
          EVP_PKEY_free);
  ERR_clear_error();
  return key;
}

absl::Status Unusable(const TlsFiles& files, std::string_view flag, const std::string& path,
                      std::string_view why) {
  return absl::InvalidArgumentError(
      fmt::format("{}{} is \"{}\": {}", files.flag_prefix, flag, path, why));
}

absl::StatusOr<std::string> ReadPem(const TlsFiles& files, std::string_view flag,
                                    const std::string& path) {
  absl::StatusOr<std::string> text = ReadFile(path, kMaxPemBytes);
  if (text.ok()) return text;
  return absl::InvalidArgumentError(
      fmt::format("{}{}: {}", files.flag_prefix, flag, std::string(text.status().message())));
}

absl::StatusOr<Pem> ReadFiles(const TlsFiles& files) {
  Pem pem;
  if (files.certfile.empty() != files.keyfile.empty()) {
    return absl::InvalidArgumentError(
        fmt::format("{0}ssl-{1} needs {0}ssl-{2}: a certificate and its key go together",
                    files.flag_prefix, files.certfile.empty() ? "keyfile" : "certfile",
                    files.certfile.empty() ? "certfile" : "keyfile"));
  }
  if (!files.certfile.empty()) {
    ASSIGN_OR_RETURN(pem.certificate, ReadPem(files, "ssl-certfile", files.certfile));
    ASSIGN_OR_RETURN(pem.key, ReadPem(files, "ssl-keyfile", files.keyfile));
    const Certificate certificate = ParseCertificate(pem.certificate);
    if (certificate == nullptr) {
      return Unusable(files, "ssl-certfile", files.certfile, "no certificate in PEM is in it");
    }
    const Key key = ParseKey(pem.key);
    if (key == nullptr) {
      return Unusable(files, "ssl-keyfile", files.keyfile,
                      "no private key in PEM without a passphrase is in it");
    }
    if (X509_check_private_key(certificate.get(), key.get()) != 1) {
      ERR_clear_error();
      return Unusable(files, "ssl-keyfile", files.keyfile,
                      fmt::format("it is not the key of the certificate in \"{}\" ({}ssl-certfile)",
                                  files.certfile, files.flag_prefix));
    }
    if (X509_cmp_current_time(X509_get0_notAfter(certificate.get())) < 0) {
      spdlog::warn("the certificate in {} has expired", files.certfile);
    }
  }
  if (!files.ca_certs.empty()) {
    ASSIGN_OR_RETURN(pem.ca_certs, ReadPem(files, "ssl-ca-certs", files.ca_certs));
    if (ParseCertificate(pem.ca_certs) == nullptr) {
      return Unusable(files, "ssl-ca-certs", files.ca_certs, "no certificate in PEM is in it");
    }
  }
  return pem;
}

// gRPC's C++ interface has no server credentials that keep what they have when new files do not
// fit together; its C interface does: it asks before each handshake.
//
// Of one listening address: each has to hear of a change by itself.
class ReloadingServerCredentials final : public grpc::ServerCredentials {
 public:
  explicit ReloadingServerCredentials(const TlsFiles& files) : files_(files) {
    const auto client_certificate =
        files.ca_certs.empty() ? GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE
                               : GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY;
    credentials_ = grpc_ssl_server_credentials_create_with_options(
        grpc_ssl_server_credentials_create_options_using_config_fetcher(client_certificate, Fetch,
                                                                        this));
  }
  ~ReloadingServerCredentials() override { grpc_server_credentials_release(credentials_); }

  void SetAuthMetadataProcessor(const std::shared_ptr<grpc::AuthMetadataProcessor>&) override {}

 private:
  int AddPortToServer(const std::string& address, grpc_server* server) override {
    return grpc_server_add_http2_port(server, address.c_str(), credentials_);
  }

  static grpc_ssl_certificate_config_reload_status Fetch(
      void* self, grpc_ssl_server_certificate_config** config) {
    return static_cast<ReloadingServerCredentials*>(self)->Fetch(config);
  }

  grpc_ssl_certificate_config_reload_status Fetch(grpc_ssl_server_certificate_config** config) {
    MutexLock lock(mutex_);
    // Before reading: a file that changes meanwhile is read again.
    const std::array<FileStamp, 3> stamps = {StampFile(files_.certfile), StampFile(files_.keyfile),
                                             StampFile(files_.ca_certs)};
    if (stamps == stamps_) return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
    const bool first = stamps_ == std::array<FileStamp, 3>{};
    stamps_ = stamps;
    const absl::StatusOr<Pem> pem = ReadFiles(files_);
    if (!pem.ok()) {
      spdlog::warn("TLS goes on with the certificate it has: {}",
                   std::string(pem.status().message()));
      return first ? GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_FAIL
                   : GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
    }
    if (!first) spdlog::info("TLS takes the new certificate in {}", files_.certfile);
    const grpc_ssl_pem_key_cert_pair pair = {.private_key = pem->key.c_str(),
                                             .cert_chain = pem->certificate.c_str()};
    // gRPC insists on some, also where it does not ask clients for a certificate.
    const std::string& roots = pem->ca_certs.empty() ? pem->certificate : pem->ca_certs;
    *config = grpc_ssl_server_certificate_config_create(roots.c_str(), &pair, 1);
    return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
  }

  const TlsFiles files_;
  grpc_server_credentials* credentials_;
  Mutex mutex_;
  std::array<FileStamp, 3> stamps_ ABSL_GUARDED_BY(mutex_) = {};  // of what was read last
};

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> NewServerCredentials(
    const TlsFiles& files) {
  if (files.empty()) return grpc::InsecureServerCredentials();
  if (files.certfile.empty() && files.keyfile.empty()) {
    return absl::InvalidArgumentError(
        fmt::format("{0}ssl-ca-certs needs {0}ssl-certfile and {0}ssl-keyfile: a server shows a "
                    "certificate of its own",
                    files.flag_prefix));
  }
  RETURN_IF_ERROR(ReadFiles(files).status());
  return std::make_shared<ReloadingServerCredentials>(files);
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> NewClientCredentials(
    const TlsFiles& files) {
  if (files.empty()) return nullptr;
  if (files.ca_certs.empty()) {
    return absl::InvalidArgumentError(
        fmt::format("{0}ssl-certfile and {0}ssl-keyfile need {0}ssl-ca-certs: a client has to know "
                    "the server by something",
                    files.flag_prefix));
  }
  RETURN_IF_ERROR(ReadFiles(files).status());
  grpc::experimental::TlsChannelCredentialsOptions options;
  options.set_certificate_provider(
      std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
          files.keyfile, files.certfile, files.ca_certs, kClientRefreshSeconds));
  options.watch_root_certs();
  if (!files.certfile.empty()) options.watch_identity_key_cert_pairs();
  return grpc::experimental::TlsCredentials(options);
}

}  // namespace weft
