#include "server/tls.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include "absl/time/clock.h"
#include "fmt/format.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "server/base/check.h"
#include "server/grpc_server.h"
#include "server/grpc_status.h"
#include "tests/temp_dir.h"
#include "weft/v1/inference.grpc.pb.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

class Service : public v1::Inference::CallbackService {
  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context,
                                          const v1::GetServerInfoRequest*,
                                          v1::GetServerInfoResponse*) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }
};

class TlsTest : public ::testing::Test {
 protected:
  // Made once: keys take a while.
  static void SetUpTestSuite() {
    dir_ = new TempDir;
    const std::string command =
        fmt::format("{}/tests/data/make_certificates.sh {} 2> {}/log", WEFT_SOURCE_DIR,
                    dir_->path().string(), dir_->path().string());
    CHECK(std::system(command.c_str()) == 0);
  }
  static void TearDownTestSuite() {
    delete dir_;
    dir_ = nullptr;
  }

  static std::string File(const std::string& name) { return dir_->path() / name; }
  // "" for none.
  static TlsFiles Files(const std::string& name, const std::string& ca) {
    return {.certfile = name.empty() ? "" : File(name + ".pem"),
            .keyfile = name.empty() ? "" : File(name + ".key"),
            .ca_certs = ca.empty() ? "" : File(ca + ".pem")};
  }
  static void Copy(const std::string& from, const std::string& to) {
    // A new file in its place, as Kubernetes and certbot do.
    fs::copy_file(File(from), File(to + ".new"), fs::copy_options::overwrite_existing);
    fs::rename(File(to + ".new"), File(to));
  }

  void Serve(const TlsFiles& tls) {
    auto server = GrpcServer::Start({.listen_addresses = {"127.0.0.1:0"}, .tls = tls}, {&service_});
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  // A client with a channel of its own.
  std::unique_ptr<v1::Inference::Stub> Client(const TlsFiles& tls) {
    auto credentials = NewClientCredentials(tls);
    EXPECT_TRUE(credentials.ok()) << credentials.status();
    return v1::Inference::NewStub(
        NewGrpcChannel(server_->addresses()[0], {.credentials = *credentials}));
  }
  static absl::Status Call(v1::Inference::Stub& stub, bool wait_for_ready = false) {
    grpc::ClientContext context;
    context.set_wait_for_ready(wait_for_ready);
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    v1::GetServerInfoResponse response;
    return FromGrpcStatus(stub.GetServerInfo(&context, {}, &response));
  }
  absl::Status CallWith(const TlsFiles& tls) { return Call(*Client(tls)); }

  static TempDir* dir_;
  Service service_;
  std::unique_ptr<GrpcServer> server_;
};

TempDir* TlsTest::dir_ = nullptr;

TEST_F(TlsTest, ClientsKnowTheServerByTheCa) {
  Serve(Files("server", ""));
  EXPECT_EQ(CallWith(Files("", "ca")), absl::OkStatus());
  EXPECT_EQ(CallWith(Files("client", "ca")), absl::OkStatus()) << "not asked for, not harmful";
  EXPECT_TRUE(absl::IsUnavailable(CallWith(Files("", "other-ca"))));
  EXPECT_TRUE(absl::IsUnavailable(CallWith(TlsFiles()))) << "plaintext";
}

TEST_F(TlsTest, AServerWithCasWantsAClientCertificateOfOne) {
  Serve(Files("server", "ca"));
  const auto good = Client(Files("client", "ca"));
  EXPECT_EQ(Call(*good), absl::OkStatus());
  for (const char* name : {"", "foreign", "expired"}) {
    EXPECT_TRUE(absl::IsUnavailable(CallWith(Files(name, "ca")))) << "certificate: " << name;
  }
  EXPECT_TRUE(absl::IsUnavailable(CallWith(TlsFiles())));
  EXPECT_EQ(Call(*good), absl::OkStatus()) << "the others' failures are theirs";
}

TEST_F(TlsTest, AnExpiredServerIsRefused) {
  Serve(Files("expired", ""));
  EXPECT_TRUE(absl::IsUnavailable(CallWith(Files("", "ca"))));
}

TEST_F(TlsTest, APlainServerIsNoneForAClientOfTls) {
  Serve(TlsFiles());
  EXPECT_TRUE(absl::IsUnavailable(CallWith(Files("", "ca"))));
  EXPECT_EQ(CallWith(TlsFiles()), absl::OkStatus());
}

TEST_F(TlsTest, NewCertificatesAreTakenAndOpenConnectionsStay) {
  for (const char* end : {".pem", ".key"})
    Copy("server" + std::string(end), "live" + std::string(end));
  Copy("ca.pem", "live-ca.pem");
  Serve(Files("live", "live-ca"));
  const auto old_client = Client(Files("client", "ca"));
  ASSERT_EQ(Call(*old_client), absl::OkStatus());

  // Both the certificate and the CAs of clients become another's.
  for (const char* end : {".pem", ".key"})
    Copy("foreign" + std::string(end), "live" + std::string(end));
  Copy("other-ca.pem", "live-ca.pem");
  EXPECT_EQ(CallWith(Files("foreign", "other-ca")), absl::OkStatus());
  EXPECT_TRUE(absl::IsUnavailable(CallWith(Files("client", "ca"))));
  EXPECT_EQ(Call(*old_client), absl::OkStatus());
}

TEST_F(TlsTest, NewFilesThatDoNotFitLeaveTheOldOnes) {
  for (const char* end : {".pem", ".key"})
    Copy("server" + std::string(end), "live" + std::string(end));
  Serve(Files("live", ""));
  ASSERT_EQ(CallWith(Files("", "ca")), absl::OkStatus());
  Copy("server2.key", "live.key");  // the first half of a change
  EXPECT_EQ(CallWith(Files("", "ca")), absl::OkStatus());
  std::ofstream(File("live.pem")) << "nonsense";
  EXPECT_EQ(CallWith(Files("", "ca")), absl::OkStatus());
  fs::remove(File("live.pem"));
  EXPECT_EQ(CallWith(Files("", "ca")), absl::OkStatus());
  Copy("server2.pem", "live.pem");
  EXPECT_EQ(CallWith(Files("", "ca")), absl::OkStatus());
}

TEST_F(TlsTest, AClientTakesNewFilesToo) {
  for (const char* end : {".pem", ".key"})
    Copy("foreign" + std::string(end), "live" + std::string(end));
  Copy("other-ca.pem", "live-ca.pem");
  Serve(Files("server", "ca"));
  const auto client = Client(Files("live", "live-ca"));
  ASSERT_TRUE(absl::IsUnavailable(Call(*client)));
  for (const char* end : {".pem", ".key"})
    Copy("client" + std::string(end), "live" + std::string(end));
  Copy("ca.pem", "live-ca.pem");
  EXPECT_EQ(Call(*client, /*wait_for_ready=*/true), absl::OkStatus());
}

TEST_F(TlsTest, TwoAddressesBothTakeANewCertificate) {
  for (const char* end : {".pem", ".key"})
    Copy("server" + std::string(end), "live" + std::string(end));
  auto server = GrpcServer::Start(
      {.listen_addresses = {"127.0.0.1:0", "127.0.0.1:0"}, .tls = Files("live", "")}, {&service_});
  ASSERT_TRUE(server.ok()) << server.status();
  for (const char* end : {".pem", ".key"})
    Copy("foreign" + std::string(end), "live" + std::string(end));
  for (const std::string& address : (*server)->addresses()) {
    const auto stub = v1::Inference::NewStub(
        NewGrpcChannel(address, {.credentials = *NewClientCredentials(Files("", "other-ca"))}));
    EXPECT_EQ(Call(*stub), absl::OkStatus()) << address;
  }
}

TEST_F(TlsTest, FilesThatCannotBeUsedAreNamed) {
  std::ofstream(File("empty.pem")) << "";
  const std::string command = fmt::format("openssl ec -aes128 -passout pass:x -in {} -out {} 2> {}",
                                          File("server.key"), File("locked.key"), File("log"));
  ASSERT_EQ(std::system(command.c_str()), 0);
  const auto server = [](TlsFiles files) {
    return std::string(NewServerCredentials(files).status().message());
  };
  const TlsFiles good = Files("server", "ca");
  const auto with = [&good](std::string TlsFiles::*member, const std::string& path) {
    TlsFiles files = good;
    files.*member = path;
    return files;
  };
  EXPECT_EQ(server(good), "");
  EXPECT_THAT(server(with(&TlsFiles::certfile, "")), HasSubstr("needs --ssl-certfile"));
  EXPECT_THAT(server(with(&TlsFiles::keyfile, "")), HasSubstr("needs --ssl-keyfile"));
  EXPECT_THAT(server(with(&TlsFiles::certfile, "/none")),
              AllOf(HasSubstr("--ssl-certfile: /none"), HasSubstr("No such file")));
  EXPECT_THAT(server(with(&TlsFiles::keyfile, File(""))), HasSubstr("--ssl-keyfile"));
  EXPECT_THAT(server(with(&TlsFiles::certfile, File("empty.pem"))),
              HasSubstr("no certificate in PEM"));
  EXPECT_THAT(server(with(&TlsFiles::ca_certs, File("server.key"))),
              AllOf(HasSubstr("--ssl-ca-certs"), HasSubstr("no certificate in PEM")));
  EXPECT_THAT(server(with(&TlsFiles::keyfile, File("locked.key"))),
              HasSubstr("without a passphrase"));
  EXPECT_THAT(server(with(&TlsFiles::keyfile, File("client.key"))),
              AllOf(HasSubstr("is not the key of"), HasSubstr("server.pem")));
  EXPECT_THAT(server(Files("", "ca")), HasSubstr("needs --ssl-certfile and --ssl-keyfile"));
  TlsFiles client = Files("server", "");
  client.flag_prefix = "--worker-";
  EXPECT_THAT(std::string(NewClientCredentials(client).status().message()),
              HasSubstr("need --worker-ssl-ca-certs"));
}

}  // namespace
}  // namespace weft
