#pragma once

#include <string>
#include <string_view>

#include "server/options.h"

namespace weft {

// The PEM files of one end of TLS connections. None: no TLS.
struct TlsFiles {
  std::string certfile;  // the certificate, followed by those between it and a CA
  std::string keyfile;   // of the certificate; without a passphrase
  std::string ca_certs;  // the other end shows a certificate of one of these
  std::string flag_prefix = "--";

  // Adds --ssl-certfile, --ssl-keyfile and --ssl-ca-certs, with the prefix: "--worker-" for
  // --worker-ssl-certfile.
  void AddTo(OptionParser& parser, std::string_view prefix, std::string_view certfile_help,
             std::string_view ca_certs_help);

  bool empty() const { return certfile.empty() && keyfile.empty() && ca_certs.empty(); }
};

}  // namespace weft
